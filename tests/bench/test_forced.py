# SPDX-License-Identifier: Apache-2.0
"""A bench with an accelerator that does not work says why, and measures nothing with another one."""

from __future__ import annotations

from pathlib import Path

from twisted.internet import reactor as installed
from twisted.trial.unittest import SynchronousTestCase, TestCase

from bench.daemon import Daemon, why_ended
from bench.figures import Missing
from bench.setup import Setup
from infranetes_common.concurrency import start
from infranetes_common.reactors import IReactor
from tests.harness.needs import needs_netns, needs_programs, needs_root

# A QEMU for which KVM does not work, whatever this machine has.
QEMU = """\
#!/bin/sh
[ "$1" != --version ] || { echo "QEMU emulator version 7.2.0"; exit 0; }
echo "no guest runs here" >&2
exit 1
"""


@needs_root
@needs_netns
@needs_programs("nft", "qemu-img")
class ForcedTests(TestCase):
    reactor: IReactor = installed  # type: ignore[assignment]  # whichever trial has

    async def test_kvm_that_does_not_work_is_told(self) -> None:
        table = Setup("kvm").qemu()
        daemon = Daemon(self.reactor, "qemu", table | {"qemu": str(self.qemu())})
        self.addCleanup(lambda: start(daemon.close()))
        with self.assertRaisesRegex(Missing, "KVM is configured and does not work here"):
            await daemon.start()

    def qemu(self) -> Path:
        path = Path(self.mktemp()).absolute()
        path.write_text(QEMU)
        path.chmod(0o755)
        return path


class WhyTests(SynchronousTestCase):
    def test_a_daemon_that_said_why_is_quoted(self) -> None:
        log = "T info a.B: up\nT critical infranetes.service: can't start: no KVM: why\nT info a.B: down"
        self.assertEqual(why_ended(log), "can't start: no KVM: why")

    def test_of_another_the_end_of_its_log_is(self) -> None:
        self.assertTrue(why_ended("T info a.B: up\nTraceback").endswith("up\nTraceback"))
