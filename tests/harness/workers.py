# SPDX-License-Identifier: Apache-2.0
"""Runs tests in parallel, in worker processes that each run one class after another.

A worker is ``python -m tests --worker`` with a socket as its standard input, below `isolation`'s process,
which kills it when the socket is closed. It reads lines of JSON, each with the names of the tests to run
next, and answers with a line when a test has started and one when it has ended, then with an empty line.
`QUIT` ends it once it is idle. A line that comes while it runs tests has it stop after the one that runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import unittest as pyunit
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import attrs
from twisted.trial.itrial import ITestCase
from twisted.trial.runner import LoggedSuite, TestLoader
from twisted.trial.unittest import decorate

from tests.harness import isolation
from tests.harness.outcomes import Outcomes
from tests.harness.schedule import Schedule, Unit

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 60.0  # that an idle worker has to end
QUIT = "null\n"
#: What of the environment sudo passes on to a worker that is to run as root.
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TERM", "CI", "KEEP", "HOME", "SOURCE_DATE_EPOCH")


class RemoteSuite(pyunit.TestSuite):
    """The suite of a worker: the tests that the socket asks for, one unit after another."""

    def __init__(self, number: int, outcomes: Outcomes) -> None:
        super().__init__()
        self._socket = socket.socket(fileno=number)
        self._outcomes = outcomes

    @classmethod
    def from_standard_input(cls, outcomes: Outcomes) -> RemoteSuite:
        """Take the socket away from standard input, where tests find nothing to read."""
        number = os.dup(0)  # not inheritable
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        return cls(number, outcomes)

    def run(self, result: Any, debug: bool = False) -> Any:  # Any: as in unittest
        """Run until the socket asks for no more."""
        with self._socket, self._socket.makefile("rw", encoding="utf-8") as lines:
            for line in lines:
                if line == QUIT or result.shouldStop:
                    break
                outcomes = self._outcomes
                outcomes.clear()
                outcomes.on_start = lambda test: self._say(lines, [test])
                outcomes.on_end = lambda test: self._ended(lines, test, result)
                suite = decorate(TestLoader().loadByNames(json.loads(line), recurse=True), ITestCase)
                result._testRunEntered = False  # so that what the last class shares goes at the unit's end
                LoggedSuite([suite]).run(result)
                result._testRunEntered, result._previousTestClass = True, None
                for test in outcomes.failed:  # also those that could not be loaded or failed between tests
                    self._report(lines, test)
                sys.stdout.flush()
                sys.stderr.flush()
                lines.write("\n")
                lines.flush()
        return result

    def _ended(self, lines: TextIO, test: str, result: Any) -> None:
        self._report(lines, test)
        if select.select([self._socket], [], [], 0)[0]:
            result.stop()

    def _report(self, lines: TextIO, test: str) -> None:
        self._say(lines, [test, self._outcomes.of(test)])

    def _say(self, lines: TextIO, words: list[object]) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
            lines.write(json.dumps(words) + "\n")
            lines.flush()


@attrs.frozen
class Machine:
    """What workers run on.

    :ivar isolated: whether each worker that runs as root has namespaces of its own.
    :ivar sudo: what precedes a command that needs root, if this process is not root.
    """

    isolated: bool = False
    sudo: tuple[str, ...] = ()

    @classmethod
    def of_this_process(cls) -> Machine:
        """Find out what this machine allows."""
        if os.geteuid() == 0:
            return cls(isolation.possible())
        sudo = ("sudo", "-n")
        with contextlib.suppress(OSError):
            if subprocess.run([*sudo, "true"], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0:
                return cls(isolation.possible(sudo), sudo)
        return cls()

    @property
    def becomes_root(self) -> bool:
        """Whether workers can run as root, which this process is not. One that is has what rights it has."""
        return bool(self.sudo)

    def command(self, command: Sequence[str], as_root: bool, environment: Mapping[str, str]) -> list[str]:
        """Return the command line that runs `command` in a worker. :param as_root: it needs sudo for that."""
        if as_root:
            kept = {name: value for name, value in environment.items() if _is_passed_on(name)}
            inner = isolation.first_process(self.isolated, command)
            return [*self.sudo, "env", *(f"{name}={value}" for name, value in kept.items()), *inner]
        return isolation.first_process(self.isolated and not self.sudo, command)


def _is_passed_on(name: str) -> bool:
    return name in PASSED_ON or name.startswith(("INFRANETES_", "PYTHON", "CI_"))


class Worker:
    """One worker process, seen from the main process. Its output goes to a file.

    :param command: returns the command that starts a worker, whose working directory is the argument.
    """

    def __init__(self, command: Callable[[Path], Sequence[str]], place: Path) -> None:
        self._command = command
        self._places = (place.with_name(f"{place.name}.{number}") for number in count())
        log = place.with_name(f"{place.name}.log")
        self._writing, self._reading = log.open("wb"), log.open("rb")
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lines: TextIO | None = None

    def run(self, unit: Unit, outcomes: Outcomes) -> str:
        """Run a unit and return its output.

        If the process dies, the test that it was running has failed, and another process runs those after it.
        """
        left = dict.fromkeys(unit.tests)
        while left:
            running, code = self._run(list(left), left, outcomes)
            if code is None:
                break
            lost = running or next(iter(left), unit.name)
            outcomes.failed[lost] = f"The process that ran it ended without a result, with code {code}."
            left.pop(lost, None)
        return self.printed()

    def _run(self, tests: list[str], left: dict[str, None], outcomes: Outcomes) -> tuple[str, int | None]:
        """Run tests; return the one that ran when the process died, with its exit code; None: it has not."""
        if self._process is None:
            self._start()
        lines, running = self._lines, ""
        assert lines is not None
        with contextlib.suppress(ConnectionError):
            lines.write(json.dumps(tests) + "\n")
            lines.flush()
            for line in lines:
                if not line.strip():
                    left.clear()
                    return "", None
                running, *outcome = json.loads(line)
                if outcome:
                    outcomes.add(running, outcome[0])
                    left.pop(running, None)
                    running = ""
        return running, self.end()

    def printed(self) -> str:
        """Return what the worker has printed since the last call."""
        return self._reading.read().decode(errors="replace")

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                self._command(next(self._places)),  # one that has died may have left a lock in the last one
                cwd=ROOT,
                stdin=theirs.fileno(),
                stdout=self._writing.fileno(),
                stderr=subprocess.STDOUT,
                process_group=0,  # a terminal's Ctrl-C is for this process alone
            )
        self._socket, self._lines = ours, ours.makefile("rw", encoding="utf-8")

    def stop(self) -> None:
        """Have it run no more tests after the one that runs. Callable from another thread."""
        with contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.sendall(QUIT.encode())

    def end(self) -> int | None:
        """End the worker once it is idle, and return its exit code; None: it was not started."""
        process, self._process = self._process, None
        if process is None:
            return None
        self.stop()
        try:
            return process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return self.abandon(process)
        finally:
            assert self._socket is not None
            self._socket.close()
            with contextlib.suppress(ConnectionError):
                self._lines.close()

    def abandon(self, process: subprocess.Popen[bytes]) -> int:
        """Have its first process kill everything at once."""
        with contextlib.suppress(PermissionError):  # sudo's: it ends when this process does
            process.kill()
        return process.wait(END_SECONDS)


class Workers:
    """Several workers that share a schedule.

    :param command: the command that starts a worker.
    :param place: the tests' working directory; each worker has one of its own in it.
    """

    def __init__(
        self,
        jobs: int,
        command: Sequence[str],
        place: Path,
        schedule: Schedule,
        outcomes: Outcomes,
        machine: Machine,
    ) -> None:
        self._command = command
        self._place = place
        self._schedule = schedule
        self._outcomes = outcomes
        self._machine = machine
        self._lock = threading.Lock()  # guards the output and the outcomes
        self._jobs = jobs
        self._workers: list[Worker] = []
        self._stopping = False

    def run(self, stop_at_failure: bool = False) -> None:
        """Run all units of the schedule. After SIGINT, the tests that run end, and no others begin."""
        threads = [
            threading.Thread(target=self._work, args=(number, stop_at_failure), daemon=True)
            for number in range(self._jobs)
        ]
        previous = signal.signal(signal.SIGINT, self._interrupted)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            signal.signal(signal.SIGINT, previous)
        if self._stopping:
            raise KeyboardInterrupt

    def _interrupted(self, *_: object) -> None:
        if self._stopping:
            os.write(2, b"\nEnded at once.\n")
            os._exit(128 + signal.SIGINT)  # the workers' sockets are closed, so they are killed
        self._stopping = True
        threading.Thread(target=self._stop, daemon=True).start()

    def _stop(self) -> None:
        self._schedule.stop()
        for worker in list(self._workers):
            worker.stop()
        os.write(2, b"\nThe tests that run are the last (Ctrl-C again: end at once).\n")

    def _worker(self, number: int, as_root: bool) -> Worker:
        place = self._place / f"{'r' if as_root else ''}{number}"

        def command(directory: Path) -> list[str]:
            words = [*self._command, f"--temp-directory={directory}"]
            return self._machine.command(words, as_root, os.environ)

        worker = Worker(command, place)
        self._workers.append(worker)
        return worker

    def _work(self, number: int, stop_at_failure: bool) -> None:
        own: dict[bool, Worker] = {}
        try:
            while unit := self._schedule.take():
                as_root = unit.as_root and bool(self._machine.sudo)
                if as_root not in own:
                    own[as_root] = self._worker(number, as_root)
                outcomes = Outcomes()
                try:
                    printed = own[as_root].run(unit, outcomes)
                finally:
                    self._schedule.done(unit)
                with self._lock:
                    self._outcomes.join(outcomes)
                    print(printed, end="", flush=True)
                if stop_at_failure and outcomes.failed:
                    self._schedule.stop()
        finally:
            for worker in own.values():
                worker.end()
