# SPDX-License-Identifier: Apache-2.0
"""The pod's disks, when their VM is killed while a file system is made, or reboots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from twisted.internet.defer import Deferred, fail
from twisted.internet.task import deferLater

from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.volume_disks import serial_of
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_mounts
from tests.vmserver.volumes.disk_case import SERIAL, SIZE, XFS_SIZE, PodDiskCase, reactor
from vmserver.containers.machine.provider import MachineConfig, MachineProvider
from vmserver.layers.disks import ScsiDisks
from vmserver.machine.mounts import mounts_below
from vmserver.volumes import disks as disks_module
from vmserver.volumes import filesystems, making
from vmserver.volumes.disks import PodDisks


@needs_mounts
class DiskEndTests(PodDiskCase):
    @slow(6, "fourteen file systems are made and mounted")
    async def test_what_ends_while_a_file_system_is_made_is_made_again(self) -> None:
        """Whatever a killed VM's mkfs has written, and however far it got."""
        for filesystem, size in (("ext4", SIZE), ("xfs", XFS_SIZE)):
            whole = self.top / f"whole-{filesystem}"
            self.blank(size)
            making.mark(self.loops.devices[SERIAL], SERIAL)
            await filesystems.make(reactor, self.loops.devices[SERIAL], filesystem)
            self.assertTrue(making.is_marked(self.loops.devices[SERIAL], SERIAL))
            self.file.rename(whole)
            for part in self.parts(whole, filesystem):
                self.blank(size)
                making.mark(self.loops.devices[SERIAL], SERIAL)
                self.write(part)
                (await self.mounted(filesystem=filesystem) / "file").write_text("here")
                await self.disks.unmount(SERIAL)
                self.assertFalse(making.is_marked(self.loops.devices[SERIAL], SERIAL))
                self.assertEqual((await self.mounted(filesystem=filesystem) / "file").read_text(), "here")
                await self.disks.unmount(SERIAL)
            whole.unlink()

    def blank(self, size: int) -> None:
        """Make a disk of that size blank."""
        self.file.unlink(missing_ok=True)
        with self.file.open("wb") as file:
            file.truncate(size)
        self.attach()

    def write(self, pieces: dict[int, bytes]) -> None:
        with open(self.loops.devices[SERIAL], "r+b") as device:
            for at, data in pieces.items():
                device.seek(at)
                device.write(data)
            device.flush()
            os.fsync(device.fileno())

    def parts(self, whole: Path, filesystem: str) -> Iterator[dict[int, bytes]]:
        """Yield what may be on a disk while a file system is made on it, by offset."""
        blocks: dict[int, bytes] = {}
        empty = bytes(4096)
        with whole.open("rb") as file:
            at = 0
            while data := file.read(4096):
                if data != empty:
                    blocks[at] = data
                at += 4096
        if filesystem == "xfs":  # it marks itself as in progress at its beginning
            blocks[0] = blocks[0][:126] + b"\1" + blocks[0][127:]
        self.assertGreater(len(blocks), 4)
        yield {}
        yield blocks
        yield {0: blocks[0]}
        yield {at: data for at, data in blocks.items() if at}
        for begin in range(2):
            yield dict(list(blocks.items())[begin::2])

    async def test_a_mark_in_somebodys_data_changes_nothing(self) -> None:
        """Any user who may write files could have written it."""
        (await self.mounted() / "file").write_text("here")
        await self.disks.unmount(SERIAL)
        making.mark(self.loops.devices[SERIAL], SERIAL)
        self.assertIn("ext4", await self.refused(filesystem="xfs"))
        self.assertEqual((await self.mounted() / "file").read_text(), "here")

    async def test_the_mark_of_another_disk_is_somebodys_data(self) -> None:
        making.mark(self.loops.devices[SERIAL], serial_of("pvc-2"))
        self.assertIn("not formatted", await self.refused())

    async def test_what_fails_while_it_is_made_is_made_by_the_next_call(self) -> None:
        def broken(*_: object, **__: object) -> Deferred[None]:
            return fail(FailedPrecondition("mkfs was killed"))

        kept = filesystems.make
        self.patch(filesystems, "make", broken)
        self.assertIn("killed", await self.refused())
        self.patch(filesystems, "make", kept)
        self.assertIn("empty", await self.refused(read_only=True))
        await self.mounted()

    async def test_after_a_reboot_it_is_mounted_again(self) -> None:
        wanted = {"options": ["noatime"], "group": 4711}
        (await self.mounted(**wanted) / "file").write_text("here")
        self.reboot()
        self.assertTrue(self.point.exists())
        for _ in range(2):
            await self.disks.restore()
            self.assertEqual((self.point / "file").read_text(), "here")
            [found] = mounts_below(self.top)
            self.assertIn("noatime", found.options)
        await self.disks.unmount(SERIAL)
        self.reboot()
        await self.disks.restore()
        self.assertFalse(self.point.exists())

    def reboot(self) -> None:
        """Start another agent, with nothing mounted."""
        self.unmount_all()
        self.disks = PodDisks(reactor, self.top / "disks", cast(ScsiDisks, self.loops))
        self.addCleanup(self.disks.stop)

    async def test_after_a_reboot_a_disk_that_comes_late_has_no_mount_point_until_then(self) -> None:
        self.patch(disks_module, "RESTORE_SECONDS", 0.0)
        await self.mounted()
        self.reboot()
        device = self.loops.devices.pop(SERIAL)
        await self.disks.restore()
        self.assertFalse(self.point.exists())
        self.loops.devices[SERIAL] = device
        until = reactor.seconds() + 20.0
        while not os.path.ismount(self.point):
            self.assertLess(reactor.seconds(), until)
            await deferLater(reactor, 0.05, lambda: None)

    async def test_a_disk_that_was_unmounted_meanwhile_is_not_mounted_again(self) -> None:
        self.patch(disks_module, "RESTORE_SECONDS", 0.0)
        await self.mounted()
        self.reboot()
        device = self.loops.devices.pop(SERIAL)
        await self.disks.restore()
        await self.disks.unmount(SERIAL)
        self.loops.devices[SERIAL] = device
        await deferLater(reactor, 1.0, lambda: None)
        self.assertEqual(mounts_below(self.top), [])

    async def test_what_the_vm_itself_writes_after_a_reboot_is_on_the_disk(self) -> None:
        """The container is the VM: its own mount has what is mounted for it, or nothing."""
        self.patch(disks_module, "RESTORE_SECONDS", 0.0)
        at = self.top / "data"
        mounts = [cri.Mount(container_path=str(at), host_path=str(await self.mounted() / "part"))]
        (self.point / "part").mkdir()
        config = MachineConfig(self.top / "machine", kill_command=("true",))
        first = MachineProvider(reactor, config)
        await first.start()
        await first.create("c1", "image", cri.ContainerConfig(mounts=mounts), cri.PodSandboxConfig())
        await first.start_container("c1")
        (at / "first").write_text("1")
        self.reboot()
        device = self.loops.devices.pop(SERIAL)
        await self.disks.restore()
        second = MachineProvider(reactor, config)
        for _ in range(2):
            await self.assertFailure(second.start(), Unavailable)
            self.assertEqual(os.listdir(at), [])
        self.loops.devices[SERIAL] = device
        until = reactor.seconds() + 20.0
        while not os.path.ismount(self.point):
            self.assertLess(reactor.seconds(), until)
            await deferLater(reactor, 0.05, lambda: None)
        await second.start()
        (at / "second").write_text("2")
        self.assertEqual(sorted(os.listdir(self.point / "part")), ["first", "second"])
        await second.remove("c1")
        await self.disks.unmount(SERIAL)
        self.assertEqual(mounts_below(self.top), [])
