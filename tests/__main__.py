# SPDX-License-Identifier: Apache-2.0
"""Run tests: ``python -m tests [NAME...]``, from the repository's root.

A NAME is the dotted name or the path of a package, module, class or method; without one, all tests run.
Classes run side by side (``--jobs``), each worker in namespaces of its own where the machine allows it, but
for what `tests.harness.schedule` declares. The last line is ``N passed, N failed, N skipped``; the exit code
is 0 only if nothing failed and something passed. No test is run twice. ``trial NAME...`` runs tests one after
the other, held to the same guards.
"""

from __future__ import annotations

import argparse
import errno
import functools
import os
import signal
import sys
import unittest
from pathlib import Path
from typing import Any

from twisted.trial.runner import TestLoader, TrialRunner

from tests.harness import guards, stalls
from tests.harness.choice import Choice, Tests, choose
from tests.harness.durations import REMARKABLE, Durations, slow_of
from tests.harness.needs import Tier
from tests.harness.outcomes import Outcomes
from tests.harness.reporter import LineReporter
from tests.harness.rundir import NoRoom, run_directory
from tests.harness.schedule import Schedule, Unit, tests_of, units, within
from tests.harness.speed import slowness
from tests.harness.workers import Machine, RemoteSuite, Workers
from tests.support.keeping import keeping

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "build" / "tests"
MAX_SUMMARY = 3000  # characters of each failed test at the end
JOBS_PER_PROCESSOR = 3  # as tests wait for two thirds of their time
INTERRUPTED = 128 + signal.SIGINT


