# SPDX-License-Identifier: Apache-2.0
"""A pod's disk is found by its serial number, wherever the hypervisor has put it."""

from __future__ import annotations

import shutil
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.volume_disks import TARGET, serial_of
from vmserver.layers import disks
from vmserver.layers.disks import ScsiDisks

HOST = 2
ONE, OTHER = serial_of("one"), serial_of("other")


class SerialTests(SynchronousTestCase):
    """Files like those of sysfs: a scan shows the hypervisor's disks; none disappears by itself."""

    def setUp(self) -> None:
        self.sys, self.dev = Path(self.mktemp()).absolute(), Path(self.mktemp()).absolute()
        host = self.sys / f"class/scsi_host/host{HOST}"
        host.mkdir(parents=True)
        (host / "proc_name").write_text("virtio_scsi\n")
        self.devices = self.sys / "bus/scsi/devices"
        self.devices.mkdir(parents=True)
        self.dev.mkdir()
        self.attached: dict[int, str] = {}  # the hypervisor's disks by LUN
        self.scans = 0
        self.patch(disks, "_write", self.write)
        self.scsi = ScsiDisks(self.sys, self.dev)

    def write(self, attribute: Path, text: str) -> None:
        if attribute.name == "delete":
            shutil.rmtree(attribute.parent)
        elif attribute.name == "scan":
            self.assertEqual(text, f"0 {TARGET} -")
            self.scans += 1
            for lun, serial in self.attached.items():
                disk = self.devices / f"{HOST}:0:{TARGET}:{lun}"
                if not disk.exists():
                    (disk / f"block/sd{lun}").mkdir(parents=True)
                    (disk / f"block/sd{lun}/dev").write_text(f"8:{lun}\n")
                    (disk / "vendor").write_text("QEMU    \n")
                    (disk / "vpd_pg80").write_bytes(b"\0\x80\0\x14" + serial.encode())
                    (self.dev / f"sd{lun}").touch()

    def found(self, serial: str) -> str | None:
        path = self.scsi.with_serial(TARGET, serial)
        return Path(path).name if path is not None else None

    def test_one_that_has_come_is_found_and_then_known(self) -> None:
        self.assertIsNone(self.found(ONE))
        self.attached = {0: ONE, 3: OTHER}
        self.assertEqual(self.found(OTHER), "sd3")
        scans = self.scans
        self.assertEqual((self.found(OTHER), self.found(ONE), self.scans), ("sd3", "sd0", scans))

    def test_one_in_the_place_of_another_that_was_taken_away_is_found(self) -> None:
        self.attached = {0: ONE}
        self.assertEqual(self.found(ONE), "sd0")
        self.attached = {0: OTHER}
        self.assertEqual(self.found(OTHER), "sd0")
        self.assertIsNone(self.found(ONE))

    def test_one_that_is_mounted_is_never_forgotten_for_another(self) -> None:
        self.attached = {0: ONE}
        self.assertEqual(self.found(ONE), "sd0")
        self.patch(ScsiDisks, "_mounted", lambda scsi, disk: True)
        self.assertIsNone(self.found(OTHER))
        self.scsi.forget_unmounted(TARGET, ONE)
        self.assertTrue((self.devices / f"{HOST}:0:{TARGET}:0").exists())

    def test_one_that_is_used_without_a_mount_is_never_forgotten_for_another(self) -> None:
        self.attached = {0: ONE}
        self.assertEqual(self.found(ONE), "sd0")
        self.attached = {0: OTHER}
        self.assertIsNone(self.scsi.with_serial(TARGET, OTHER, used={ONE}))
        self.assertEqual(self.found(ONE), "sd0")
        self.assertEqual(self.found(OTHER), "sd0")

    def test_one_that_was_unmounted_is_forgotten_and_can_come_again(self) -> None:
        self.attached = {0: ONE, 1: OTHER}
        self.assertEqual((self.found(ONE), self.found(OTHER)), ("sd0", "sd1"))
        for _ in range(2):
            self.scsi.forget_unmounted(TARGET, ONE)
        self.assertEqual([one.name for one in self.devices.iterdir()], [f"{HOST}:0:{TARGET}:1"])
        self.assertEqual(self.found(ONE), "sd0")
