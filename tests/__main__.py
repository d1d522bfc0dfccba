# SPDX-License-Identifier: Apache-2.0
"""Run tests: ``python -m tests [NAME...]``, from the repository's root.

A NAME is the dotted name or the path of a package, module, class or method; without one, all tests run.
Classes run side by side (``--jobs``), except for what `tests.harness.schedule` declares. The last line is
``N passed, N failed, N skipped``; the exit code is 0 only if nothing failed and something passed. No test is
run twice. ``trial NAME...`` runs tests one after the other, held to the same guards.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import unittest
from pathlib import Path
from typing import Any

from twisted.trial.runner import TestLoader, TrialRunner

from tests.harness import guards, stalls
from tests.harness.outcomes import Outcomes
from tests.harness.reporter import LineReporter
from tests.harness.schedule import Schedule, Unit, tests_of, units, within
from tests.harness.workers import RemoteSuite, Workers
from tests.support.kept import keeping

ROOT = Path(__file__).resolve().parent.parent
MAX_SUMMARY = 3000  # characters of each failed test at the end


def options(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to run (default: all)")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out what is in this package or module",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes that run tests side by side (default: one for each processor)",
    )
    parser.add_argument(
        "--blocked",
        type=float,
        default=50,
        metavar="MS",
        help="fail a test whose callbacks block the reactor for longer; 0: never (default: 50)",
    )
    parser.add_argument(
        "--slowest", type=int, default=10, metavar="N", help="list the N slowest (default: 10)"
    )
    parser.add_argument("-x", "--exitfirst", action="store_true", help="stop after the first failure")
    parser.add_argument(
        "--temp-directory",
        default="_trial_temp",
        metavar="PATH",
        help="where tests have their files (default: %(default)s)",
    )
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def dotted(name: str) -> str:
    """Turn a path into the dotted name of what it holds; a dotted name stays as it is."""
    path = Path(name)
    if "/" in name or path.suffix == ".py":
        return ".".join(path.resolve().relative_to(ROOT).with_suffix("").parts)
    return name


def select(given: argparse.Namespace) -> unittest.TestSuite:
    """Load the tests that are asked for; what can't be loaded is a test that fails."""
    names = [dotted(name) for name in given.names] or ["tests"]
    without = [dotted(name) for name in given.without]
    found = tests_of(TestLoader().loadByNames(names, recurse=True))
    return unittest.TestSuite(
        test for test in found if not any(within(test.id(), container) for container in without)
    )


def run_here(suite: unittest.TestSuite, given: argparse.Namespace, outcomes: Outcomes) -> None:
    """Run a suite in this process, one test after the other."""
    os.environ[guards.LIMIT_VARIABLE] = str(given.blocked)
    reporter: Any = functools.partial(LineReporter, outcomes=outcomes)  # Any: trial wants a class
    TrialRunner(reporter, workingDirectory=given.temp_directory, exitFirst=given.exitfirst).run(suite)


def run_side_by_side(jobs: int, chosen: list[Unit], given: argparse.Namespace, outcomes: Outcomes) -> None:
    """Run units in `jobs` processes."""
    stalls.watch()  # once for all of them
    command = [sys.executable, "-m", "tests", f"--blocked={given.blocked}"]
    place = Path(given.temp_directory).absolute()
    Workers(jobs, command, place, Schedule(chosen), outcomes).run(given.exitfirst)


def show_end(outcomes: Outcomes, slowest: int) -> None:
    """Print the slowest tests, then again each failed one with its traceback, where they are easily found."""
    if slowest:
        print(f"\nThe slowest {slowest}:", *outcomes.slowest(slowest), sep="\n", flush=True)
    for test, text in sorted(outcomes.failed.items()):
        print(f"\nFailed: {test}\n{text[-MAX_SUMMARY:].strip()}", flush=True)


def main(arguments: list[str]) -> int:
    """Run, and return the exit code."""
    given = options(arguments)
    outcomes = Outcomes()
    if given.worker is not None:
        run_here(RemoteSuite(given.worker, outcomes), given, outcomes)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The run was ended from outside."))
    try:
        suite = select(given)
        chosen = units(test.id() for test in suite)
        jobs = 1 if keeping() else min(given.jobs, len(chosen))  # somebody is to see what a kept test says
        if jobs > 1:
            run_side_by_side(jobs, chosen, given, outcomes)
        else:
            run_here(suite, given, outcomes)
        show_end(outcomes, given.slowest)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        print(f"\n{outcomes.closing_line()}", flush=True)
    return 0 if outcomes.good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
