# SPDX-License-Identifier: Apache-2.0
"""The delegate's events, told to those who listen to ours: one stream, however many listen.

containerd up to 2.0 gives each event to one of its listeners only. When the stream ends, so do those of all
listeners: they list anew, and listen again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Protocol

from twisted.internet.defer import CancelledError, Deferred

from infranetes.delegate.channel import Delegate
from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import IReactor

EVENTS = "/runtime.v1.RuntimeService/GetContainerEvents"


class Listeners(Protocol):
    """The clients that stream our own events."""

    def tell(self, event: bytes) -> None:
        """Pass an event, a ContainerEventResponse, to all of them."""

    def end(self, error: Exception) -> None:
        """End all of their streams."""


class DelegateEvents:
    """Streams the delegate's events as long as any client streams ours."""

    def __init__(self, reactor: IReactor, delegate: Delegate, listeners: Listeners) -> None:
        self._reactor = reactor
        self._delegate = delegate
        self._listeners = listeners
        self._count = 0
        self._following: Deferred[None] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Pass the delegate's events on to our listeners until the end of the block."""
        self._count += 1
        if self._following is None:
            self._following = start(self._follow())
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self.stop()

    def stop(self) -> None:
        """Stop listening."""
        following, self._following = self._following, None
        if following is not None:
            following.cancel()

    async def _follow(self) -> None:
        try:
            await sleep(self._reactor, 0)  # until the first listener listens
            async with aclosing(self._delegate.stream(EVENTS, b"")) as events:
                async for event in events:
                    if not self._delegate.hidden.is_shadow(event):
                        self._listeners.tell(event)
            error: Exception = Unavailable("the delegate has ended its events: list again, then listen again")
        except CancelledError:
            return
        except Exception as raised:  # the delegate's status, or why an event of it can't be read
            error = raised
        self._following = None
        self._listeners.end(error)
