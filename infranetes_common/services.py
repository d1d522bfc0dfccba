# SPDX-License-Identifier: Apache-2.0
"""A MultiService for services that take time to start: one starts after the other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from twisted.application.service import IService, MultiService, Service
from twisted.internet.defer import CancelledError, Deferred, maybeDeferred, succeed
from twisted.logger import Logger

from infranetes_common.concurrency.flight import deferred, start, until_ended

_log = Logger()


class OrderedServices(MultiService):
    """Services that are started one after the other, and stopped in the reverse order.

    As `MultiService`, but the `startService` of a service may return a Deferred: the next service is started
    once it has fired. Likewise each service is stopped only once those after it have stopped.

    If a service fails to start, it and those before it are stopped, and `startService` fails with its
    error. `stopService` during the start cancels the start first. So `stopService` of a service is called
    once for each call of its `startService`, whatever became of that.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._begun: list[IService] = []
        self._starting: Deferred[None] = succeed(None)

    def startService(self) -> Deferred[None]:
        """Start the services; fires when the last one has started."""
        Service.startService(self)
        self._starting = self._start()
        return self._starting

    @deferred
    async def _start(self) -> None:
        try:
            for service in self:
                self._begun.append(service)
                await maybeDeferred(service.startService)
        except (Exception, CancelledError):
            await until_ended(start(self._stop()))  # even if the start is cancelled meanwhile
            raise

    @deferred
    async def stopService(self) -> None:
        """Stop the services; fires when the first one has stopped. A failure is logged and stops no other."""
        Service.stopService(self)
        self._starting.cancel()
        await until_ended(self._starting)
        await self._stop()

    async def _stop(self) -> None:
        while self._begun:
            service = self._begun.pop()
            try:
                await maybeDeferred(service.stopService)
            except Exception:
                _log.failure("{service} failed to stop", service=service.name or type(service).__name__)


class StartStop(Service):
    """Calls a function when it starts, and one when it stops; either may return a Deferred or coroutine."""

    def __init__(
        self,
        on_start: Callable[[], Awaitable[None] | None] = lambda: None,
        on_stop: Callable[[], Awaitable[None] | None] = lambda: None,
    ) -> None:
        self._on_start = on_start
        self._on_stop = on_stop

    def startService(self) -> Deferred[None]:
        Service.startService(self)
        return start(_awaited(self._on_start))

    def stopService(self) -> Deferred[None]:
        Service.stopService(self)
        return start(_awaited(self._on_stop))


async def _awaited(call: Callable[[], Awaitable[None] | None]) -> None:
    result = call()
    if result is not None:
        await result