def options(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to run (default: all)")
    parser.add_argument(
        "--tier",
        choices=[tier.name.lower() for tier in Tier],
        help="leave out what larger tiers have: check needs no root and no program, test no VM, all no hours",
    )
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
        default=JOBS_PER_PROCESSOR * (os.cpu_count() or 1),
        metavar="N",
        help="processes that run tests side by side (default: %(default)s)",
    )
    parser.add_argument(
        "--blocked",
        type=float,
        metavar="MS",
        help="fail a test whose callbacks block the reactor for longer; 0: never (default: 50, or more on a"
        " machine that is slow)",
    )
    parser.add_argument(
        "--slowest", type=int, default=10, metavar="N", help="list the N slowest (default: 10)"
    )
    parser.add_argument("-x", "--exitfirst", action="store_true", help="stop after the first failure")
    parser.add_argument(
        "--list", action="store_true", help="print what would run, with its tier and needs, and run nothing"
    )
    parser.add_argument(
        "--temp-directory",
        metavar="PATH",
        help="where tests have their files (default: a new one in build/tests)",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def dotted(name: str) -> str:
    """Turn a path into the dotted name of what it holds; a dotted name stays as it is."""
    path = Path(name)
    if "/" in name or path.suffix == ".py":
        return ".".join(path.resolve().relative_to(ROOT).with_suffix("").parts)
    return name


def select(given: argparse.Namespace) -> list[unittest.TestCase]:
    """Load the tests that are asked for; what can't be loaded is a test that fails."""
    names = [dotted(name) for name in given.names] or ["tests"]
    without = [dotted(name) for name in given.without]
    found = tests_of(TestLoader().loadByNames(names, recurse=True))
    return [test for test in found if not any(within(test.id(), container) for container in without)]


def run_here(
    suite: unittest.TestSuite, given: argparse.Namespace, outcomes: Outcomes, directory: Path
) -> None:
    """Run a suite in this process, one test after the other."""
    os.environ[guards.LIMIT_VARIABLE] = str(given.blocked)
    reporter: Any = functools.partial(LineReporter, outcomes=outcomes)  # Any: trial wants a class
    TrialRunner(reporter, workingDirectory=str(directory), exitFirst=given.exitfirst).run(suite)


def run_side_by_side(
    chosen: list[Unit], given: argparse.Namespace, outcomes: Outcomes, directory: Path, machine: Machine
) -> None:
    """Run units in several processes."""
    stalls.watch()  # once for all of them
    command = [sys.executable, "-m", "tests", "--worker", f"--blocked={given.blocked}"]
    jobs = max(1, min(given.jobs, len(chosen)))
    schedule = Schedule(chosen, machine.isolated)
    Workers(jobs, command, directory, schedule, outcomes, machine).run(given.exitfirst)


def run(tests: Tests, given: argparse.Namespace, outcomes: Outcomes, machine: Machine) -> None:
    """Run tests, record how long they took, and print the slowest and the failed ones."""
    durations = Durations()
    chosen = units(tests, durations)
    needs_sudo = bool(machine.sudo) and any(unit.as_root for unit in chosen)
    with run_directory(Path(given.temp_directory) if given.temp_directory else RUNS) as directory:
        try:
            if min(given.jobs, len(chosen)) > 1 or needs_sudo:
                run_side_by_side(chosen, given, outcomes, directory, machine)
            else:
                run_here(unittest.TestSuite(tests), given, outcomes, directory / "0")
        finally:
            durations.record(outcomes.seconds)
            show_end(tests, outcomes, given.slowest)


def show_end(tests: Tests, outcomes: Outcomes, slowest: int) -> None:
    """Print the slowest tests, then again each failed one with its traceback, where they are easily found."""
    if slowest:
        print(f"\nThe slowest {slowest}:", *outcomes.slowest(slowest), sep="\n", flush=True)
    remarkable = {name for name, took in outcomes.seconds.items() if took > REMARKABLE}
    silent = [test for test in tests if test.id() in remarkable and slow_of(test) is None]
    if remarkable:
        print(f"{len(remarkable)} took over {REMARKABLE:.0f} s, {len(silent)} of them without a reason")
    for name, text in sorted(outcomes.failed.items()):
        print(f"\nFailed: {name}\n{text[-MAX_SUMMARY:].strip()}", flush=True)


def prepare(given: argparse.Namespace) -> None:
    """Set what was left open: the limit of callbacks, which a slow machine's speed scales. Of tests that are
    kept when they fail, one runs at a time."""
    if keeping():
        given.jobs = 1
    if given.blocked is None:
        factor = slowness()
        given.blocked = round(float(guards.DEFAULT_LIMIT) * factor)
        if factor > 1:
            print(f"This machine computes {factor:.1f} times as long as the reference:", end=" ")
        print(f"callbacks may take {given.blocked} ms.", flush=True)


def report_lacking(choice: Choice, outcomes: Outcomes) -> None:
    """Print what is left out and why. Tests that lack something are skipped; where CI is set, they fail."""
    for line in choice.lines():
        print(line, flush=True)
    for test, need in choice.lacking:
        if "CI" in os.environ:
            outcomes.failed[test.id()] = f"It {need}. CI=1 allows no skip."
        else:
            outcomes.skipped[test.id()] = str(need)


def run_chosen(given: argparse.Namespace, outcomes: Outcomes) -> int:
    """Choose tests, run them, and return the exit code."""
    if given.tier == "nightly":
        os.environ["INFRANETES_TEST_NIGHTLY"] = "1"
    machine = Machine.of_this_process()
    choice = choose(select(given), given.tier and Tier[given.tier.upper()], machine.becomes_root)
    if given.list:
        for test in choice.chosen:
            print(test.id())
        return 0
    report_lacking(choice, outcomes)
    prepare(given)
    if choice.chosen:
        run(choice.chosen, given, outcomes, machine)
    return 0 if outcomes.good else 1


def main(arguments: list[str]) -> int:
    """Run, and return the exit code."""
    given = options(arguments)
    outcomes = Outcomes()
    if given.worker:
        guards.end_when_stuck()
        run_here(RemoteSuite.from_standard_input(outcomes), given, outcomes, Path(given.temp_directory))  # type: ignore[arg-type]
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The run was ended from outside."))
    try:
        return run_chosen(given, outcomes)
    except KeyboardInterrupt:
        print("\nInterrupted: what had not begun was not run.")
        return INTERRUPTED
    except NoRoom as error:
        print(error)
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"The disk is full: {error}. Free some space, and run the tests again.")
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if not given.list:
            print(f"\n{outcomes.closing_line()}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
