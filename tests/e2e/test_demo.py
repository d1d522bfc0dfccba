# SPDX-License-Identifier: Apache-2.0
"""`make demo`, as a person runs it, with real VMs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from demo.__main__ import BRIDGE
from demo.pod import processes_naming
from tests.e2e.pod_case import IMAGES
from tests.harness.durations import slow
from tests.harness.needs import Tier, in_tier

TREE = Path(__file__).resolve().parents[2]
RUN_DIR = "/run/infranetes-demo"
FIRST_RUN_SECONDS = 1800  # for making the guest image and the template


def make_image() -> None:
    """Make the guest image, unless it is there."""
    command = ["make", "--silent", "image", f"IMAGE_DIR={IMAGES}"]
    subprocess.run(command, cwd=TREE, check=True, stdout=subprocess.DEVNULL)


def links() -> set[str]:
    """Return the machine's network interfaces."""
    return set(os.listdir("/sys/class/net"))


def demo(*arguments: str) -> subprocess.Popen[str]:
    """Start the demo with the default action for SIGINT, which children of background jobs ignore."""
    return subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-m", "demo", "--image-dir", IMAGES, *arguments],
        cwd=TREE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@slow(75, "its VMs are emulated where there is no KVM")
class DemoTests(SynchronousTestCase):
    timeout = FIRST_RUN_SECONDS + 60

    def setUp(self) -> None:
        make_image()

    def finish(self, running: subprocess.Popen[str], code: int) -> str:
        try:
            output, _ = running.communicate(timeout=FIRST_RUN_SECONDS)
        finally:
            running.kill()
            running.wait()
        self.assertEqual(running.returncode, code, output)
        return output

    def assertNothingIsLeft(self) -> None:
        self.assertEqual(processes_naming(RUN_DIR), [])
        self.assertNotIn(BRIDGE, links())

    @in_tier(Tier.TEST)  # of real VMs, the one whose life `make test` has
    def test_the_command_runs_in_a_machine_that_is_gone_afterwards(self) -> None:
        output = self.finish(demo("--json", "--command", "echo hello; exit 3"), 0)
        told: dict[str, Any] = json.loads(output)
        self.assertEqual(told["log"], "hello\n")
        self.assertEqual(told["exit_code"], 3)
        self.assertEqual(told["http"], "Hello from the pod")
        self.assertIn("demo", told["exec"])
        self.assertIn(told["pod"]["ip"], told["exec"])
        gone = told["steps"][-1]
        self.assertTrue(gone["facts"]["processes_before"], "no process was the machine")
        self.assertTrue(all(step["ok"] for step in told["steps"]))
        self.assertNothingIsLeft()

    def test_a_person_sees_steps_times_and_the_log(self) -> None:
        output = self.finish(demo("--command", "echo 'it works'"), 0)
        self.assertRegex(output, r"ok RunPodSandbox.*\d\.\d\d s\n")
        self.assertIn("| it works\n", output)

    def interrupt(self, running: subprocess.Popen[str], words: str) -> None:
        """Press Ctrl-C once the demo has shown a line with these words, and see it end."""
        assert running.stdout is not None
        for line in running.stdout:
            if words in line:
                break
        running.send_signal(signal.SIGINT)
        self.finish(running, 130)
        self.assertNothingIsLeft()

    def test_ctrl_c_ends_the_machine_and_the_daemon(self) -> None:
        self.interrupt(demo("--command", "sleep 300"), "ok RunPodSandbox")

    def test_ctrl_c_while_the_machine_starts_ends_it_too(self) -> None:
        self.interrupt(demo(), "ok PullImage")

    def test_ctrl_c_while_the_template_boots_leaves_no_half_of_it(self) -> None:
        state = Path(tempfile.mkdtemp(prefix="infranetes-demo-", dir="/var/tmp"))
        self.addCleanup(shutil.rmtree, state)
        self.interrupt(demo("--state", str(state)), "booting the template")
        self.assertEqual(processes_naming(str(state)), [])
        templates = (state / "node/qemu/templates").iterdir()
        self.assertEqual([each for each in templates if each.is_dir()], [])

    def test_a_daemon_that_can_not_start_is_told_with_its_own_words(self) -> None:
        started = time.monotonic()
        output = self.finish(demo("--provider", "no-such"), 1)
        self.assertIn("no provider is called 'no-such'", output)
        self.assertLess(time.monotonic() - started, 30)
        self.assertNothingIsLeft()
