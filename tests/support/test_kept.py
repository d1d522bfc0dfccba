# SPDX-License-Identifier: Apache-2.0
"""What is kept of a test that fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.harness.durations import slow
from tests.harness.needs import needs_mounts, needs_programs
from tests.support.keeping import VARIABLE

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = "tests.support.kept_samples.Failing"


@slow(3, "each starts a run of tests")
class KeptTests(SynchronousTestCase):
    def started(self, test: str, **environment: str) -> subprocess.Popen[str]:
        """Start a run of one of the samples."""
        command = [
            sys.executable,
            "-m",
            "tests",
            "--jobs=1",
            "--temp-directory",
            str(Path(self.mktemp()).absolute()),
        ]
        inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
        running = subprocess.Popen(
            [*command, f"{SAMPLES}.{test}"],
            cwd=ROOT,
            env={**inherited, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.addCleanup(running.wait)
        self.addCleanup(running.kill)
        return running

    def lines(self, running: subprocess.Popen[str]) -> Iterator[str]:
        """Yield what a run prints, as it comes."""
        assert running.stdout is not None
        with running.stdout as out:
            yield from out

    def assert_its_log_is_there(self, output: str) -> None:
        found = re.search(r"^The logs of \S+ are in (\S+):", output, flags=re.M)
        assert found is not None, output
        [log] = Path(found[1]).iterdir()
        self.assertEqual(log.read_text(), "the program runs\n")

    def test_a_failed_tests_logs_outlive_it(self) -> None:
        output = "".join(self.lines(self.started("test_fails")))
        self.assertRegex(output, r'kept_samples.py", line \d+, in test_fails\n +self.fail\("on purpose"\)')
        self.assertTrue(output.endswith("0 passed, 1 failed, 0 skipped\n"), output)
        self.assert_its_log_is_there(output)

    def test_so_do_those_of_a_test_that_hangs_which_ends_by_its_own_timeout(self) -> None:
        output = "".join(self.lines(self.started("test_hangs")))
        self.assertIn("test_hangs) still running at 2 secs", output)
        self.assertTrue(output.endswith("0 passed, 1 failed, 0 skipped\n"), output)
        self.assert_its_log_is_there(output)

    def test_nothing_is_kept_of_one_that_passes(self) -> None:
        output = "".join(self.lines(self.started("test_passes", KEEP="1")))
        self.assertTrue(output.endswith("1 passed, 0 failed, 0 skipped\n"), output)
        self.assertNotIn("logs of", output)

    def shown(self, lines: Iterator[str]) -> str:
        """Return what a run prints until it keeps a test."""
        output = ""
        while not re.search(r"^ +program \d+$", output, flags=re.M):
            output += next(lines)
        return output

    @needs_mounts
    @needs_programs("ps", "nsenter")
    def test_a_shell_sees_what_a_kept_test_sees(self) -> None:
        lines = self.lines(self.started("test_fails", KEEP="1"))
        output = self.shown(lines)
        [pid] = re.findall(r"^ +program (\d+)$", output, flags=re.M)
        [shell] = re.findall(r"^ +(nsenter .*)$", output, flags=re.M)
        seen = subprocess.run(["sh"], input=f"{shell} cat /proc/{pid}/comm", capture_output=True, text=True)
        self.end(output, lines)
        self.assertEqual(seen.stdout, "sleep\n", seen.stderr)

    def end(self, output: str, lines: Iterator[str]) -> str:
        """Tell a run that its test was looked at; return the rest that it prints."""
        [sign] = re.findall(r"^ +rm (\S+)$", output, flags=re.M)
        Path(sign).unlink()
        return "".join(lines)

    def test_keep_leaves_everything_until_somebody_has_looked(self) -> None:
        lines = self.lines(self.started("test_fails", KEEP="1"))
        output = self.shown(lines)
        self.assertIn("on purpose", output)
        [pid] = re.findall(r"^ +program (\d+)$", output, flags=re.M)
        self.assertIn(b"sleep", Path(f"/proc/{pid}/cmdline").read_bytes())
        rest = self.end(output, lines)
        self.assertTrue(rest.endswith("0 passed, 1 failed, 0 skipped\n"), rest)
        self.assertNotIn("left behind", rest)
        self.assertFalse(Path(f"/proc/{pid}").exists())
