# SPDX-License-Identifier: Apache-2.0
"""How a test run ends that is interrupted, killed, stuck, or that lacks something."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.__main__ import ROOT
from tests.harness import isolation, rundir
from tests.harness.needs import needs_netns, needs_programs, needs_root
from tests.harness.rundir import NoRoom, run_directory
from tests.harness.test_runner import SAMPLES, run

SECONDS = 60.0  # that anything here may take


class Run:
    """A run of tests that wait until a file is there.

    :ivar directory: where the tests write files named after them, once they have begun.
    """

    def __init__(self, case: SynchronousTestCase, *arguments: str) -> None:
        self.directory = Path(case.mktemp()).absolute()
        self.directory.mkdir()
        self.process = subprocess.Popen(
            [
                *("env", "--default-signal=INT", sys.executable, "-m", "tests", "--blocked=0"),
                *(f"--temp-directory={self.directory}/runs", *arguments),
            ],
            cwd=ROOT,
            env={**os.environ, "INFRANETES_TEST_PATIENCE": str(self.directory)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        case.addCleanup(self.process.communicate)
        case.addCleanup(self.process.kill)

    def wait_until_begun(self, test: str) -> Path:
        """Wait until a test of `samples` runs, and return the file that it has written."""
        file = self.directory / test
        until = time.monotonic() + SECONDS
        while not file.exists():
            assert time.monotonic() < until, f"{test} has not begun"
            time.sleep(0.02)
        return file

    def interrupt(self) -> None:
        """Interrupt it once, and wait until its workers know."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.stdout is not None
        while "are the last" not in (line := self.process.stdout.readline()):
            assert line, "it has ended"

    def end(self) -> tuple[int, str]:
        """Wait for its end; return its exit code and its output."""
        output, _ = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, output

    def left(self) -> list[str]:
        """Return the processes that know this run's directory, once there are no more or after a while."""
        until = time.monotonic() + 30
        while found := processes_with(f"INFRANETES_TEST_PATIENCE={self.directory}"):
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        return found


