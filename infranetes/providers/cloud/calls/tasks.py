# SPDX-License-Identifier: Apache-2.0
"""Tasks: work that outlives its caller, because a call to a cloud can't be taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from twisted.internet.defer import Deferred, fail
from twisted.python.failure import Failure

from infranetes_common.concurrency import Coro, Flight, start
from infranetes_common.errors import Unavailable

T = TypeVar("T")


class Tasks:
    """All tasks of a provider. :ivar abandoned: keys of running tasks that nobody waits for any more."""

    def __init__(self) -> None:
        self._cancels: set[Callable[[], None]] = set()  # cancel running tasks
        self._stopped = False
        self.abandoned: set[str] = set()

    def start(self, work: Coro[T], key: str = "") -> Deferred[T]:
        """Start a task. Cancelling what is returned does not cancel the task.

        :param key: what is in `abandoned` while the task goes on without its caller; "": nothing."""
        if self._stopped:
            work.close()
            return fail(Unavailable("the provider is stopped"))
        running = start(work)
        self._cancels.add(running.cancel)

        def finish(result: T | Failure) -> T | Failure:
            self._cancels.discard(running.cancel)
            self.abandoned.discard(key)
            if isinstance(result, Failure) and self._stopped:
                return Failure(Unavailable("the provider was stopped meanwhile"))
            return result

        def abandon() -> None:
            if key:
                self.abandoned.add(key)

        running.addBoth(finish)
        return Flight(running, abandon).join()

    def stop(self) -> None:
        """Cancel all tasks, failing those who wait for them, and refuse new ones."""
        self._stopped = True
        for cancel in list(self._cancels):
            cancel()
