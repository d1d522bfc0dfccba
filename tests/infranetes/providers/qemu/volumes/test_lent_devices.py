# SPDX-License-Identifier: Apache-2.0
"""Block devices of the node that QEMU's pods may have."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface.verify import verifyObject

from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.volumes.attached import VolumeAttacher
from infranetes.providers.qemu.volumes.lent_devices import LentDevices
from infranetes.providers.qemu.volumes.volumes import QemuVolumes
from infranetes.providers.volumes import ILendsDevices
from infranetes_common.concurrency import Flight
from infranetes_common.errors import FailedPrecondition, NotFound
from infranetes_common.volume_disks import serial_of
from tests.harness.needs import needs_mounts, needs_root
from tests.infranetes.providers.qemu.bare_qemu import BareQemuCase, reactor
from tests.support.file_systems import loop_device

_SIZE = 16 << 20


class DeviceCase(SynchronousTestCase):
    """Tests with two loop devices."""

    def setUp(self) -> None:
        self.top = Path(self.mktemp()).absolute()
        self.top.mkdir()
        self.device, self.other = [loop(self, self.top / name) for name in ("one", "two")]


def loop(case: SynchronousTestCase, file: Path) -> str:
    """Return a loop device of a new file."""
    with file.open("wb") as content:
        content.truncate(_SIZE)
    return loop_device(case, file)


@needs_root
class LentDeviceTests(DeviceCase):
    def test_what_is_listed_is_known_again_by_its_id(self) -> None:
        (self.top / "link").symlink_to(self.device)
        for listed in (self.device, str(self.top / "link")):
            lent = LentDevices([listed, "/dev/none"])
            self.assertEqual(lent.path_of(lent.id_of(self.device)), Path(self.device))
        self.assertIsNone(lent.path_of("data"), "a file")

    def test_what_is_not_is_refused_by_name_and_setting(self) -> None:
        for listed in ([], [self.other], ["/dev/none"], [str(self.top)]):
            lent = LentDevices(listed)
            for call in (lent.id_of, lambda path, lent=lent: lent.path_of(f"device:{path}")):
                with self.assertRaisesRegex(FailedPrecondition, f"{self.device} .* providers.qemu.devices"):
                    call(self.device)

    def test_what_is_no_block_device_is_refused_whatever_is_listed(self) -> None:
        for path in ("/dev/null", str(self.top), "/dev/none", "", "relative"):
            with self.assertRaisesRegex(FailedPrecondition, "no block device"):
                LentDevices([path]).id_of(path)


class SettingTests(SynchronousTestCase):
    def test_none_are_lent_by_default(self) -> None:
        self.assertEqual(QemuSettings().devices, ())

    def test_paths_of_devices_are_taken_and_nothing_else(self) -> None:
        for path in ("/dev/sdb", "/dev/disk/by-id/nvme-1", "/dev/mapper/vg-data"):
            self.assertEqual(QemuSettings(devices=(path,)).devices, (path,))
        for path in ("", "sdb", "/dev", "/dev/", "/etc/passwd", "/dev/../etc/x", "/dev//sdb", "/dev/a\n"):
            with self.assertRaisesRegex(ValueError, "devices"):
                QemuSettings(devices=("/dev/sdb", path))


@needs_mounts
class AttachedTests(BareQemuCase, TestCase):
    """Devices attached to QEMUs without guests."""

    def setUp(self) -> None:
        super().setUp()
        self.top = Path(self.mktemp()).absolute()
        self.top.mkdir()
        self.device = loop(self, self.top / "disk")
        self.vms = {vm.record.id: vm for vm in (self.bare_vm(), self.bare_vm())}
        self.first, self.second = self.vms
        self.attacher = VolumeAttacher(
            reactor, self.vms.__getitem__, lambda: list(self.vms.values()), lambda work: Flight(work).join()
        )
        self.volumes = QemuVolumes(reactor, self.top / "volumes", "node", self.attacher, [self.device])

    async def refused(self, work: Deferred[str]) -> str:
        with self.assertRaises(FailedPrecondition) as caught:
            await work
        return str(caught.exception)

    async def test_one_vm_at_a_time_has_it_under_a_serial_number(self) -> None:
        verifyObject(ILendsDevices, self.volumes)
        self.assertTrue(self.volumes.lends)
        volume = await self.volumes.lend(self.device)
        for _ in range(2):
            serial = await self.volumes.attach(self.first, volume, False)
            self.assertEqual(serial, serial_of(volume))
            self.assertEqual(self.open_files(self.first).count(self.device), 1)
            words = await self.refused(self.volumes.attach(self.second, volume, False))
            self.assertIn("another VM has it", words)
        for _ in range(2):
            await self.volumes.detach(self.first, volume)
            self.assertNotIn(self.device, self.open_files(self.first))
        await self.volumes.attach(self.second, volume, False)
        await self.volumes.detach(self.second, volume)

    async def test_it_is_no_volume_of_the_drivers(self) -> None:
        volume = await self.volumes.lend(self.device)
        await self.assertFailure(self.volumes.get(volume), NotFound)
        await self.volumes.delete(volume)
        self.assertTrue(os.path.exists(self.device))
        self.assertEqual(await self.volumes.list(), [])

    async def test_one_that_the_node_itself_uses_is_refused(self) -> None:
        subprocess.run(["mkfs.ext4", "-q", "-F", self.device], check=True)
        point = self.top / "point"
        point.mkdir()
        subprocess.run(["mount", self.device, point], check=True)
        volume = await self.volumes.lend(self.device)
        try:
            for _ in range(2):
                words = await self.refused(self.volumes.attach(self.first, volume, False))
                self.assertIn("the node itself uses it", words)
                self.assertNotIn(self.device, self.open_files(self.first))
        finally:
            subprocess.run(["umount", point], check=True)
        await self.volumes.attach(self.first, volume, False)
        await self.volumes.detach(self.first, volume)

    async def test_one_that_is_not_listed_any_more_is_not_attached(self) -> None:
        volume = await self.volumes.lend(self.device)
        later = QemuVolumes(reactor, self.top / "volumes", "node", self.attacher)
        self.assertFalse(later.lends)
        self.assertIn("providers.qemu.devices", await self.refused(later.attach(self.first, volume, False)))
        self.assertIn("providers.qemu.devices", await self.refused(later.lend(self.device)))
        await later.detach(self.first, volume)
