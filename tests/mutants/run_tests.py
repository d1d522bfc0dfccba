# SPDX-License-Identifier: Apache-2.0
"""A process that runs tests for the tool: ``python -m tests.mutants.run_tests``, in a tree of its own.

It reads a request, a line of JSON, from its standard input, and writes each result to a file as soon as there
is one, because a mutant may end the process at any time.
"""

from __future__ import annotations

import functools
import json
import resource
import sys
import time
import unittest
from pathlib import Path
from typing import Any

import attrs
import cattrs
from coverage import Coverage
from twisted.trial.runner import TestLoader, TrialRunner
from twisted.trial.unittest import SynchronousTestCase

from tests.harness.outcomes import Outcomes
from tests.harness.reporter import LineReporter
from tests.harness.schedule import tests_of
from tests.mutants.imports import PRODUCT

ROOT = Path(__file__).resolve().parents[2]


@attrs.frozen
class Request:
    """What is to be run.

    :ivar tests: the names of tests, or of modules.
    :ivar results: the file to write to: one line of JSON for each test that has ended, and one at the end.
    :ivar processor: seconds of processor time that the tests may take.
    :ivar limits: seconds that each test may take; others have trial's limit.
    :ivar trace: record which lines of the product each test runs.
    :ivar go_on: after a failure.
    """

    tests: list[str]
    results: str
    processor: int
    limits: dict[str, float] = attrs.field(factory=dict)
    trace: bool = False
    go_on: bool = False


@attrs.frozen
class Result:
    """How a test ended.

    :ivar outcome: "passed", "failed" or "skipped".
    :ivar seconds: the time that it took.
    :ivar processor: the processor time of this process.
    """

    test: str
    outcome: str
    seconds: float
    processor: float


DONE, NOT_HERE = "done\n", "not here\n"  # the answers to an order


@attrs.frozen
class Order:
    """Tests to run with one bug, in a fork of a process that has loaded them.

    :ivar module: the path of the module that has it. :ivar original: the whole module without it.
    :ivar text: the whole module with it. :ivar seconds: after this time it is ended."""

    request: Request
    module: str
    original: str
    text: str
    seconds: float


# The tests that run each line, by the file's path and the line's number.
Lines = dict[str, dict[int, list[str]]]


@attrs.frozen
class End:
    """All tests have been run.

    :ivar failed: tests that failed, including those that could not be loaded.
    """

    failed: list[str]
    lines: Lines = attrs.field(factory=dict)


class Recorder(LineReporter):
    """A reporter that writes results to a file, and tells a tracer which test runs."""

    def __init__(
        self, *args: Any, outcomes: Outcomes, results: Path, tracer: Coverage | None
    ) -> None:  # Any: as in trial
        super().__init__(*args, outcomes=outcomes)
        self._results = results
        self._tracer = tracer
        self._processor = 0.0

    def startTest(self, test: SynchronousTestCase) -> None:
        if self._tracer is not None:
            self._tracer.switch_context(test.id())
        self._processor = time.process_time()
        super().startTest(test)

    def stopTest(self, test: SynchronousTestCase) -> None:
        super().stopTest(test)
        name = test.id()
        outcome = "failed" if name in self.outcomes.failed else "skipped"
        if name in self.outcomes.passed and outcome != "failed":
            outcome = "passed"
        took = time.process_time() - self._processor
        append(self._results, Result(name, outcome, self.outcomes.seconds[name], took))


def append(results: Path, result: Result | End) -> None:
    """Write a result to the file of results."""
    with results.open("a") as file:
        file.write(json.dumps(cattrs.unstructure(result)) + "\n")


def run(request: Request) -> None:
    """Run what is asked for."""
    outcomes, results = Outcomes(), Path(request.results)
    tracer = make_tracer() if request.trace else None
    found = {test.id(): test for test in tests_of(TestLoader().loadByNames(request.tests, recurse=True))}
    for name, seconds in request.limits.items():
        if name in found:
            setattr(found[name], "timeout", seconds)  # noqa: B010 - trial looks for it
    # In the order of the request; a module that can't be loaded is a test that fails.
    chosen = [found.pop(name) for name in request.tests if name in found] + list(found.values())
    # Any: trial wants a class.
    reporter: Any = functools.partial(Recorder, outcomes=outcomes, results=results, tracer=tracer)
    limit = int(time.process_time()) + request.processor
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    TrialRunner(reporter, exitFirst=not request.go_on).run(unittest.TestSuite(chosen))
    append(results, End(sorted(outcomes.failed), lines_of(tracer)))


def make_tracer() -> Coverage:
    """Return a tracer of the product's lines, which has been started."""
    tracer = Coverage(
        data_file=None, config_file=False, include=[f"{ROOT}/{package}/*" for package in PRODUCT]
    )
    tracer.start()
    return tracer


def lines_of(tracer: Coverage | None) -> Lines:
    """Return what a tracer has recorded."""
    if tracer is None:
        return {}
    tracer.stop()
    data = tracer.get_data()
    return {
        str(Path(file).relative_to(ROOT)): {
            line: [test for test in tests if test] for line, tests in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }


if __name__ == "__main__":
    run(cattrs.structure(json.loads(sys.stdin.readline()), Request))
