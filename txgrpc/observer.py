# SPDX-License-Identifier: Apache-2.0
"""Who follows a channel's calls, such as for traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from txgrpc.metadata import Metadata
from txgrpc.service import Method
from txgrpc.status import GrpcError


class Observed(Protocol):
    """One call that is followed."""

    @property
    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """What is sent along with the call's own metadata."""

    def ended(self, error: GrpcError | None, trailing: Metadata) -> None:
        """Hear, once, how the call ended: `error`, or None for OK. It must not fail.

        :param trailing: what the server sent with the status."""


Observer = Callable[[Method], Observed | None]
"""``observer(method)`` begins to follow a call when it is made; None: this one is not followed."""
