# SPDX-License-Identifier: Apache-2.0
"""Observers that follow a channel's calls, such as for traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from txgrpc.metadata import Metadata
from txgrpc.service import Method
from txgrpc.status import GrpcError


class Observed(Protocol):
    """What follows one call."""

    @property
    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """Metadata that is sent besides the call's own."""

    def ended(self, error: GrpcError | None, trailing: Metadata) -> None:
        """Be told, once, how the call ended. It must not fail.

        :param error: None: it ended with OK.
        :param trailing: what the server sent with the status."""


Observer = Callable[[Method], Observed | None]
"""``observer(method)`` is called when a call is made; it returns what follows the call, or None."""
