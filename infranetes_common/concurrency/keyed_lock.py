# SPDX-License-Identifier: Apache-2.0
"""A lock per key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from twisted.internet.defer import DeferredLock

K = TypeVar("K", bound=Hashable)


class KeyedLock(Generic[K]):
    """A `DeferredLock` for each key that is in use; work on different keys does not wait for each other.

    ::

        async with self._locks.held(container_id):
            ...

    Keys need not be added or removed. For a single lock use `DeferredLock`, and `DeferredSemaphore` for at
    most N at once: both serve in order and are asynchronous context managers themselves.
    """

    def __init__(self) -> None:
        self._locks: dict[K, DeferredLock] = {}

    @asynccontextmanager
    async def held(self, key: K) -> AsyncIterator[None]:
        """Hold the key's lock for the block, once all earlier callers have released it.

        Cancelling the wait gives up the place in the queue. Not reentrant.
        """
        lock = self._locks.setdefault(key, DeferredLock())
        await lock.acquire()
        try:
            yield
        finally:
            lock.release()
            # Inside `release`, waiters for the lock may have run to their end, and a new lock may be in its
            # place.
            if not lock.locked and self._locks.get(key) is lock:
                del self._locks[key]

    def busy(self) -> list[K]:
        """Return the keys whose lock is held."""
        return list(self._locks)
