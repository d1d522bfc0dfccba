# SPDX-License-Identifier: Apache-2.0
"""A program that is forked runs as one that is started, and its end is told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.support import warm

SECONDS = 60.0
SHOW = """
import os, sys
print(sys.argv, os.environ['WORD'], os.getcwd(), sys.stdin.read(), os.listdir('/proc/self/fd'))
"""
SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"


class WarmTests(SynchronousTestCase):
    @classmethod
    def setUpClass(cls) -> None:
        warm.wait_until_ready()

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.output = self.directory / "output"

    def start(self, *arguments: str) -> warm.Process:
        with self.output.open("ab") as output:
            environment = {**os.environ, "WORD": "of the test"}
            return warm.Process(arguments, output.fileno(), self.directory, environment)

    def until(self, true: object, what: str) -> None:
        """Wait until the function `true` returns something true."""
        assert callable(true)
        until = time.monotonic() + SECONDS
        while not true():
            self.assertLess(time.monotonic(), until, what)
            time.sleep(0.01)

    def test_it_runs_as_python_would_run_it(self) -> None:
        process = self.start("-c", SHOW, "one", "two")
        self.assertEqual(process.wait(), 0)
        forked = self.output.read_text()
        command = [sys.executable, "-c", SHOW, "one", "two"]
        environment = {**os.environ, "WORD": "of the test"}
        started = subprocess.run(
            command,
            cwd=self.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        self.assertEqual(forked, started.stdout)

    def test_a_module_runs_as_the_main_one(self) -> None:
        process = self.start("-m", "platform")
        self.assertEqual(process.wait(), 0)
        self.assertIn("Linux", self.output.read_text())

    def test_how_it_ends(self) -> None:
        for program, status in (
            ("raise SystemExit(7)", 7),
            ("raise SystemExit('words')", 1),
            ("1 / 0", 1),
            ("import os; os.kill(os.getpid(), 9)", -9),
            ("import os; os._exit(3)", 3),
        ):
            self.assertEqual(self.start("-c", program).wait(), status, program)
        self.assertIn("words\n", self.output.read_text())
        self.assertIn("ZeroDivisionError", self.output.read_text())

    def test_signals(self) -> None:
        process = self.start("-c", SLEEP)
        self.until(lambda: self.output.read_text().endswith("\n"), "it runs")
        self.assertEqual(process.pid, int(self.output.read_text()))
        self.assertIsNone(process.poll())
        process.terminate()
        self.assertEqual(process.wait(), -signal.SIGTERM)
        process.kill()  # nobody any more

    def test_it_ends_with_the_one_that_wanted_it(self) -> None:
        process = self.start("-c", SLEEP)
        pid = process.pid
        del process
        self.until(lambda: not Path(f"/proc/{pid}").exists(), "it is killed")

    def test_a_command_stands_for_it(self) -> None:
        program = "import sys; print(sys.stdin.read(), sys.argv); sys.exit('words')"
        done = subprocess.run(warm.command("-c", program, "one"), input=b"typed", capture_output=True)
        self.assertEqual((done.stdout, done.stderr), (b"typed ['-c', 'one']\n", b"words\n"))
        self.assertEqual(done.returncode, 1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            with subprocess.Popen(
                warm.command("-c", SLEEP), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ) as standing:
                assert standing.stdout is not None
                pid = int(standing.stdout.readline())
                standing.send_signal(number)
                self.assertEqual(standing.wait(), -number)
            self.until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "it ends with what stands for it")

    def test_what_is_detached_outlives_its_starter(self) -> None:
        with self.output.open("ab") as output:
            subprocess.run(warm.detached("-c", SLEEP), stdout=output, check=True)
        self.until(lambda: self.output.read_text().endswith("\n"), "it runs")
        pid = int(self.output.read_text())
        with contextlib.suppress(ProcessLookupError):
            self.assertEqual(os.getsid(pid), pid)
            os.kill(pid, signal.SIGKILL)
            return
        self.fail("it has ended")
