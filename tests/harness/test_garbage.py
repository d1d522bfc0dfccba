# SPDX-License-Identifier: Apache-2.0
"""Coroutines that tests have left behind fail no later test, and other errors do."""

from __future__ import annotations

import gc
from collections.abc import Callable, Coroutine
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import cancellable, start
from tests.harness.garbage import is_of_garbage

_log = Logger()


class _Two:
    """A coroutine that waits, and one that cancels the first in its clean-up.

    The first is not a test's own, for which the harness has a coroutine of its own around it."""

    def __init__(self) -> None:
        self.waiting = start(cancellable(Deferred[None]()))
        self.cleaning = start(self._clean_up())

    async def _clean_up(self) -> None:
        try:
            await Deferred[None]()
        finally:
            self.waiting.cancel()


def failure_of(coroutine: Callable[[], Coroutine[Any, Any, None]]) -> Failure:
    """Return what a coroutine fails with."""
    failures: list[Failure] = []
    start(coroutine()).addErrback(failures.append)
    [failure] = failures
    return failure


class GarbageTests(SynchronousTestCase):
    def test_what_an_earlier_test_has_left_waiting_fails_no_other(self) -> None:
        for _ in range(10):
            _Two()
        gc.collect()  # closes the coroutines
        gc.collect()  # frees their Deferreds, which log their errors now
        # Either may be closed first. Where the cleaning one is, the other gets its CancelledError as ever.
        for failure in self.flushLoggedErrors(CancelledError):
            self.assertIs(failure.type, CancelledError)

    def test_a_coroutine_that_had_ended_is_told_from_one_that_is_awaited_twice(self) -> None:
        event: Deferred[None] = Deferred()
        ended = cancellable(event)
        failures: list[Failure] = []
        start(ended).addErrback(failures.append)
        ended.close()
        event.errback(CancelledError())
        self.assertEqual([is_of_garbage(failure) for failure in failures], [True])

        async def await_again() -> None:
            await ended

        self.assertFalse(is_of_garbage(failure_of(await_again)))

    def test_other_errors_that_are_logged_fail_their_test(self) -> None:
        _log.failure("here", Failure(RuntimeError("cannot reuse already awaited coroutine")))
        _log.failure("and here", Failure(ValueError("x")))
        self.assertEqual(len(self.flushLoggedErrors()), 2)