def processes_with(variable: str) -> list[str]:
    """Return the command lines of the processes that have a variable in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended, or is somebody else's
    return found


class InterruptedTests(SynchronousTestCase):
    def test_once_the_tests_that_run_end_and_are_counted(self) -> None:
        running = Run(self, f"{SAMPLES}.Patient", f"{SAMPLES}.Ending.test_passes", "--jobs=2")
        running.wait_until_begun("Patient.test_1")
        running.interrupt()
        (running.directory / "enough").touch()
        code, output = running.end()
        self.assertEqual((code, output.splitlines()[-1]), (130, "2 passed, 0 failed, 0 skipped"), output)
        self.assertFalse((running.directory / "Patient.test_2").exists(), output)
        self.assertNotIn("Traceback", output)

    def test_twice_it_ends_at_once_and_leaves_nothing(self) -> None:
        running = Run(self, f"{SAMPLES}.Patient", f"{SAMPLES}.Ending.test_passes", "--jobs=2")
        running.wait_until_begun("Patient.test_1")
        running.interrupt()
        running.process.send_signal(signal.SIGINT)
        code, output = running.end()
        self.assertEqual(code, 130, output)
        self.assertNotIn("Traceback", output)
        self.assertEqual(running.left(), [])

    def test_killed_it_leaves_nothing(self) -> None:
        running = Run(self, f"{SAMPLES}.Patient", f"{SAMPLES}.Ending.test_passes", "--jobs=2")
        running.wait_until_begun("Patient.test_1")
        running.process.kill()
        self.assertEqual(running.left(), [])


class StuckTests(SynchronousTestCase):
    def test_a_test_that_never_ends_shows_its_stack_and_the_next_one_runs(self) -> None:
        code, output, _words = run(f"{SAMPLES}.Endless", f"{SAMPLES}.Ending.test_passes", "--jobs=2")
        self.assertEqual((code, output.splitlines()[-1]), (1, "2 passed, 1 failed, 0 skipped"), output)
        self.assertRegex(output, r"Timeout \(0:00:00\.5.*\)!")
        self.assertIn("in test_1_sleeps", output)


class SideBySideTests(SynchronousTestCase):
    def test_two_runs_share_a_directory(self) -> None:
        first = Run(self, f"{SAMPLES}.Patient.test_1")
        first.wait_until_begun("Patient.test_1")
        code, output, _words = run(f"{SAMPLES}.Ending.test_passes", place=first.directory / "runs")
        self.assertEqual((code, output.splitlines()[-1]), (0, "1 passed, 0 failed, 0 skipped"), output)
        (first.directory / "enough").touch()
        self.assertEqual(first.end()[0], 0)

    @needs_netns
    def test_each_worker_has_a_network_of_its_own(self) -> None:
        if not isolation.possible():
            self.fail("root with these capabilities can't make namespaces here")
        running = Run(self, f"{SAMPLES}.Patient", f"{SAMPLES}.PatientToo", "--jobs=2")
        begun = [running.wait_until_begun(f"{each}.test_1") for each in ("Patient", "PatientToo")]
        networks = {file.read_text() for file in begun}
        (running.directory / "enough").touch()
        self.assertEqual(running.end()[0], 0)
        self.assertEqual(len(networks | {os.readlink("/proc/self/ns/net")}), 3)


class FirstProcessTests(SynchronousTestCase):
    def test_what_it_runs_can_be_ended_by_signals(self) -> None:
        """As it could not if it inherited that they are ignored, as a daemon does that handles none."""
        script = "from signal import *; print(int(getsignal(SIGTERM)), int(getsignal(SIGHUP)))"
        ours, theirs = socket.socketpair()
        with ours, theirs:
            default = ["env", "--default-signal=HUP,TERM"]  # this run may be below nohup
            command = [*default, *isolation.first_process(False, [sys.executable, "-c", script])]
            done = subprocess.run(command, stdin=theirs.fileno(), capture_output=True, text=True)
        self.assertEqual((done.stdout, done.stderr), ("0 0\n", ""))


class LackingTests(SynchronousTestCase):
    def test_what_is_missing_is_told_once_and_its_tests_are_skipped(self) -> None:
        code, output, _words = run(f"{SAMPLES}.Needy", f"{SAMPLES}.Ending.test_passes", ci=False)
        self.assertEqual((code, output.splitlines()[-1]), (0, "1 passed, 0 failed, 2 skipped"), output)
        self.assertEqual(output.count("unicorn"), 1, output)
        self.assertIn("2 tests need a unicorn: catch one\n", output)

    @needs_root
    @needs_programs("setpriv")
    def test_so_is_what_root_of_a_container_may_not_do(self) -> None:
        bounded = ("setpriv", "--bounding-set=-sys_admin,-net_admin")
        names = (f"{SAMPLES}.Networked", f"{SAMPLES}.Ending.test_passes")
        code, output, _words = run(*names, ci=False, by=bounded)
        self.assertEqual((code, output.splitlines()[-1]), (0, "1 passed, 0 failed, 2 skipped"), output)
        self.assertIn("2 tests need NET_ADMIN and SYS_ADMIN: run as root, or docker run", output)
        self.assertEqual(output.count("NET_ADMIN and SYS_ADMIN"), 1, output)

    def test_ci_allows_no_skip(self) -> None:
        code, output, _words = run(f"{SAMPLES}.Needy", f"{SAMPLES}.Ending.test_passes", ci=True)
        self.assertEqual((code, output.splitlines()[-1]), (1, "1 passed, 2 failed, 0 skipped"), output)

    def test_what_larger_tiers_have_is_left_out_in_one_line(self) -> None:
        names = (f"{SAMPLES}.Nocturnal", f"{SAMPLES}.Ending.test_passes")
        code, output, _words = run(*names, "--tier=test")
        self.assertEqual((code, output.splitlines()[-1]), (0, "1 passed, 0 failed, 0 skipped"), output)
        self.assertIn("Left out: 1 test (make test-nightly)\n", output)

    def test_a_disk_that_is_too_full_is_told_in_a_sentence(self) -> None:
        self.patch(rundir, "MIN_FREE", 1 << 60)
        with (
            self.assertRaisesRegex(NoRoom, r"has \d+ MiB left, and tests need \d+: free some space"),
            run_directory(Path(self.mktemp())),
        ):
            self.fail("there was no room")
