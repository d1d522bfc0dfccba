# SPDX-License-Identifier: Apache-2.0
"""The agent's own program, which loads less than twistd does."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from twisted.application.service import Service
from twisted.trial.unittest import SynchronousTestCase

from tests.harness.durations import slow
from vmserver.__main__ import LoadedPlugin

ROOT = Path(__file__).resolve().parents[2]


class LoadedPluginTests(SynchronousTestCase):
    def test_garbage_is_collected_again_once_the_service_is_made(self) -> None:
        collected: list[bool] = []

        class Maker:
            tapname = "vmserver"

            def makeService(self, options: Any) -> Service:
                collected.append(gc.isenabled())
                return Service()

        maker: Any = Maker()
        self.addCleanup(gc.enable)
        self.addCleanup(gc.unfreeze)
        gc.disable()
        LoadedPlugin(maker).makeService(maker)
        self.assertEqual((collected, gc.isenabled()), ([False], True))
        self.assertGreater(gc.get_freeze_count(), 0)


@slow(2, "a Python that imports the agent")
class ProgramTests(SynchronousTestCase):
    """The process, which ends at once because its configuration is wrong."""

    def setUp(self) -> None:
        config = Path(self.mktemp())
        config.write_text("provider = 'none-of-this-name'\n")
        command = (sys.executable, "-X", "importtime", "-P", "-m", "vmserver", "--config", str(config))
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        self.said = done.stdout + done.stderr
        self.code = done.returncode
        self.loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}

    def test_it_is_the_agent_and_its_faults_are_told_in_one_line(self) -> None:
        self.assertNotEqual(self.code, 0)
        self.assertIn("no ContainerProvider is called 'none-of-this-name'", self.said)
        self.assertNotIn("Traceback", self.said)
        self.assertIn("vmserver.daemon", self.loaded)

    def test_it_loads_nothing_that_only_others_need(self) -> None:
        for name in ("twisted.plugins.twisted_conch", "twisted.trial.itrial", "unittest", "argparse"):
            self.assertNotIn(name, self.loaded)
        for name in ("vmserver.containers.docker", "vmserver.containers.systemd", "infranetes_simulation"):
            self.assertNotIn(name, self.loaded)
