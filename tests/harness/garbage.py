# SPDX-License-Identifier: Apache-2.0
"""Tells errors of coroutines that garbage collection has closed from errors of the test that runs by then.

A test may end while coroutines of it still wait, as for a clock that goes no further. Garbage collection,
which may come many tests later, closes them one by one. If one of them cancels in its clean-up what another
was waiting for (``finally: call.cancel()``), Twisted throws CancelledError into that other one, and logs what
comes of it: "cannot reuse already awaited coroutine". In a program, nothing that waits becomes garbage.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from twisted.python.failure import Failure
from twisted.trial import _synctest

_MESSAGE = "cannot reuse already awaited coroutine"
_THROWING = "throwExceptionIntoGenerator"  # Twisted's function; the coroutine itself has no frame any more


def is_of_garbage(failure: Failure) -> bool:
    """Return whether a failure is of a coroutine that had ended before an error was thrown into it."""
    frames = [frame[0] for frame in failure.frames]
    return (
        isinstance(failure.value, RuntimeError)
        and str(failure.value) == _MESSAGE
        and frames[-1:] == [_THROWING]
    )


def leave_garbage_out() -> None:
    """Have trial fail no test for such an error. Idempotent."""
    original = _synctest._LogObserver.gotEvent
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def got_event(self: _synctest._LogObserver, event: Mapping[str, Any]) -> None:  # Any: as Twisted logs it
        failure = event.get("failure")
        if not (isinstance(failure, Failure) and is_of_garbage(failure)):
            original(self, event)

    setattr(_synctest._LogObserver, "gotEvent", got_event)  # noqa: B010 - a method
