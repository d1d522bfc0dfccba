# SPDX-License-Identifier: Apache-2.0
"""Disks of the pod: file systems are made, mounted, grown and measured."""

from __future__ import annotations

import grp
import os
import subprocess
from pathlib import Path
from typing import cast

from twisted.internet.task import deferLater

from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from infranetes_common.volume_disks import checked_options, serial_of
from tests.harness.needs import needs_mounts
from tests.vmserver.volumes.disk_case import SERIAL, SIZE, XFS_SIZE, PodDiskCase, reactor
from vmserver.layers.disks import ScsiDisks
from vmserver.machine.mounts import Flag, mount, mounts_below
from vmserver.volumes import disks as disks_module
from vmserver.volumes import filesystems
from vmserver.volumes.disk_records import DiskMount
from vmserver.volumes.disks import PodDisks
from vmserver.volumes.store import VolumeStore

_SYS_RESOURCE = 24  # linux/capability.h


def may_grow_ext4() -> bool:
    """Return whether this process may grow an ext4; others need no more privileges than mounting does."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if "CapEff" in one)
    return bool(int(line.split()[1], 16) >> _SYS_RESOURCE & 1)


@needs_mounts
class PodDiskTests(PodDiskCase):
    async def test_a_blank_disk_is_formatted_once_and_keeps_what_is_written(self) -> None:
        for text in ("first", "second"):
            point = await self.mounted(options=checked_options(["noatime", "noexec", "defaults"]))
            (point / text).write_text(text)
            self.assertEqual(str(point), str(VolumeStore(self.top, self.top, self.top / "disks", mount=False)
                                             .path(SERIAL)))  # fmt: skip
            [found] = mounts_below(self.top)
            self.assertTrue({"noatime", "noexec", "nodev", "rw"} <= found.options, found.options)
            for _ in range(2):
                await self.disks.unmount(SERIAL)
                self.assertEqual(mounts_below(self.top), [])
            self.assertEqual(self.loops.forgotten, [SERIAL, SERIAL])
            self.loops.forgotten.clear()
        self.assertEqual((await self.mounted() / "first").read_text(), "first")

    async def test_who_stops_waiting_leaves_no_half_made_file_system(self) -> None:
        mounting = start(self.mounted())
        mounting.addErrback(lambda failure: None)
        await deferLater(reactor, 0.05, lambda: None)  # whether or not its programs have started
        mounting.cancel()
        await self.disks.unmount(SERIAL)
        self.assertEqual(mounts_below(self.top), [])
        (await self.mounted() / "file").write_text("whole")

    async def test_what_holds_anything_is_never_formatted(self) -> None:
        contents = {
            "swap": (4086, b"SWAPSPACE2"),
            "a partition table": (510, b"\x55\xaa"),
            "something at its beginning": (100_000, b"x"),
            "something where LUKS2 may begin": (4 << 20, b"x"),
            "something at its end": (SIZE - 1, b"x"),
            "something 4 MiB before its end": (SIZE - (4 << 20) - 1, b"x"),
        }
        for what, (offset, data) in contents.items():
            with self.file.open("r+b") as file:
                file.seek(offset)
                file.write(data)
            before = self.file.read_bytes()
            for _ in range(2):
                self.assertIn("not formatted", await self.refused(), what)
            self.assertEqual(self.file.read_bytes(), before)
            with self.file.open("r+b") as file:
                file.seek(offset)
                file.write(bytes(len(data)))

    async def test_on_a_blank_disk_no_program_looks_first_and_none_grows_what_was_made(self) -> None:
        for name in ("found_on", "grow", "is_smaller"):
            self.patch(filesystems, name, None)
        (await self.mounted() / "file").write_text("kept")

    async def test_a_disk_that_is_too_small_is_told(self) -> None:
        os.truncate(self.file, 16 * 1024)
        self.loops.look_at_size(0)
        self.assertIn("can't be made", await self.refused())

    async def test_another_file_system_is_not_replaced(self) -> None:
        await self.mounted()
        await self.disks.unmount(SERIAL)
        self.assertIn("ext4", await self.refused(filesystem="xfs"))

    async def test_a_damaged_file_system_is_told_and_left_alone(self) -> None:
        await self.mounted()
        await self.disks.unmount(SERIAL)
        with self.file.open("r+b") as file:
            file.seek(1024 + 0x60)  # feature flags unknown to any kernel
            file.write(b"\xff" * 4)
        before = self.file.read_bytes()
        await self.refused()
        self.assertEqual(self.file.read_bytes(), before)

    async def test_a_read_only_disk_is_neither_formatted_nor_written_to(self) -> None:
        self.assertIn("empty", await self.refused(read_only=True))
        (await self.mounted() / "file").write_text("here")
        await self.disks.unmount(SERIAL)
        point = await self.mounted(read_only=True, group=4711)
        self.assertEqual((point / "file").read_text(), "here")
        self.assertRaises(OSError, (point / "more").write_text, "no")
        self.assertNotEqual(point.stat().st_gid, 4711)

    async def test_a_disk_and_its_copy_are_mounted_side_by_side(self) -> None:
        """Such as a volume and one that was made from its snapshot: their file systems have the same UUID."""
        for filesystem, size in (("ext4", SIZE), ("xfs", XFS_SIZE)):
            self.file.write_bytes(b"")
            os.truncate(self.file, size)
            self.loops.look_at_size(0)
            point = await self.mounted(filesystem=filesystem)
            (point / "file").write_text("kept")
            descriptor = os.open(point, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            subprocess.run(["sync", "--file-system", point], check=True)
            copy, serial = self.top / f"copy-{filesystem}", serial_of(f"copy-{filesystem}")
            subprocess.run(["cp", "--sparse=always", self.file, copy], check=True)
            self.attach(serial, copy)
            await self.disks.mount(DiskMount(serial, filesystem, []))
            self.assertEqual((self.top / "disks" / serial / "directory" / "file").read_text(), "kept")
            (point / "file").write_text("changed")
            for one in (serial, SERIAL):
                await self.disks.unmount(one)

    async def test_a_file_system_grows_with_its_disk(self) -> None:
        filesystem, size = ("ext4", SIZE) if may_grow_ext4() else ("xfs", XFS_SIZE)
        os.truncate(self.file, size)
        self.loops.look_at_size(0)
        await self.mounted(filesystem=filesystem)
        before = (await self.disks.usage(SERIAL, grow=True)).space
        os.truncate(self.file, 3 * size)
        for _ in range(2):
            found = await self.disks.usage(SERIAL, grow=True)
            self.assertEqual(found.disk, 3 * size)
            self.assertGreater(found.space.total, 2 * before.total)
        await self.disks.unmount(SERIAL)
        os.truncate(self.file, 4 * size)
        await self.mounted(filesystem=filesystem)
        self.assertGreater((await self.disks.usage(SERIAL, grow=False)).space.total, 3 * before.total)

    async def test_what_is_written_counts(self) -> None:
        point = await self.mounted()
        before = (await self.disks.usage(SERIAL, grow=False)).space
        (point / "large").write_bytes(bytes(4 << 20))
        after = (await self.disks.usage(SERIAL, grow=False)).space
        self.assertGreaterEqual(after.used - before.used, 4 << 20)
        self.assertEqual(before.free_inodes - after.free_inodes, 1)
        self.assertLessEqual(after.used + after.available, after.total)
        await self.disks.unmount(SERIAL)
        await self.fails(NotFound, self.disks.usage(SERIAL, grow=False))

    async def test_its_files_are_given_to_the_group_once(self) -> None:
        point = await self.mounted()
        (point / "data").mkdir(mode=0o700)
        (point / "data" / "file").write_text("x")
        (point / "data" / "file").chmod(0o600)
        (point / "link").symlink_to("/etc/shadow")
        shadow = os.stat("/etc/shadow")
        await self.mounted(group=4711)
        for path, mode in ((point, 0o2770), (point / "data", 0o2770), (point / "data" / "file", 0o660)):
            found = path.stat()
            self.assertEqual((found.st_gid, found.st_mode & mode), (4711, mode), path)
        self.assertEqual((point / "link").lstat().st_gid, 4711)
        self.assertEqual(os.stat("/etc/shadow"), shadow)
        os.chown(point / "data" / "file", -1, 7)
        await self.mounted(group=4711)
        self.assertEqual((point / "data" / "file").stat().st_gid, 7, "the top is the group's already")

    async def test_what_is_pending_is_written_to_a_disk_that_stays_mounted(self) -> None:
        point = await self.mounted()
        seen: list[Path] = []
        self.patch(disks_module, "sync", seen.append)
        with (point / "file").open("w"):  # in use, as by a container
            for _ in range(2):
                await self.disks.sync(SERIAL)
        self.assertEqual(seen, [point] * 2)
        self.assertTrue(os.path.ismount(point))
        await self.disks.unmount(SERIAL)
        await self.fails(NotFound, self.disks.sync(SERIAL))

    async def test_a_disk_that_is_used_stays_with_what_was_written(self) -> None:
        point = await self.mounted()
        (point / "sub").mkdir()
        part = self.top / "part"
        part.mkdir()
        mount(str(point / "sub"), str(part), "", Flag.BIND)
        used = (part / "file").open("w")
        with used:
            self.assertIn("still used", await self.fails(FailedPrecondition, self.disks.unmount(SERIAL)))
            self.assertEqual(self.loops.forgotten, [])
        await self.disks.unmount(SERIAL)
        self.assertEqual(mounts_below(self.top), [])

    async def test_a_disk_that_comes_late_is_waited_for_and_one_that_does_not_is_told(self) -> None:
        device = self.loops.devices.pop(SERIAL)
        mounting = start(self.mounted())
        await deferLater(reactor, 0, lambda: None)
        self.loops.devices[SERIAL] = device
        await mounting
        self.patch(disks_module, "APPEAR_SECONDS", 0.0)
        self.assertIn("0" * 20, await self.fails(Unavailable, self.mounted(serial="0" * 20)))

    async def test_where_it_can_not_be_mounted_there_is_no_place_for_it(self) -> None:
        with self.file.open("r+b") as file:
            file.seek(1024 + 0x38)
            file.write(b"\x53\xef")
        await self.refused()
        self.assertFalse(self.point.exists())

    async def test_a_raw_disk_is_found_with_what_was_written_and_stays_until_it_is_given_up(self) -> None:
        for _ in range(2):
            self.assertEqual(await self.disks.find(SERIAL), self.loops.devices[SERIAL])
        again = PodDisks(reactor, self.top / "disks", cast(ScsiDisks, self.loops))  # a later agent
        await self.fails(Unavailable, self.looked_for(again, "0" * 20))
        self.assertEqual(self.loops.used, {SERIAL}, "it is not forgotten while another one is looked for")
        with open(self.loops.devices[SERIAL], "r+b", buffering=0) as device:
            device.write(b"kept".ljust(512, b"\0"))
        await again.sync(SERIAL)
        self.assertEqual((self.file.read_bytes()[:4], self.loops.forgotten), (b"kept", []))
        for _ in range(2):
            await again.unmount(SERIAL)
            self.assertEqual(self.file.read_bytes()[:4], b"kept")
            self.assertEqual(self.loops.forgotten[:1], [SERIAL])
        self.assertEqual(mounts_below(self.top), [])
        self.assertEqual(self.file.read_bytes()[4:], bytes(SIZE - 4), "nothing was made on it")

    async def looked_for(self, disks: PodDisks, serial: str) -> str:
        self.patch(disks_module, "APPEAR_SECONDS", 0.0)
        return await disks.find(serial)

    async def test_a_raw_disk_is_its_groups_at_once(self) -> None:
        device = self.loops.devices[SERIAL]
        before = os.stat(device)
        self.addCleanup(os.chown, device, before.st_uid, before.st_gid)
        self.addCleanup(os.chmod, device, before.st_mode & 0o777)
        os.chown(device, 0, 0)
        os.chmod(device, 0o600)
        await self.disks.find(SERIAL)
        found = os.stat(device)
        self.assertEqual((found.st_gid, found.st_mode & 0o777), (grp.getgrnam("disk").gr_gid, 0o660))

    async def test_a_disk_is_mounted_or_raw_but_not_both(self) -> None:
        await self.mounted()
        self.assertIn("mounted", await self.fails(FailedPrecondition, self.disks.find(SERIAL)))
        await self.disks.unmount(SERIAL)
        await self.disks.find(SERIAL)
        self.assertIn("a raw device of a container", await self.refused())
        await self.disks.unmount(SERIAL)
        await self.mounted()

    async def test_a_raw_disk_that_has_grown_is_looked_at(self) -> None:
        await self.disks.find(SERIAL)
        os.truncate(self.file, 2 * SIZE)
        self.assertEqual((await self.disks.usage(SERIAL, grow=False)).disk, SIZE)
        for _ in range(2):
            self.assertEqual((await self.disks.usage(SERIAL, grow=True)).disk, 2 * SIZE)
        await self.disks.unmount(SERIAL)
        await self.fails(NotFound, self.disks.usage(SERIAL, grow=False))

    def test_options_that_could_do_harm_are_refused(self) -> None:
        for option in (
            "dax",
            "errors=continue",
            "nobarrier",
            "journal_path=/x",
            "",
            "x,y",
            "bind",
            "remount",
        ):
            self.assertRaises(InvalidArgument, checked_options, [option])
        self.assertEqual(checked_options(["rw", "ro", "ro", "discard"]), ["ro", "discard"])
