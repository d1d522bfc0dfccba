"""Work that goes on when whoever asked for it goes away: a call to a cloud can't be taken back."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, DeferredLock, succeed
from twisted.python.failure import Failure

from infranetes_common.errors import Unavailable

T = TypeVar("T")


class Works:
    """All that a provider is doing."""

    def __init__(self) -> None:
        self._running: set[Deferred[Any]] = set()
        self._locks: dict[str, DeferredLock] = {}
        self._stopped = False
        self.deserted: set[str] = set()  # keys of work that nobody waits for any more

    def begin(self, work: Coroutine[Any, Any, T], key: str = "") -> Deferred[T]:
        """Run `work` to its end. What is returned may be cancelled: the work is not."""
        if self._stopped:
            work.close()
            stopped: Deferred[T] = Deferred()
            stopped.errback(Unavailable("the provider is stopped"))
            return stopped
        running = Deferred.fromCoroutine(work)
        self._running.add(running)

        def desert(_: Deferred[T]) -> None:
            if key:
                self.deserted.add(key)

        waiting: Deferred[T] = Deferred(desert)

        def done(result: Any) -> None:
            self._running.discard(running)
            self.deserted.discard(key)
            if isinstance(result, Failure) and self._stopped:
                result = Failure(Unavailable("the provider was stopped meanwhile"))
            if not waiting.called:
                waiting.callback(result)

        running.addBoth(done)
        return waiting

    async def one_at_a_time(self, key: str, work: Coroutine[Any, Any, T]) -> T:
        """`work` when what is under way for the same key has ended."""
        lock = self._locks.setdefault(key, DeferredLock())
        try:
            await lock.acquire()
        except BaseException:
            work.close()
            raise
        try:
            return await work
        finally:
            lock.release()
            if not lock.locked:
                self._locks.pop(key, None)

    def busy(self) -> list[str]:
        """The keys that something is under way for."""
        return list(self._locks)

    async def free(self, key: str) -> None:
        """Until nothing that is under way for `key` now goes on."""

        async def nothing() -> None:
            await succeed(None)

        await self.one_at_a_time(key, nothing())

    def stop(self) -> None:
        """Cancel all work; whoever waits is told. Nothing new is begun."""
        self._stopped = True
        for running in list(self._running):
            running.cancel()
