# SPDX-License-Identifier: Apache-2.0
"""The interface of an observer that follows a channel's calls, for instance to trace them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from txgrpc.metadata import Metadata
from txgrpc.service import Method
from txgrpc.status import GrpcError


class Observed(Protocol):
    """The observer of one call."""

    @property
    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """Return the metadata to send in addition to the call's own."""

    def ended(self, error: GrpcError | None, trailing: Metadata) -> None:
        """Called once when the call has ended, with `error`, or None for OK. It must not fail.

        :param trailing: the metadata that the server sent with the status."""


Observer = Callable[[Method], Observed | None]
"""``observer(method)`` is called when a call is made; it returns what follows the call, or None."""
