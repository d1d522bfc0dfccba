"""Shows how the tests go, holds them to the guards, and counts."""

from __future__ import annotations

import faulthandler
import time
import traceback
from typing import Any

from twisted.python.failure import Failure
from twisted.trial.reporter import Reporter
from twisted.trial.unittest import TestCase

from tests.harness import leaks
from tests.harness.blocking import Guard

STUCK = 300.0  # seconds after which a test that still runs has all threads' stacks shown


class BlockedReactor(Exception):
    """A callback kept the reactor from its work for longer than is allowed."""


class LeftBehind(Exception):
    """Something that the test started was still there after it."""


class Outcomes:
    """What became of each test. A test that failed in any way failed, whatever else it did."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}  # with what was said of it
        self.skipped: dict[str, str] = {}
        self.passed: dict[str, None] = {}
        self.blocked: dict[str, None] = {}  # failed for having blocked the reactor, and for nothing else

    def forgive(self, test: str) -> None:
        """`test` did not block the reactor when it ran again by itself."""
        del self.failed[test]
        self.passed[test] = None

    def counts(self) -> tuple[int, int, int]:
        """How many passed, failed, were skipped."""
        skipped = self.skipped.keys() - self.failed.keys()
        passed = self.passed.keys() - self.failed.keys() - skipped
        return len(passed), len(self.failed), len(skipped)

    def word(self, test: str) -> str:
        """How `test` ended."""
        if test in self.failed:
            return "FAILED"
        if test in self.skipped:
            return f"skipped: {self.skipped[test]}"
        return "ok" if test in self.passed else "FAILED (no result)"

    @property
    def good(self) -> bool:
        """Something passed and nothing failed."""
        passed, failed, _skipped = self.counts()
        return passed > 0 and failed == 0

    def closing_line(self) -> str:
        """The last line of a run."""
        passed, failed, skipped = self.counts()
        return f"{passed} passed, {failed} failed, {skipped} skipped"


class GuardedReporter(Reporter):
    """One line per test, tracebacks as they come, and the guards' complaints as the test's errors."""

    def __init__(self, *args: Any, outcomes: Outcomes, guard: Guard, slowest: int) -> None:
        super().__init__(*args)
        self.outcomes = outcomes
        self.guard = guard
        self.slowest = slowest
        self.seconds: dict[str, float] = {}
        self._started = 0.0
        self._before = leaks.holdings()

    # -- one test

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self._write(f"{test.id()} ... ")
        self._before = leaks.holdings()
        self._started = time.monotonic()
        faulthandler.dump_traceback_later(STUCK, repeat=True, file=2)
        if isinstance(test, TestCase):
            self.guard.release(test)

    def stopTest(self, test: Any) -> None:
        faulthandler.cancel_dump_traceback_later()
        took = self.seconds[test.id()] = time.monotonic() - self._started
        blocked = self.guard.take()
        if blocked:
            if test.id() not in self.outcomes.failed:
                self.outcomes.blocked[test.id()] = None
            self.addError(test, Failure(BlockedReactor("; ".join(map(str, blocked)))))
        left = leaks.left_behind(self._before)
        if left:
            self.outcomes.blocked.pop(test.id(), None)
            self.addError(test, Failure(LeftBehind("left behind: " + ", ".join(left))))
        if test.id() not in self.outcomes.passed | self.outcomes.skipped | self.outcomes.failed:
            self.outcomes.failed[test.id()] = "It ended without a result."
        self._writeln(f"{self.outcomes.word(test.id())} ({took:.2f} s)")
        super().stopTest(test)

    def addSuccess(self, test: Any) -> None:
        super().addSuccess(test)
        self.outcomes.passed[test.id()] = None

    def addExpectedFailure(self, test: Any, error: Any, todo: Any = None) -> None:
        super().addExpectedFailure(test, error, todo)
        self.outcomes.passed[test.id()] = None

    def addUnexpectedSuccess(self, test: Any, todo: Any = None) -> None:
        super().addUnexpectedSuccess(test, todo)
        self._fail(test, "It was expected to fail, and passed.\n")

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self.outcomes.skipped[test.id()] = reason

    def addFailure(self, test: Any, fail: Any) -> None:
        super().addFailure(test, fail)
        self._fail(test, self._words(self.failures[-1][1]))

    def addError(self, test: Any, error: Any) -> None:
        super().addError(test, error)
        self._fail(test, self._words(self.errors[-1][1]))

    def _words(self, failure: Any) -> str:
        """The traceback, and what Twisted leaves out of it: notes (Hypothesis' example) and groups."""
        error = failure.value
        words: str = self._formatFailureTraceback(failure)
        if isinstance(error, BaseExceptionGroup):
            return words + "".join(traceback.format_exception(error))
        return "\n".join([words, *getattr(error, "__notes__", ())])

    def _fail(self, test: Any, words: str) -> None:
        self.outcomes.failed[test.id()] = self.outcomes.failed.get(test.id(), "") + words
        # A module that can't be imported is no test that was started, so its name comes here.
        self._writeln(f"\n{test.id()} failed:\n{words}")

    # -- the end

    def _printErrors(self) -> None:
        """Each was shown when it came."""

    def done(self) -> None:
        super().done()
        if self.slowest:
            self._writeln(f"\nThe slowest {self.slowest}:")
            for name, took in sorted(self.seconds.items(), key=lambda pair: -pair[1])[: self.slowest]:
                self._writeln(f"{took:8.2f} s  {name}")
        self._writeln("")
