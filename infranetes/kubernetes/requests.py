# SPDX-License-Identifier: Apache-2.0
"""What the API server can be asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol


class Refused(Exception):
    """The server answered with an error. :ivar status: its HTTP status."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(f"the API server answers {status}: {why}")
        self.status = status


class Requests(Protocol):
    """Requests to one API server; `api_server.ApiServer` makes them.

    :raise Refused: each does, if the server answers with an error.
    :raise Unavailable: each does, if the server can't be reached or is silent, or the answer breaks off.
    :raise FailedPrecondition: each does, if the kubeconfig can't be used."""

    async def cluster(self) -> str:
        """Return what distinguishes its cluster from others. No request is made."""

    async def lines(self, path: str, query: Mapping[str, str], take: Callable[[bytes], None]) -> None:
        """Make a GET request and pass each line of the answer to `take`, until the answer ends."""

    async def pieces(self, path: str, query: Mapping[str, str], take: Callable[[bytes], None]) -> None:
        """Make a GET request and pass the answer to `take` as it arrives."""

    async def create(self, path: str, document: object) -> None:
        """Create an object from JSON. Fails with `Refused` and 409 if an object of the name exists."""

    async def merge(self, path: str, document: object) -> None:
        """Change an object by a strategic merge patch in JSON. Idempotent."""
