# SPDX-License-Identifier: Apache-2.0
"""Something that happens once."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

from twisted.internet.defer import Deferred, succeed

from infranetes_common.concurrency.notifier import Notifier

T = TypeVar("T")


class Event(Generic[T]):
    """A value, or an error, that any number of callers may wait for, before and after it is set.

    Only the first `succeed` or `fail` counts. An error that nobody waits for is not reported. An
    `Event[None]` is a flag that is raised once.

    :ivar happened: True once the value or the error is set.
    """

    def __init__(self) -> None:
        self.happened = False
        self._value: T | None = None
        self._error: Exception | None = None
        self._notifier = Notifier()

    def succeed(self, value: T) -> None:
        """Set the value and wake all who wait. Idempotent."""
        if not self.happened:
            self.happened, self._value = True, value
            self._notifier.notify()

    def fail(self, error: Exception) -> None:
        """Set the error and raise it for all who wait. Idempotent."""
        if not self.happened:
            self.happened, self._error = True, error
            self._notifier.notify()

    def wait(self) -> Deferred[T]:
        """Fire with the value or the error, at once if it is there. Cancelling it only ends this wait."""
        waiting = succeed(None) if self.happened else self._notifier.wait()
        return waiting.addCallback(self._outcome)

    def _outcome(self, _: None) -> T:
        if self._error is not None:
            raise self._error
        return cast(T, self._value)
