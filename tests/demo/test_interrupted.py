# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in the middle of a demo, with simulated VMs: `tests.e2e.test_demo` has real ones."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from demo.pod import processes_naming
from tests.harness.durations import slow
from tests.harness.needs import needs_programs, needs_root

TREE = Path(__file__).resolve().parents[2]
SECONDS = 60.0
END_SECONDS = 10.0  # for the farm of simulated VMs, which sees that it has none


@slow(6, "each runs the demo, with a registry and a daemon")
@needs_root
@needs_programs("docker-registry", "skopeo")
class InterruptedTests(SynchronousTestCase):
    """:ivar place: of all files of the demo, temporary ones too, so that its processes name it."""

    def setUp(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="inf-"))
        self.addCleanup(shutil.rmtree, self.place)
        where = ("--state", f"{self.place}/state", "--run-dir", f"{self.place}/run")
        self.demo = subprocess.Popen(
            [
                *("env", "--default-signal=INT", f"TMPDIR={self.place}"),
                *(sys.executable, "-m", "demo", "--provider", "simulated", *where),
            ],
            cwd=TREE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.addCleanup(self.demo.wait)
        self.addCleanup(self.demo.kill)

    def shown_until(self, words: str) -> str:
        """Return what the demo shows up to a line with these words."""
        assert self.demo.stdout is not None
        shown = ""
        for line in self.demo.stdout:
            shown += line
            if words in line:
                return shown
        raise AssertionError(f"there is no {words!r} in {shown}")

    def check_nothing_is_left(self, shown: str) -> None:
        """Interrupt the demo, and look for what is left."""
        self.demo.send_signal(signal.SIGINT)
        shown += self.demo.communicate(timeout=SECONDS)[0]
        self.assertEqual(self.demo.returncode, 130, shown)
        self.assertIn("Interrupted", shown)
        until = time.monotonic() + END_SECONDS
        while left := processes_naming(str(self.place)):
            self.assertLess(time.monotonic(), until, f"{left} are left; {shown}")
            time.sleep(0.05)
        self.assertEqual({each.name for each in self.place.iterdir()} - {"run"}, {"state"}, shown)
        self.assertFalse((self.place / "run" / "infranetes.sock").exists())

    def test_while_the_registry_starts(self) -> None:
        until = time.monotonic() + SECONDS
        while not processes_naming(f"{self.place}/registry"):
            self.assertLess(time.monotonic(), until, "there is no registry")
            time.sleep(0.001)
        self.check_nothing_is_left("")

    def test_while_the_daemon_starts(self) -> None:
        self.check_nothing_is_left(self.shown_until("ok A registry"))

    def test_while_the_pod_starts(self) -> None:
        self.check_nothing_is_left(self.shown_until("ok PullImage"))

    def test_while_its_command_runs(self) -> None:
        self.check_nothing_is_left(self.shown_until("ok CreateContainer"))

    def test_while_a_command_runs_in_a_container(self) -> None:
        self.check_nothing_is_left(self.shown_until("ok A second container"))
