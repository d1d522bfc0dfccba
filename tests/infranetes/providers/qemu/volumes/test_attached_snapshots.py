# SPDX-License-Identifier: Apache-2.0
"""Snapshots of this node's volumes while a VM writes to them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import TestCase

from infranetes.providers.qemu.program.qmp import QmpConnection
from infranetes.providers.qemu.vm.vm import Vm
from infranetes.providers.qemu.volumes import mirrors
from infranetes.providers.volumes import FromVolume, VolumeSnapshot
from infranetes_common.concurrency import Flight, settled, sleep
from infranetes_common.errors import ResourceExhausted, Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.volume_disks import serial_of
from tests.harness.needs import needs_mounts, needs_programs
from tests.infranetes.providers.qemu.bare_qemu import BareQemuCase, reactor
from tests.infranetes.providers.qemu.volumes.test_attached import BareQemus
from tests.support.failures import FailureAssertions
from tests.support.file_systems import mounted

MIB = 1 << 20


class AttachedCase(FailureAssertions, BareQemuCase, TestCase):
    """Tests with a VM that has the volume."""

    def place(self) -> Path:
        return mounted(self, "tmpfs", 64 * MIB)  # on which blocks can't be shared

    def setUp(self) -> None:
        super().setUp()
        self.kept: list[Deferred[None]] = []
        self.killed_calls: list[Flight[VolumeSnapshot]] = []
        self.addCleanup(self.let_go)
        self.directory = self.place()

    async def let_go(self) -> None:
        """Let killed daemons be collected, once there are no VMs any more."""
        for each in self.kept:
            if not each.called:
                each.errback(Unavailable("its daemon was killed"))
        await settled([flight.join() for flight in self.killed_calls])

    async def with_volume(self, size: int = 8 * MIB) -> tuple[BareQemus, str]:
        """Return an attacher, and a machine that has the volume `data`."""
        attacher = BareQemus(self.directory, {})
        vm = self.bare_vm()
        attacher.vms[vm.record.id] = vm
        await attacher.files.create("data", size)
        await attacher.attach(vm.record.id, "data", False)
        return attacher, vm.record.id

    async def monitor(self, attacher: BareQemus, machine: str) -> QmpConnection:
        return (await attacher.vms[machine].monitor(reactor)).qmp

    async def write(self, attacher: BareQemus, machine: str, at: int, value: int) -> None:
        """Write a sector on the device, as the VM does."""
        qmp = await self.monitor(attacher, machine)
        device = f"volume-0-{serial_of('data')}"
        command = f'qemu-io -d {device} "write -q -f -P {value} {at * 512} 512"'
        self.assertEqual(await qmp.execute("human-monitor-command", command_line=command), "")

    def sectors(self, path: Path) -> bytes:
        """Return the first byte of each sector."""
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

    async def check_written_meanwhile(self) -> None:
        """Take a snapshot while the VM writes: it has all earlier writes, and a prefix of the later ones."""
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


@needs_mounts
class AttachedTests(AttachedCase):
    """QEMU copies the volume."""

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
        """Make copies complete without ending: return a Deferred that fires when one is complete."""
        ready: Deferred[None] = Deferred()
        hung: Deferred[None] = Deferred()
        self.kept.append(hung)  # otherwise what awaits it would be ended with it

        async def never(reactor: IReactor, qmp: QmpConnection, name: str) -> float:
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

    async def test_a_copy_that_ends_just_before_it_is_ended_is_no_trouble(self) -> None:
        attacher, machine = await self.with_volume()
        qmp = await self.monitor(attacher, machine)
        execute, jobs = qmp.execute, [{"id": "copy-x", "status": "running"}]

        def with_a_job_that_was_there(name: str, *more: Any, **arguments: Any) -> Deferred[Any]:
            return (
                succeed([jobs.pop()]) if name == "query-jobs" and jobs else execute(name, *more, **arguments)
            )

        self.patch(qmp, "execute", with_a_job_that_was_there)
        await mirrors.clear(reactor, qmp, "x")
        self.assertEqual(jobs, [])

    async def test_whatever_step_a_copy_was_left_at_nothing_of_it_stays(self) -> None:
        """A daemon was killed after the file was handed over, or after QEMU had opened it."""
        attacher, machine = await self.with_volume()
        qmp, serial = await self.monitor(attacher, machine), serial_of("data")
        target = self.directory / "target"
        for opened in (False, True):
            with target.open("w+b") as file:
                file.truncate(8 * MIB)
                number = await qmp.add_file(f"copy-{serial}", file.fileno())
            if opened:
                filename = f"/dev/fdset/{number}"
                await qmp.execute(
                    "blockdev-add", driver="file", node_name=f"copy-{serial}", filename=filename
                )
            for _ in range(2):
                await mirrors.clear(reactor, qmp, serial)
            await self.nothing_is_left(attacher, machine)

    async def test_of_several_vms_the_one_that_has_the_volume_copies_it(self) -> None:
        attacher = BareQemus(self.directory, {})
        other = self.bare_vm()
        attacher.vms[other.record.id] = other
        its, machine = await self.with_volume()
        attacher.vms.update(its.vms)
        await self.write(attacher, machine, 3, 7)
        await attacher.files.snapshots.create("one", "data")
        self.assertEqual(self.sectors(self.snapshot("one"))[3], 7)

    async def test_a_vm_that_does_not_end_its_copies_is_told(self) -> None:
        attacher, _ = await self.with_volume()

        async def hang(reactor: IReactor, vm: Vm) -> None:
            raise Unavailable(f"VM {vm.record.id} does not end the copying of its volumes")

        self.patch(mirrors, "clear_all", hang)
        await self.fails(Unavailable, attacher.attacher.end_mirrors())

    async def test_a_vm_that_has_ended_has_no_copies_to_end(self) -> None:
        attacher, machine = await self.with_volume()
        await self.killed(attacher.vms[machine])
        await attacher.attacher.end_mirrors()

    async def test_all_of_it_is_on_the_medium_before_it_is_told(self) -> None:
        """What QEMU has written, too: it does not flush the copy by itself."""
        attacher, _ = await self.with_volume()
        synced: list[str] = []
        sync = os.fsync

        def noting(descriptor: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            sync(descriptor)

        self.patch(os, "fsync", noting)
        await attacher.files.snapshots.create("one", "data")
        self.assertIn(f"{self.directory}/snapshots/one.snapshot.partial/disk.raw", synced)

    async def test_two_that_end_a_copy_at_once_leave_nothing_of_it(self) -> None:
        attacher, machine = await self.with_volume()
        ready = self.endless()
        taking = Flight(attacher.files.snapshots.create("one", "data"))
        await ready
        cleared: list[str] = []
        clear = mirrors.clear

        async def noting(reactor: IReactor, qmp: QmpConnection, serial: str) -> None:
            await clear(reactor, qmp, serial)
            cleared.append(serial)

        self.patch(mirrors, "clear", noting)
        await settled([attacher.files.expand("data", mib * MIB) for mib in (9, 10)])
        await self.fails(Unavailable, taking.join())
        self.assertEqual(cleared, [serial_of("data")], "it was cleaned up to the end")
        await self.nothing_is_left(attacher, machine)

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
        """Others have filled the node's disk."""
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


@needs_programs("mkfs.xfs")
@needs_mounts
class AttachedSharingTests(AttachedCase):
    """Blocks are shared while the VM writes."""

    def place(self) -> Path:
        return mounted(self, "xfs", 320 * MIB)

    def setUp(self) -> None:
        super().setUp()

        def mirrored(*arguments: object) -> None:
            raise AssertionError("QEMU was to copy it")

        self.patch(mirrors, "mirror", mirrored)

    async def test_it_has_all_that_was_written_before_and_of_the_rest_a_beginning(self) -> None:
        await self.check_written_meanwhile()
