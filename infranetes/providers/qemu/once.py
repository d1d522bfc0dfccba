"""Something that happens once and that any number may wait for, before or after it has."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from twisted.internet.defer import Deferred

_T = TypeVar("_T")


class Once(Generic[_T]):
    """A value or an error to come. Only the first counts; an error that nobody waits for is no fault."""

    def __init__(self) -> None:
        self._value: Any = None
        self._error: Exception | None = None
        self.happened = False
        self._waiting: list[Deferred[_T]] = []

    def succeed(self, value: _T) -> None:
        """It came to `value`."""
        self._happen(value, None)

    def fail(self, error: Exception) -> None:
        """It came to `error`."""
        self._happen(None, error)

    def _happen(self, value: Any, error: Exception | None) -> None:
        if self.happened:
            return
        self.happened, self._value, self._error = True, value, error
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._tell(each)

    def wait(self) -> Deferred[_T]:
        """Fires with what it came to."""
        waiting: Deferred[_T] = Deferred()
        if self.happened:
            self._tell(waiting)
        else:
            self._waiting.append(waiting)
        return waiting

    def _tell(self, waiting: Deferred[_T]) -> None:
        if waiting.called:
            return  # cancelled
        if self._error is not None:
            waiting.errback(self._error)
        else:
            waiting.callback(self._value)
