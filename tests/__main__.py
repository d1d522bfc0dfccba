"""Runs tests: ``python -m tests [NAME...]``, from the repository's root.

A NAME is a package, module, class or method with dots, or a path; without one, all tests run. The
last line is ``N passed, N failed, N skipped``; the exit code is 0 only when nothing failed and
something passed.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

from twisted.trial.runner import TestLoader, TrialRunner

from tests.harness.blocking import Guard
from tests.harness.reporter import GuardedReporter, Outcomes

ROOT = Path(__file__).resolve().parent.parent
RUNS = 4  # more that a test gets by itself when it blocked the reactor
MOST_WORDS = 3000  # characters of a failed test, at the end
CONFIRMING = 900.0  # seconds that all of those may take


def options(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
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
        "--blocked",
        type=float,
        default=50,
        metavar="MS",
        help="fail a test whose callbacks keep the reactor longer than this; 0: don't look (default: 50)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="a test that blocked the reactor has failed; it does not get another run by itself",
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
    return parser.parse_args(arguments)


def within(name: str, container: str) -> bool:
    """Whether the dotted `name` is `container` or something in it."""
    return name == container or name.startswith(f"{container}.")


def dotted(name: str) -> str:
    """A path as the dotted name of what it holds; a dotted name as it is."""
    path = Path(name)
    if "/" in name or path.suffix == ".py":
        return ".".join(path.resolve().relative_to(ROOT).with_suffix("").parts)
    return name


def select(suite: Any, without: list[str]) -> unittest.TestSuite:
    """The tests of `suite`, and what can't be loaded, but those in `without`."""
    chosen = unittest.TestSuite()
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            chosen.addTest(select(test, without))
        elif not any(within(test.id(), container) for container in without):
            chosen.addTest(test)
    return chosen


def confirm(outcomes: Outcomes, given: argparse.Namespace) -> None:
    """Run those that only blocked the reactor once more, each in a process of its own.

    What is slow by its nature is slow again; what another load on the machine did is not.
    """
    command = [sys.executable, "-m", "tests", "--once", "--slowest=0", f"--blocked={given.blocked}"]
    until = time.monotonic() + CONFIRMING
    for test in list(outcomes.blocked):
        for _ in range(RUNS):
            if time.monotonic() > until:
                return
            print(f"\n{test} blocked the reactor; it runs again by itself:", flush=True)
            with tempfile.TemporaryDirectory() as place:
                again = [*command, f"--temp-directory={place}/trial", test]
                if subprocess.run(again, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode == 0:
                    outcomes.forgive(test)
                    break


def show_failed(outcomes: Outcomes) -> None:
    """Each failed test with its words once more, where whoever looks at the end finds them."""
    for test, words in outcomes.failed.items():
        print(f"\nFailed: {test}\n{words[-MOST_WORDS:].strip()}", flush=True)


def main(arguments: list[str]) -> int:
    """Run; the exit code."""
    given = options(arguments)
    names = [dotted(name) for name in given.names] or ["tests"]
    from twisted.internet import reactor

    guard = Guard(given.blocked)
    guard.install(reactor)
    outcomes = Outcomes()
    try:
        suite = TestLoader().loadByNames(names, recurse=True)
        reporter = functools.partial(GuardedReporter, outcomes=outcomes, guard=guard, slowest=given.slowest)
        runner = TrialRunner(reporter, workingDirectory=given.temp_directory, exitFirst=given.exitfirst)
        runner.run(select(suite, [dotted(name) for name in given.without]))
        if not given.once:
            confirm(outcomes, given)
        show_failed(outcomes)
    finally:
        guard.close()
        sys.stdout.flush()
        sys.stderr.flush()
        print(outcomes.closing_line(), flush=True)
    return 0 if outcomes.good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
