# SPDX-License-Identifier: Apache-2.0
"""The reporter of `python -m tests`: one line per test, and the traceback as soon as a test fails."""

from __future__ import annotations

import time
import traceback
from typing import Any

from twisted.python.failure import Failure
from twisted.trial.reporter import Reporter
from twisted.trial.unittest import SynchronousTestCase

from tests.harness.outcomes import Outcomes


class LineReporter(Reporter):
    """Prints how each test ends, and records it in `outcomes`."""

    def __init__(self, *args: Any, outcomes: Outcomes) -> None:  # Any: as in trial
        super().__init__(*args)
        self.outcomes = outcomes
        self._started = 0.0

    # -- one test

    def startTest(self, test: SynchronousTestCase) -> None:
        super().startTest(test)
        self._write(f"{test.id()} ... ")
        self.outcomes.on_start(test.id())
        self._started = time.monotonic()

    def stopTest(self, test: SynchronousTestCase) -> None:
        took = self.outcomes.seconds[test.id()] = time.monotonic() - self._started
        if test.id() not in self.outcomes.passed | self.outcomes.skipped | self.outcomes.failed:
            self.outcomes.failed[test.id()] = "It ended without a result."
        self._writeln(f"{self.outcomes.word(test.id())} ({took:.2f} s)")
        self.outcomes.on_end(test.id())
        super().stopTest(test)

    def addSuccess(self, test: SynchronousTestCase) -> None:
        super().addSuccess(test)
        self.outcomes.passed[test.id()] = None

    def addExpectedFailure(self, test: SynchronousTestCase, error: Failure, todo: object = None) -> None:
        super().addExpectedFailure(test, error, todo)
        self.outcomes.passed[test.id()] = None

    def addUnexpectedSuccess(self, test: SynchronousTestCase, todo: object = None) -> None:
        super().addUnexpectedSuccess(test, todo)
        self._fail(test, "It was expected to fail, and passed.\n")

    def addSkip(self, test: SynchronousTestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self.outcomes.skipped[test.id()] = reason

    def addFailure(self, test: SynchronousTestCase, fail: Any) -> None:  # Any: a Failure or sys.exc_info()
        super().addFailure(test, fail)
        self._fail(test, self._format(self.failures[-1][1]))

    def addError(self, test: SynchronousTestCase, error: Any) -> None:  # Any: a Failure or sys.exc_info()
        super().addError(test, error)
        self._fail(test, self._format(self.errors[-1][1]))

    def _format(self, failure: Failure | str) -> str:
        """Return the traceback, with the notes (Hypothesis' example) and groups that Twisted leaves out."""
        assert isinstance(failure, Failure)
        error = failure.value
        text: str = self._formatFailureTraceback(failure)
        if isinstance(error, BaseExceptionGroup):
            return text + "".join(traceback.format_exception(error))
        return "\n".join([text, *getattr(error, "__notes__", ())])

    def _fail(self, test: SynchronousTestCase, text: str) -> None:
        self.outcomes.failed[test.id()] = self.outcomes.failed.get(test.id(), "") + text
        # A module that can't be imported never starts as a test, so its name is printed here.
        self._writeln(f"\n{test.id()} failed:\n{text}")

    # -- the end

    def _printErrors(self) -> None:
        """Print nothing: each error was printed when it was reported."""
