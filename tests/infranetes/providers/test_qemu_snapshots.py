# SPDX-License-Identifier: Apache-2.0
"""Snapshots of volumes of this node: copies, shared blocks, and what a QEMU copies while a VM writes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from infranetes.providers.qemu import copies, mirrors, sparse_files
from infranetes.providers.qemu.qmp import QmpConnection
from infranetes.providers.qemu.volumes import QemuVolumes
from infranetes.providers.volumes import FromSnapshot, FromVolume, IHasSnapshots
from infranetes_common.concurrency import Flight, settled, sleep
from infranetes_common.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from infranetes_common.volume_disks import serial_of
from tests.contract.snapshots import SnapshotsContract
from tests.infranetes.csi.case import without_vms
from tests.infranetes.providers.bare_qemu import BareQemuCase, reactor
from tests.infranetes.providers.test_qemu_attached import BareQemus

MIB = 1 << 20


def mounted(case: TestCase, kind: str, size: int) -> Path:
    """A file system of its own, as long as the test takes."""
    root = Path(case.mktemp()).absolute()
    directory, image = root / "mounted", root / "image"
    directory.mkdir(parents=True)
    if kind == "tmpfs":
        what = ["-t", "tmpfs", "-o", f"size={size}", "none"]
    else:
        image.touch()
        os.truncate(image, size)
        subprocess.run([f"mkfs.{kind}", "-q", image], check=True)
        what = ["-o", "loop", str(image)]
    subprocess.run(["mount", *what, directory], check=True)
    case.addCleanup(lambda: subprocess.run(["umount", "-l", directory], check=True))
    return directory


class FileCase(TestCase):
    """Volumes that no VM has."""

    timeout = 60

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


class CopiedTests(FileCase, SnapshotsContract):
    """The contract, where data is copied; and what else can happen."""

    def place(self) -> Path:
        return mounted(self, "tmpfs", 64 * MIB)  # on which no blocks can be shared

    async def free_is(self, mib: int) -> None:
        """Check what is free, but for what names take."""
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
        partial = self.directory / "snapshots" / "one.snapshot.partial"
        partial.mkdir()
        (partial / "disk.raw").write_bytes(bytes(MIB))
        (partial / "about.json").write_text('{"volume": "data", "created": 1.0}')
        for name in ("new.raw.new", "gone.source", "new.source.new"):
            (self.directory / name).write_text('{"volume": "data"}')
        (self.directory / "notes.new").touch()  # a person's
        after = self.daemon()
        self.assertEqual([each.id for each in await after.snapshots.list()], ["kept"])
        self.assertEqual([each.id for each in await after.list()], ["data", "restored"])
        await after.snapshots.sweep()
        self.assertEqual(os.listdir(self.directory / "snapshots"), ["kept.snapshot"])
        left = ["data.raw", "notes.new", "restored.raw", "restored.source", "snapshots"]
        self.assertEqual(sorted(os.listdir(self.directory)), left)
        await after.snapshots.create("one", "data")
        await after.delete("restored")
        self.assertNotIn("restored.source", os.listdir(self.directory))

    async def test_a_snapshot_that_was_being_removed_is_none(self) -> None:
        await self.volumes.create("data", MIB)
        await self.volumes.snapshots.create("one", "data")
        directory = self.directory / "snapshots"
        (directory / "one.snapshot").rename(directory / "one.snapshot.partial")  # and killed there
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

        def endless(source: int, target: int, stop: Any) -> None:  # Any: an Event
            reactor.callFromThread(began.callback, None)
            stop.wait(30)
            raise sparse_files.Cancelled

        self.patch(sparse_files, "copy", endless)
        flight = Flight(self.volumes.snapshots.create("one", "data"))
        await began
        await self.volumes.delete("data")
        self.assertIn("deleted", await self.fails(Unavailable, flight.join()))
        self.assertEqual(os.listdir(self.directory / "snapshots"), [])


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
        """All volumes can be filled, whatever they share with snapshots and with each other."""
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


class AttachedCase(BareQemuCase, TestCase):
    """While a VM has the volume."""

    timeout = 60

    def place(self) -> Path:
        return mounted(self, "tmpfs", 64 * MIB)  # on which no blocks can be shared

    def setUp(self) -> None:
        super().setUp()
        self.kept: list[Deferred[None]] = []
        self.killed_calls: list[Flight[Any]] = []  # Any: what does not come
        self.addCleanup(self.let_go)
        self.directory = self.place()

    async def let_go(self) -> None:
        """Have daemons that were killed be gone indeed, once there are no VMs any more."""
        for each in self.kept:
            if not each.called:
                each.errback(Unavailable("its daemon was killed"))
        await settled([flight.join() for flight in self.killed_calls])

    async def with_volume(self, size: int = 8 * MIB) -> tuple[BareQemus, str]:
        """What attaches, and a machine that has the volume `data`."""
        attacher = BareQemus(self.directory, {})
        vm = self.bare_vm()
        attacher.vms[vm.record.id] = vm
        await attacher.files.create("data", size)
        await attacher.attach(vm.record.id, "data", False)
        return attacher, vm.record.id

    async def monitor(self, attacher: BareQemus, machine: str) -> QmpConnection:
        return (await attacher.vms[machine].monitor(reactor)).qmp

    async def write(self, attacher: BareQemus, machine: str, at: int, value: int) -> None:
        """Write a sector as the VM does, to its device."""
        qmp = await self.monitor(attacher, machine)
        device = f"volume-0-{serial_of('data')}"
        command = f'qemu-io -d {device} "write -q -f -P {value} {at * 512} 512"'
        self.assertEqual(await qmp.execute("human-monitor-command", command_line=command), "")

    def sectors(self, path: Path) -> bytes:
        """The first byte of each sector."""
        return path.read_bytes()[::512]

    def snapshot(self, name: str) -> Path:
        return self.directory / "snapshots" / f"{name}.snapshot" / "disk.raw"

    async def nothing_is_left(self, attacher: BareQemus, machine: str) -> None:
        qmp = await self.monitor(attacher, machine)
        names = [each["node-name"] for each in await qmp.execute("query-named-block-nodes", flat=True)]
        self.assertEqual([name for name in names if not name.startswith("volume-")], [])
        self.assertEqual(await qmp.execute("query-jobs"), [])
        file_sets = await qmp.execute("query-fdsets")  # one is the volume's
        self.assertEqual([each["fds"] for each in file_sets if each["fds"] or len(file_sets) > 1], [])

    async def fails(self, error: type[Exception], waiting: Deferred[Any]) -> str:  # Any: what does not come
        return str(await self.assertFailure(waiting, error))

    async def check_written_meanwhile(self) -> None:
        """Take one while the VM writes: it has all that was written before, and of the rest a beginning."""
        attacher, machine = await self.with_volume()
        for number in range(20):
            await self.write(attacher, machine, number, 1 + number % 255)
        taking = attacher.files.snapshots.create("one", "data")
        number = 20
        while not taking.called:
            await self.write(attacher, machine, number, 1 + number % 255)
            number += 1
        taken = await taking
        for more in range(20):
            await self.write(attacher, machine, number + more, 255)
        self.assertEqual((taken.volume, taken.size), ("data", 8 * MIB))
        found = self.sectors(self.snapshot("one"))
        count = len(found.rstrip(b"\0"))
        self.assertGreaterEqual(count, 20)
        self.assertLessEqual(count, number)
        self.assertEqual(list(found[:count]), [1 + each % 255 for each in range(count)])
        self.assertLess(self.snapshot("one").stat().st_blocks * 512, MIB, "holes take no room")
        await self.nothing_is_left(attacher, machine)


class AttachedTests(AttachedCase):
    """QEMU copies it."""

    async def test_it_has_all_that_was_written_before_and_of_the_rest_a_beginning(self) -> None:
        await self.check_written_meanwhile()

    async def test_a_clone_of_it_may_be_larger(self) -> None:
        attacher, machine = await self.with_volume()
        await self.write(attacher, machine, 3, 7)
        clone = await attacher.files.snapshots.restore("clone", 10 * MIB, FromVolume("data"))
        self.assertEqual(clone.size, 10 * MIB)
        self.assertEqual(self.sectors(self.directory / "clone.raw")[:5], bytes([0, 0, 0, 7, 0]))
        await self.nothing_is_left(attacher, machine)
        await attacher.detach(machine, "data")
        await attacher.attach(machine, "clone", False)

    async def test_one_that_is_attached_read_only(self) -> None:
        attacher, machine = await self.with_volume()
        await self.write(attacher, machine, 3, 7)
        await attacher.detach(machine, "data")
        await attacher.attach(machine, "data", True)
        await attacher.files.snapshots.create("one", "data")
        self.assertEqual(self.sectors(self.snapshot("one"))[3], 7)
        await self.nothing_is_left(attacher, machine)

    def endless(self) -> Deferred[None]:
        """Have copies be complete and go on: return what fires when one is."""
        ready: Deferred[None] = Deferred()
        hung: Deferred[None] = Deferred()
        self.kept.append(hung)  # else whoever awaits it would be ended with it

        async def never(on: Any, qmp: QmpConnection, name: str) -> float:
            while (await qmp.execute("query-jobs"))[0]["status"] != "ready":
                await sleep(reactor, 0.01)
            reactor.callLater(0, ready.callback, None)
            await hung
            raise AssertionError

        self.patch(mirrors, "_finish", never)
        return ready

    async def test_it_gives_way_to_whoever_needs_the_volume(self) -> None:
        for what in ("detach", "expand", "attach"):
            attacher, machine = await self.with_volume()
            ready = self.endless()
            taking = Flight(attacher.files.snapshots.create("one", "data"))
            await ready
            if what == "detach":
                await attacher.detach(machine, "data")
            elif what == "expand":
                await attacher.files.expand("data", 9 * MIB)
            else:
                await attacher.attach(machine, "data", False)
            self.assertIn("Try again", await self.fails(Unavailable, taking.join()))
            self.assertEqual(os.listdir(self.directory / "snapshots"), [])
            await self.nothing_is_left(attacher, machine)
            await attacher.detach(machine, "data")
            await attacher.files.delete("data")

    async def test_what_a_killed_daemon_had_copied_ends_with_the_next(self) -> None:
        attacher, machine = await self.with_volume()
        ready = self.endless()
        self.killed_calls.append(Flight(attacher.files.snapshots.create("one", "data")))
        await ready
        after = BareQemus(self.directory, {machine: self.found_again(attacher.vms[machine])})
        self.assertEqual(await after.files.snapshots.list(), [])
        await after.files.snapshots.sweep()
        self.assertEqual(os.listdir(self.directory / "snapshots"), [])
        await self.nothing_is_left(after, machine)
        await self.write(after, machine, 0, 1)

    async def test_a_volume_is_detached_whatever_a_killed_daemon_had_copied(self) -> None:
        attacher, machine = await self.with_volume()
        ready = self.endless()
        self.killed_calls.append(Flight(attacher.files.snapshots.create("one", "data")))
        await ready
        after = BareQemus(self.directory, {machine: self.found_again(attacher.vms[machine])})
        await after.detach(machine, "data")
        await self.nothing_is_left(after, machine)

    async def test_when_the_vm_ends_the_snapshot_is_taken_of_what_it_left(self) -> None:
        attacher, machine = await self.with_volume()
        await self.write(attacher, machine, 3, 7)
        ready = self.endless()
        taking = Flight(attacher.files.snapshots.create("one", "data"))
        await ready
        await self.killed(attacher.vms[machine])
        attacher.vms[machine].detach()
        await attacher.files.stop()
        await self.fails(Unavailable, taking.join())
        self.assertEqual(os.listdir(self.directory / "snapshots"), [])
        await attacher.files.snapshots.create("one", "data")
        self.assertEqual(self.sectors(self.snapshot("one"))[3], 7)

    async def test_its_whole_size_is_kept_meanwhile(self) -> None:
        attacher, _ = await self.with_volume(30 * MIB)
        ready = self.endless()
        taking = Flight(attacher.files.snapshots.create("one", "data"))
        await ready
        self.assertEqual(await attacher.files.free(), 4 * MIB)
        await attacher.files.stop()
        await self.fails(Unavailable, taking.join())
        self.assertEqual(await attacher.files.free(), 34 * MIB)
        await attacher.files.create("more", 10 * MIB)
        await self.fails(ResourceExhausted, attacher.files.snapshots.create("one", "data"))

    async def test_a_copy_that_fails_does_the_vm_no_harm(self) -> None:
        """The disk of the node is full, by others."""
        attacher, machine = await self.with_volume(40 * MIB)
        qmp = await self.monitor(attacher, machine)
        command = f'qemu-io -d volume-0-{serial_of("data")} "write -q -P 1 0 30M"'
        await qmp.execute("human-monitor-command", 30.0, command_line=command)
        (self.directory / "others").write_bytes(bytes(20 * MIB))
        self.patch(attacher.files._files._room, "check", lambda free, needed: None)
        words = await self.fails(Unavailable, attacher.files.snapshots.create("one", "data"))
        self.assertIn("No space left", words)
        await self.nothing_is_left(attacher, machine)
        self.assertEqual(os.listdir(self.directory / "snapshots"), [])
        (self.directory / "others").unlink()
        await self.write(attacher, machine, 0, 2)


class AttachedSharingTests(AttachedCase):
    """Its blocks are shared while the VM writes."""

    def place(self) -> Path:
        return mounted(self, "xfs", 320 * MIB)

    def setUp(self) -> None:
        super().setUp()

        def mirrored(*arguments: object) -> None:
            raise AssertionError("QEMU was to copy it")

        self.patch(mirrors, "mirror", mirrored)

    async def test_it_has_all_that_was_written_before_and_of_the_rest_a_beginning(self) -> None:
        await self.check_written_meanwhile()
