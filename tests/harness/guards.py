# SPDX-License-Identifier: Apache-2.0
"""The guards that watch every test, whichever runner runs it: `trial`, `python -m tests`, or their workers.

A test fails if a callback blocks the reactor while it runs (`blocking`), or if it leaves a process, a thread
or a listening socket behind (`leaks`). `tests.harness.trial` calls `guard_tests`, before any test is loaded.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import os
import unittest

from twisted.python.failure import Failure
from twisted.trial import _synctest
from twisted.trial.itrial import IReporter
from twisted.trial.reporter import TestResultDecorator
from twisted.trial.runner import TestSuite
from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface import implementer

from infranetes_common.reactors import installed
from tests.harness import garbage, leaks, registry, stalls
from tests.harness.blocking import BlockingGuard

STUCK_SECONDS = 300.0  # when a test runs longer, the stacks of all threads are printed
BEYOND_TIMEOUT = 60.0  # that a test with a longer time-out of its own has beyond that
LIMIT_VARIABLE = "INFRANETES_TEST_BLOCKED_MS"
DEFAULT_LIMIT = "50"


_ends_when_stuck = False


def end_when_stuck() -> None:
    """Have this process end when a test never does, after the stacks are printed; a worker's tests go on."""
    global _ends_when_stuck
    _ends_when_stuck = True


class BlockedReactor(Exception):
    """A callback kept the reactor busy for longer than is allowed."""


class LeftBehind(Exception):
    """Something that the test started was still there after it."""


@functools.cache
def blocking_guard() -> BlockingGuard:
    """Return the guard of this process's reactor, which the first call installs.

    The environment variable INFRANETES_TEST_BLOCKED_MS sets its limit, in milliseconds; 0: there is none.
    """
    from twisted.internet import reactor

    # The heap is mostly what has been imported. With the usual thresholds, up to a sixth of the time is spent
    # on scanning it.
    gc.set_threshold(10_000, 20, 20)
    guard = BlockingGuard(float(os.environ.get(LIMIT_VARIABLE, DEFAULT_LIMIT)), stalls.watch())
    guard.install(reactor)
    atexit.register(guard.close)
    return guard


@implementer(IReporter)
class GuardedReporter(TestResultDecorator):  # type: ignore[misc]  # its base is made at run time
    """Passes a test's results on to another reporter, and adds what the guards found as the test's errors.

    A success is passed on only at the test's end, if the guards found nothing.
    """

    def __init__(self, reporter: IReporter) -> None:
        super().__init__(reporter)
        self._guard = blocking_guard()
        self._before = leaks.Holdings({}, {}, {})
        self._succeeded = False

    def startTest(self, test: SynchronousTestCase) -> None:
        self._originalReporter.startTest(test)
        self._succeeded = False
        self._before = leaks.holdings()
        longest = float(getattr(test, "timeout", None) or 0) + BEYOND_TIMEOUT
        stuck = getattr(test, "stuck_seconds", max(STUCK_SECONDS, longest))
        faulthandler.dump_traceback_later(stuck, repeat=True, file=2, exit=_ends_when_stuck)
        if isinstance(test, TestCase):
            self._guard.exempt(test)

    def addSuccess(self, test: SynchronousTestCase) -> None:
        self._succeeded = True

    def stopTest(self, test: SynchronousTestCase) -> None:
        faulthandler.cancel_dump_traceback_later()
        errors: list[Exception] = []
        if blocked := self._guard.take():
            errors.append(BlockedReactor("; ".join(map(str, blocked))))
        if left := [*leaks.left_behind(self._before), *registry.closed_files(installed())]:
            errors.append(LeftBehind("left behind: " + ", ".join(left)))
        for error in errors:
            self._originalReporter.addError(test, Failure(error))
        if self._succeeded and not errors:
            self._originalReporter.addSuccess(test)
        self._originalReporter.stopTest(test)


def run_class_fixtures() -> None:
    """Have trial's suites call `setUpClass` and `tearDownClass` of each `TestCase`. Idempotent."""
    setattr(TestSuite, "run", unittest.TestSuite.run)  # noqa: B010 - a method


def guard_tests() -> None:
    """Make every test of this process report through a `GuardedReporter`. Idempotent."""
    original = SynchronousTestCase.run
    if getattr(original, "guarded", False):
        return

    @functools.wraps(original)
    def run(self: SynchronousTestCase, result: object) -> None:
        reporter = IReporter(result, None)
        original(self, result if reporter is None else GuardedReporter(reporter))

    garbage.leave_garbage_out()
    setattr(run, "guarded", True)  # noqa: B010 - a function
    setattr(SynchronousTestCase, "run", run)  # noqa: B010 - a method
    # trial forgets before each test which warnings every module has given, which takes a tenth of the tests'
    # own time. Since Python 3.4 that happens by itself when filters change, as they do for each test.
    setattr(_synctest, "_setWarningRegistryToNone", lambda modules: None)  # noqa: B010 - a function
