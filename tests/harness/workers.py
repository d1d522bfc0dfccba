# SPDX-License-Identifier: Apache-2.0
"""Runs tests in parallel, in worker processes that each run one class after another.

A worker is `python -m tests --worker FD`. On the socket FD it reads lines of JSON, each with the names of the
tests to run next, and answers each with one line per test that has ended, and then an empty line.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import unittest as pyunit
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from twisted.trial.itrial import ITestCase
from twisted.trial.runner import LoggedSuite, TestLoader
from twisted.trial.unittest import decorate

from tests.harness.outcomes import Outcomes
from tests.harness.schedule import Schedule, Unit

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 60.0  # that an idle worker has to end
INTERRUPT_SECONDS = 20.0  # that a worker in the middle of a test has to end


class RemoteSuite(pyunit.TestSuite):
    """The suite of a worker: the tests that the socket asks for, one unit after another."""

    def __init__(self, number: int, outcomes: Outcomes) -> None:
        super().__init__()
        self._socket = socket.socket(fileno=number)
        self._socket.set_inheritable(False)
        self._outcomes = outcomes

    def run(self, result: Any, debug: bool = False) -> Any:  # Any: as in unittest
        """Run until the socket is closed."""
        with self._socket, self._socket.makefile("rw", encoding="utf-8") as lines:
            for line in lines:
                outcomes = self._outcomes
                outcomes.clear()
                outcomes.on_end = lambda test: self._report(lines, test)
                suite = decorate(TestLoader().loadByNames(json.loads(line), recurse=True), ITestCase)
                LoggedSuite([suite]).run(result)
                for test in outcomes.failed:  # also those that could not be loaded or failed between tests
                    self._report(lines, test)
                sys.stdout.flush()
                sys.stderr.flush()
                lines.write("\n")
                lines.flush()
        return result

    def _report(self, lines: TextIO, test: str) -> None:
        lines.write(json.dumps([test, self._outcomes.of(test)]) + "\n")
        lines.flush()


class Worker:
    """One worker process, seen from the main process. Its output goes to a file."""

    def __init__(self, command: Sequence[str], place: Path) -> None:
        self._command = [*command, f"--temp-directory={place}"]
        log = place.with_name(f"{place.name}.log")
        self._writing, self._reading = log.open("wb"), log.open("rb")
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: TextIO | None = None

    def run(self, unit: Unit, outcomes: Outcomes) -> str:
        """Run a unit and return its output. If the process dies, the unit's remaining tests have failed."""
        if self._process is None:
            self._start()
        left = dict.fromkeys(unit.tests)
        with contextlib.suppress(ConnectionError):
            self._lines.write(json.dumps(unit.tests) + "\n")
            self._lines.flush()
            for line in self._lines:
                if not line.strip():
                    break
                test, outcome = json.loads(line)
                left.pop(test, None)
                outcomes.add(test, outcome)
            else:
                left = left or {unit.name: None}
        code = self.end() if left else None
        for test in left:
            outcomes.failed[test] = f"The process that ran it ended without a result, with code {code}."
        return self.printed()

    def printed(self) -> str:
        """Return what the worker has printed since the last call."""
        return self._reading.read().decode(errors="replace")

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [*self._command, f"--worker={number}"],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=self._writing.fileno(),
                stderr=subprocess.STDOUT,
                pass_fds=[number],
            )
            self._lines = ours.makefile("rw", encoding="utf-8")

    def interrupt(self) -> None:
        """Stop it in the middle of a test, at first by SIGINT, so that the test can clean up."""
        process = self._process
        if process is not None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(INTERRUPT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def end(self) -> int | None:
        """End the worker once it is idle, and return its exit code; None: it was not started."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ConnectionError):
            self._lines.close()
        try:
            return process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


class Workers:
    """Several workers that share a schedule.

    :param command: the command that starts a worker.
    :param place: the tests' working directory; each worker's number is added to the name.
    """

    def __init__(
        self, jobs: int, command: Sequence[str], place: Path, schedule: Schedule, outcomes: Outcomes
    ) -> None:
        self._schedule = schedule
        self._outcomes = outcomes
        self._lock = threading.Lock()  # guards the output and the outcomes
        self.workers = [Worker(command, place.with_name(f"{place.name}.{each}")) for each in range(jobs)]

    def run(self, stop_at_failure: bool = False) -> None:
        """Run all units of the schedule."""
        threads = [threading.Thread(target=self._work, args=(each, stop_at_failure)) for each in self.workers]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self._schedule.stop()
            for worker in self.workers:
                worker.interrupt()
                print(worker.printed(), end="", flush=True)
            raise

    def _work(self, worker: Worker, stop_at_failure: bool) -> None:
        try:
            while unit := self._schedule.take():
                outcomes = Outcomes()
                try:
                    printed = worker.run(unit, outcomes)
                finally:
                    self._schedule.done(unit)
                with self._lock:
                    self._outcomes.join(outcomes)
                    print(printed, end="", flush=True)
                if stop_at_failure and outcomes.failed:
                    self._schedule.stop()
        finally:
            worker.end()
