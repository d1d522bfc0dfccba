# SPDX-License-Identifier: Apache-2.0
"""Snapshots of this node's volumes that no VM has: copies, and shared blocks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from threading import Event

from twisted.internet.defer import Deferred
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import TestCase

from infranetes.providers.qemu.volumes import copies, sparse_files
from infranetes.providers.qemu.volumes.volumes import QemuVolumes
from infranetes.providers.volumes import FromSnapshot, FromVolume, IHasSnapshots
from infranetes_common.concurrency import Flight, sleep
from infranetes_common.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from tests.contract.snapshots import SnapshotsContract
from tests.harness.needs import needs_mounts, needs_programs
from tests.infranetes.csi.case import without_vms
from tests.infranetes.providers.qemu.bare_qemu import reactor
from tests.support.file_systems import mounted

MIB = 1 << 20


class FileCase(TestCase):
    """Tests with volumes that no VM has."""

    def setUp(self) -> None:
        self.directory = self.place() / "volumes"
        self.volumes = self.daemon()

    def place(self) -> Path:
        return Path(self.mktemp()).absolute()

    def daemon(self) -> QemuVolumes:
        return QemuVolumes(reactor, self.directory, "node", without_vms())

    def file(self, volume_id: str) -> Path:
        return self.directory / f"{volume_id}.raw"

    async def made(self) -> IHasSnapshots:
        return self.volumes

    async def next_daemon(self, volumes: IHasSnapshots) -> IHasSnapshots:
        return self.daemon()

    async def write(self, volume_id: str, content: bytes) -> None:
        with self.file(volume_id).open("r+b") as file:
            file.write(content)

    async def read(self, volume_id: str, count: int) -> bytes:
        with self.file(volume_id).open("rb") as file:
            return file.read(count)


@needs_mounts
class CopiedTests(FileCase, SnapshotsContract):
    """The contract, where data is copied; and what else can happen."""

    def place(self) -> Path:
        return mounted(self, "tmpfs", 64 * MIB)  # on which blocks can't be shared

    async def free_is(self, mib: int) -> None:
        """Check how much space is free, ignoring what directory entries take."""
        self.assertApproximates(await self.volumes.free(), mib * MIB, MIB)

    async def test_holes_take_no_room_in_a_copy(self) -> None:
        await self.volumes.create("data", 8 * MIB)
        with self.file("data").open("r+b") as file:
            file.seek(5 * MIB)
            file.write(b"here")
        taken = await self.volumes.snapshots.create("one", "data")
        await self.volumes.snapshots.restore("restored", 8 * MIB, FromSnapshot(taken.id))
        disk = self.directory / "snapshots" / "one.snapshot" / "disk.raw"
        for copy in (disk, self.file("restored")):
            self.assertEqual(copy.read_bytes(), self.file("data").read_bytes())
            self.assertLess(copy.stat().st_blocks * 512, MIB)
            self.assertEqual(copy.stat().st_mode & 0o777, 0o600)

    async def test_room_is_not_given_away_twice(self) -> None:
        await self.volumes.create("data", 20 * MIB)
        self.file("data").write_bytes(os.urandom(15 * MIB) + bytes(5 * MIB))
        await self.free_is(44)
        await self.volumes.snapshots.create("one", "data")
        await self.free_is(24)
        with self.assertRaises(ResourceExhausted):
            await self.volumes.snapshots.restore("restored", 25 * MIB, FromSnapshot("one"))
        await self.volumes.snapshots.restore("restored", 20 * MIB, FromSnapshot("one"))
        await self.free_is(4)
        with self.assertRaises(ResourceExhausted):
            await self.volumes.snapshots.create("two", "data")
        self.assertEqual(os.listdir(self.directory / "snapshots"), ["one.snapshot"])
        await self.volumes.snapshots.delete("one")
        await self.free_is(24)

    async def test_room_is_kept_while_it_is_copied(self) -> None:
        await self.volumes.create("data", 10 * MIB)
        self.file("data").write_bytes(os.urandom(10 * MIB))
        began: Deferred[None] = Deferred()
        goes_on: Deferred[None] = Deferred()

        async def slow(*arguments: object) -> None:
            began.callback(None)
            await goes_on

        self.patch(copies, "_thd_clone", lambda source, target: None)
        self.patch(self.volumes._copies, "_copy_data", slow)
        flight = Flight(self.volumes.snapshots.create("one", "data"))
        await began
        self.assertEqual(await self.volumes.free(), 44 * MIB)
        goes_on.errback(Unavailable("the disk is slow"))
        await self.fails(Unavailable, flight.join())
        self.assertEqual(await self.volumes.free(), 54 * MIB)

    async def test_what_a_killed_daemon_has_left_is_no_snapshot_and_goes(self) -> None:
        await self.volumes.create("data", MIB)
        await self.volumes.snapshots.create("kept", "data")
        await self.volumes.snapshots.restore("restored", MIB, FromVolume("data"))
        snapshots = self.directory / "snapshots"
        shutil.copytree(snapshots / "kept.snapshot", snapshots / "A user's copy.snapshot.partial")
        partial = self.directory / "snapshots" / "one.snapshot.partial"
        partial.mkdir()
        (partial / "disk.raw").write_bytes(bytes(MIB))
        (partial / "about.json").write_text('{"volume": "data", "created": 1.0}')
        for name in ("new.raw.new", "gone.source", "new.source.new"):
            (self.directory / name).write_text('{"volume": "data"}')
        (self.directory / "notes.new").touch()  # a user's file
        after = self.daemon()
        self.assertEqual([each.id for each in await after.snapshots.list()], ["kept"])
        self.assertEqual([each.id for each in await after.list()], ["data", "restored"])
        await after.snapshots.sweep()
        names = sorted(os.listdir(self.directory / "snapshots"))
        self.assertEqual(names, ["A user's copy.snapshot.partial", "kept.snapshot"])
        left = ["data.raw", "notes.new", "restored.raw", "restored.source", "snapshots"]
        self.assertEqual(sorted(os.listdir(self.directory)), left)
        await after.snapshots.create("one", "data")
        await after.delete("restored")
        self.assertNotIn("restored.source", os.listdir(self.directory))

    async def test_what_a_killed_daemon_has_left_goes_before_the_next_copy(self) -> None:
        """Also if that comes sooner than the sweep of the daemon's start."""
        await self.volumes.create("data", MIB)
        snapshots = self.directory / "snapshots"
        for number, copy in enumerate(("snapshot", "clone")):
            partial = snapshots / f"left{number}.snapshot.partial"
            partial.mkdir(parents=True)
            after = self.daemon()
            if copy == "snapshot":
                await after.snapshots.create("one", "data")
            else:
                await after.snapshots.restore("clone", MIB, FromVolume("data"))
            self.assertEqual(os.listdir(snapshots), ["one.snapshot"])

    async def test_where_nothing_is_left_no_vm_is_asked(self) -> None:
        after = self.daemon()
        asked: list[str] = []

        async def end() -> None:
            asked.append("end_mirrors")

        self.patch(after._attacher, "end_mirrors", end)
        await after.snapshots.sweep()
        self.assertEqual(asked, [])

    async def test_what_is_made_while_it_goes_is_left_alone(self) -> None:
        after = self.daemon()
        new, made = self.directory / "data.raw.new", self.directory / "data.raw"
        self.directory.mkdir(exist_ok=True)
        new.touch()
        await after._lock.acquire()  # as `create` does
        sweeping = after.snapshots.sweep()
        await sleep(reactor, 0.2)
        new.replace(made)
        after._lock.release()
        await sweeping
        self.assertTrue(made.exists())

    async def test_a_directory_that_can_not_be_is_named(self) -> None:
        await self.volumes.create("data", MIB)
        await self.volumes.snapshots.sweep()
        (self.directory / "snapshots").mkdir()
        (self.directory / "snapshots" / "one.snapshot.partial").write_text("a file in the way")
        words = await self.fails(Unavailable, self.volumes.snapshots.create("one", "data"))
        self.assertIn(f"snapshot one can't be made in {self.directory}/snapshots", words)

    async def test_what_qemu_may_still_write_to_is_not_removed(self) -> None:
        partial = self.directory / "snapshots" / "one.snapshot.partial"
        partial.mkdir(parents=True)
        after = self.daemon()

        async def fail() -> None:
            raise Unavailable("QEMU does not end copy-data")

        failing = self.patch(after._attacher, "end_mirrors", fail)
        with capturedLogs() as events:
            await after.snapshots.sweep()
        self.assertIn("QEMU does not end copy-data", " ".join(map(formatEvent, events)))
        self.assertTrue(partial.exists())
        failing.restore()
        await self.daemon().snapshots.sweep()
        self.assertFalse(partial.exists())

    async def test_what_is_no_snapshot_is_not_listed_and_hides_no_other(self) -> None:
        await self.volumes.create("data", MIB)
        await self.volumes.snapshots.create("kept", "data")
        for name, about in (("empty", ""), ("odd", "[]"), ("vague", "{}")):
            directory = self.directory / "snapshots" / f"{name}.snapshot"
            directory.mkdir()
            (directory / "disk.raw").write_bytes(bytes(MIB))
            (directory / "about.json").write_text(about)
            with self.assertRaises(NotFound) as caught:
                await self.volumes.snapshots.get(name)
            self.assertIn(f"does not say what snapshot {name} is of", str(caught.exception))
        (self.directory / "snapshots" / "bare.snapshot").mkdir()
        self.assertEqual([each.id for each in await self.volumes.snapshots.list()], ["kept"])

    async def test_one_that_can_not_be_removed_says_why_and_is_there_still(self) -> None:
        await self.volumes.create("data", MIB)
        await self.volumes.snapshots.create("one", "data")
        (self.directory / "snapshots" / "one.snapshot.partial").write_text("a file in the way")
        with self.assertRaises(FailedPrecondition) as caught:
            await self.volumes.snapshots.delete("one")
        self.assertIn("snapshot one can't be deleted: Not a directory", str(caught.exception))
        self.assertEqual([each.id for each in await self.volumes.snapshots.list()], ["one"])

    async def test_all_of_it_is_on_the_medium_before_it_is_told(self) -> None:
        """The node may lose power right afterwards."""
        synced: list[str] = []
        sync = os.fsync

        def noting(descriptor: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{self.directory}"))
            sync(descriptor)

        self.patch(os, "fsync", noting)
        snapshots = self.volumes.snapshots
        await self.volumes.create("data", MIB)
        self.assertEqual(synced, ["/data.raw.new", ""])
        synced.clear()
        await snapshots.create("one", "data")
        self.assertEqual(synced[0], "/snapshots/one.snapshot.partial/disk.raw")
        self.assertEqual(synced[-1], "/snapshots")
        synced.clear()
        await snapshots.restore("clone", MIB, FromSnapshot("one"))
        self.assertEqual((synced[0], synced[-1]), ("/clone.raw.new", ""))
        self.assertIn("/clone.raw.new", synced[1:], "its size may have changed after its content")
        synced.clear()
        await snapshots.delete("one")
        await self.volumes.delete("data")
        self.assertEqual(synced, ["/snapshots", ""])

    async def test_none_is_taken_while_the_volume_is_being_attached(self) -> None:
        await self.volumes.create("data", MIB)
        async with self.volumes._copies.none_of("data"):
            await self.fails(Unavailable, self.volumes.snapshots.create("one", "data"))
        await self.volumes.snapshots.create("one", "data")

    async def test_a_volume_of_the_name_of_a_clone_that_is_being_made_is_that_clone(self) -> None:
        await self.volumes.create("data", MIB)
        began: Deferred[None] = Deferred()
        goes_on: Deferred[None] = Deferred()
        copies_data = self.volumes._copies._copy_data

        async def slow(source: Path, target: Path, locked: bool) -> float | None:
            began.callback(None)
            await goes_on
            return await copies_data(source, target, locked)

        self.patch(copies, "_thd_clone", lambda source, target: target.touch(0o600))
        self.patch(self.volumes._copies, "_copy_data", slow)
        cloning = Flight(self.volumes.snapshots.restore("clone", MIB, FromVolume("data")))
        await began
        making = Flight(self.volumes.create("clone", 2 * MIB))
        await self.volumes.create("other", MIB)
        self.assertEqual([each.id for each in await self.volumes.list()], ["data", "other"])
        goes_on.callback(None)
        self.assertEqual(await making.join(), await cloning.join())

    async def test_a_snapshot_that_was_being_removed_is_none(self) -> None:
        await self.volumes.create("data", MIB)
        await self.volumes.snapshots.create("one", "data")
        directory = self.directory / "snapshots"
        (directory / "one.snapshot").rename(directory / "one.snapshot.partial")  # as if killed there
        after = self.daemon()
        await self.fails(NotFound, after.snapshots.get("one"))
        await after.snapshots.delete("one")
        self.assertEqual(os.listdir(directory), [])

    async def test_devices_of_the_node_are_not_copied(self) -> None:
        self.directory.mkdir()
        (self.directory.parent / "elsewhere").write_bytes(bytes(MIB))
        self.file("device").symlink_to(self.directory.parent / "elsewhere")
        for _ in range(2):
            words = await self.fails(FailedPrecondition, self.volumes.snapshots.create("one", "device"))
            self.assertIn("device of the node", words)
            cloning = self.volumes.snapshots.restore("clone", MIB, FromVolume("device"))
            await self.fails(FailedPrecondition, cloning)

    async def test_a_failure_in_the_middle_leaves_nothing(self) -> None:
        await self.volumes.create("data", MIB)
        self.file("data").write_bytes(bytes(MIB))

        def fail(*arguments: object) -> None:
            raise OSError(5, "Input/output error")

        self.patch(sparse_files, "copy", fail)
        await self.fails(Unavailable, self.volumes.snapshots.create("one", "data"))
        await self.fails(Unavailable, self.volumes.snapshots.restore("new", MIB, FromVolume("data")))
        self.assertEqual(os.listdir(self.directory / "snapshots"), [])
        self.assertEqual(sorted(os.listdir(self.directory)), ["data.raw", "snapshots"])

    async def test_whoever_deletes_a_volume_ends_the_copying(self) -> None:
        await self.volumes.create("data", 4 * MIB)
        self.file("data").write_bytes(bytes(4 * MIB))
        began: Deferred[None] = Deferred()

        def endless(source: int, target: int, stop: Event) -> None:
            reactor.callFromThread(began.callback, None)
            stop.wait(30)
            raise sparse_files.Cancelled

        self.patch(sparse_files, "copy", endless)
        flight = Flight(self.volumes.snapshots.create("one", "data"))
        await began
        await self.volumes.delete("data")
        self.assertIn("deleted", await self.fails(Unavailable, flight.join()))
        self.assertEqual(os.listdir(self.directory / "snapshots"), [])


@needs_programs("mkfs.xfs")
@needs_mounts
class SharedBlocksTests(FileCase, SnapshotsContract):
    """The contract, on a file system that shares blocks: nothing is copied."""

    def place(self) -> Path:
        return mounted(self, "xfs", 320 * MIB)

    def setUp(self) -> None:
        super().setUp()

        def copied(*arguments: object) -> None:
            raise AssertionError("it was copied")

        self.patch(copies, "_thd_copy", copied)

    async def test_what_is_shared_is_promised_to_the_volume(self) -> None:
        """Every volume can be filled, whatever it shares with snapshots and other volumes."""
        await self.volumes.create("data", 40 * MIB)
        self.file("data").write_bytes(os.urandom(30 * MIB) + bytes(10 * MIB))
        free = await self.volumes.free()
        used = os.statvfs(self.directory).f_bfree
        await self.volumes.snapshots.create("one", "data")
        self.assertLess(abs(os.statvfs(self.directory).f_bfree - used) * 4096, MIB)
        self.assertApproximates(await self.volumes.free(), free - 40 * MIB, MIB)
        await self.volumes.snapshots.restore("restored", 50 * MIB, FromSnapshot("one"))
        before = await self.volumes.free()
        self.assertApproximates(before, free - 90 * MIB, MIB)
        for volume, size in (("data", 40), ("restored", 50)):
            with self.file(volume).open("r+b") as file:
                file.write(os.urandom(size * MIB))
                os.fsync(file.fileno())
        self.assertApproximates(await self.volumes.free(), before, 2 * MIB)

    async def test_more_than_there_is_room_to_fill_is_refused(self) -> None:
        free = await self.volumes.free()
        size = free // MIB * 2 // 3 * MIB
        await self.volumes.create("data", size)
        with self.file("data").open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        await self.fails(ResourceExhausted, self.volumes.snapshots.create("one", "data"))
        cloning = self.volumes.snapshots.restore("clone", size, FromVolume("data"))
        await self.fails(ResourceExhausted, cloning)
