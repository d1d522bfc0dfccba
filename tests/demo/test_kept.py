# SPDX-License-Identifier: Apache-2.0
"""A demo that fails, as KEEP leaves it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.harness.durations import slow
from tests.harness.needs import needs_programs, needs_root
from tests.support.keeping import VARIABLE

TREE = Path(__file__).resolve().parents[2]


@slow(6, "it runs the demo, with a registry and a daemon")
@needs_root
@needs_programs("docker-registry", "skopeo")
class KeptDemoTests(SynchronousTestCase):
    def test_it_waits_for_ctrl_c_and_says_where_to_look(self) -> None:
        place = tempfile.mkdtemp(prefix="inf-")
        self.addCleanup(subprocess.run, ["rm", "-r", place], check=True)
        run = (sys.executable, "-m", "demo", "--provider", "no-such")
        where = ("--state", f"{place}/state", "--run-dir", f"{place}/run")
        running = subprocess.Popen(
            ["env", "--default-signal=INT", f"{VARIABLE}=1", *run, *where],
            cwd=TREE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.addCleanup(running.wait)
        self.addCleanup(running.kill)
        assert running.stdout is not None
        with running.stdout as lines:
            shown = ""
            for line in lines:
                shown += line
                if "infranetes.ctl.cli" in line:
                    break
            log = re.search(r"^ +less (\S+)$", shown, flags=re.M)
            assert log is not None, shown
            self.assertIn("no provider is called 'no-such'", Path(log[1]).read_text())
            self.assertIsNone(running.poll(), shown)
            running.send_signal(signal.SIGINT)
            self.assertIn("Interrupted", lines.read())
        self.assertEqual(running.wait(), 130)
