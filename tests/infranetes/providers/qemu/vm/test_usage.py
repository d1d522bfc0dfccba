# SPDX-License-Identifier: Apache-2.0
"""What a VM's QEMU uses of its node."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.hypervisor import GuestUsage
from infranetes.providers.interface import Attachment
from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes.providers.qemu.network.bridge import open_tap
from infranetes.providers.qemu.vm import usage
from infranetes.providers.qemu.vm.paths import VmPaths
from infranetes.providers.qemu.vm.record import VmRecord
from infranetes_common.errors import Unavailable
from tests.harness.needs import needs_netns


@needs_netns
class UsageTests(SynchronousTestCase):
    """The tap's counters, the disk's blocks, and the process."""

    def setUp(self) -> None:
        self.record = VmRecord(secrets.token_hex(16), "s", "c", "n", "10.0.0.2", 0.0)
        directory = Path(self.mktemp())
        directory.mkdir()
        self.paths = VmPaths(directory, directory, QemuUser(0, 0))
        self.tap = open_tap(self.record.tap)
        self.addCleanup(os.close, self.tap)

    def measured(self) -> GuestUsage:
        return usage.thd_measure(self.record, self.paths, os.getpid())

    def sends(self, size: int) -> None:
        """Have the guest send a frame, which the node receives."""
        os.write(self.tap, bytes(10) + b"\xff" * 6 + b"\x02" + bytes(5) + b"\x88\xb5" + bytes(size - 14))

    def test_what_the_guest_sends_counts_as_sent(self) -> None:
        subprocess.run(["ip", "link", "set", self.record.tap, "up"], check=True)
        before = self.measured()
        self.sends(100)
        found = self.measured()
        self.assertEqual((found.tx_bytes or 0) - (before.tx_bytes or 0), 100)
        self.assertEqual((found.tx_errors, found.rx_errors), (0, 0))

    def test_also_in_a_namespace(self) -> None:
        name = f"infranetes-test-{secrets.token_hex(4)}"
        subprocess.run(["ip", "netns", "add", name], check=True)
        self.addCleanup(subprocess.run, ["ip", "netns", "delete", name], check=True)
        subprocess.run(["ip", "link", "set", self.record.tap, "netns", name], check=True)
        subprocess.run(["ip", "netns", "exec", name, "ip", "link", "set", self.record.tap, "up"], check=True)
        self.assertIsNone(self.measured().tx_bytes, "the node itself has no such link")
        self.record = attrs.evolve(self.record, attachment=Attachment(Path("/run/netns") / name))
        before = self.measured()
        self.sends(100)
        self.assertEqual((self.measured().tx_bytes or 0) - (before.tx_bytes or 0), 100)

    def test_a_disk_counts_as_what_is_written(self) -> None:
        self.assertIsNone(self.measured().disk_bytes, "the root is a volume")
        with self.paths.disk.open("wb") as file:
            file.truncate(1 << 30)
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        self.assertLess(self.measured().disk_bytes or 0, 2 << 20)
        self.assertGreaterEqual(self.measured().disk_bytes or 0, 1 << 20)

    def test_a_process_has_used_processors_and_memory(self) -> None:
        found = self.measured()
        self.assertGreater(found.cpu_nanos or 0, 10**7)
        self.assertGreater(found.memory_bytes or 0, 10 << 20)
        with self.assertRaises(Unavailable):
            usage.thd_measure(self.record, self.paths, 2**22 + 1)
