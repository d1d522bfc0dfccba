# SPDX-License-Identifier: Apache-2.0
"""Volumes that a QEMU attaches to its VM: a real QEMU without a guest, and what can go wrong."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred, fail, gatherResults
from twisted.trial.unittest import TestCase

from infranetes.providers.qemu.program.qmp import QmpConnection, QmpError
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.record import Phase
from infranetes.providers.qemu.vm.vm import Vm
from infranetes.providers.qemu.volumes import attached
from infranetes.providers.qemu.volumes.attached import VolumeAttacher
from infranetes.providers.qemu.volumes.opened import make_direct, open_volume
from infranetes.providers.qemu.volumes.volumes import QemuVolumes
from infranetes.providers.volumes import ROOT_SERIAL
from infranetes_common.concurrency import Flight, start
from infranetes_common.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from infranetes_common.volume_disks import TARGET, serial_of
from tests.contract.attached_volumes import AttachedVolumesContract, Attacher
from tests.harness.needs import needs_programs
from tests.infranetes.providers.qemu.bare_qemu import BareQemuCase, reactor

_SIZE = 1 << 20


class BareQemus:
    """Attach volumes to the VMs that it is given, as the provider does."""

    def __init__(self, directory: Path, vms: dict[str, Vm]) -> None:
        self.directory = directory
        self.vms = vms
        self.attacher = VolumeAttacher(
            reactor, self.find, lambda: list(vms.values()), lambda work: Flight(work).join()
        )
        self.files = QemuVolumes(reactor, directory, "node", self.attacher)

    def find(self, instance_id: str) -> Vm:
        if instance_id not in self.vms:
            raise NotFound(f"there is no VM {instance_id}")
        return self.vms[instance_id]

    def attach(self, instance_id: str, volume: str, read_only: bool) -> Deferred[str]:
        return self.files.attach(instance_id, volume, read_only)

    def detach(self, instance_id: str, volume: str) -> Deferred[None]:
        return self.files.detach(instance_id, volume)

    def attached(self, machine: str) -> Deferred[frozenset[str]]:
        return start(self.attacher.volumes.attached(self.vms[machine]))


@needs_programs("qemu-system-x86_64")
class QemuAttachedTests(BareQemuCase, AttachedVolumesContract, TestCase):
    """The contract, over a QEMU that has no guest; and its faults."""

    def setUp(self) -> None:
        super().setUp()
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir(mode=0o700, parents=True)

    async def attacher(self) -> BareQemus:
        return BareQemus(self.directory, {})

    async def machine(self, attacher: Attacher) -> str:
        assert isinstance(attacher, BareQemus)
        vm = self.bare_vm()
        attacher.vms[vm.record.id] = vm
        return vm.record.id

    async def next_daemon(self, attacher: Attacher) -> BareQemus:
        assert isinstance(attacher, BareQemus)
        return BareQemus(self.directory, {id: self.found_again(vm) for id, vm in attacher.vms.items()})

    async def end(self, attacher: Attacher, machine: str) -> None:
        assert isinstance(attacher, BareQemus)
        await self.killed(attacher.vms[machine])

    async def volume(self, attacher: Attacher, name: str) -> str:
        assert isinstance(attacher, BareQemus)
        return (await attacher.files.create(name, _SIZE)).id

    def has(self, machine: str, volume: str) -> bool:
        return str(self.file(volume)) in self.open_files(machine)

    def file(self, volume: str) -> Path:
        return self.directory / f"{volume}.raw"

    # ---- The root of a VM

    async def test_the_root_of_a_vm_is_attached_for_as_long_as_that_exists(self) -> None:
        attacher, machine, volume = await self.one()
        vm = attacher.vms[machine]
        vm.record = attrs.evolve(vm.record, root=volume)
        for _ in range(2):
            self.assertEqual(await attacher.attach(machine, volume, False), ROOT_SERIAL)
            await self.fails(FailedPrecondition, attacher.attach(machine, volume, True))
            self.assertIn("root", await self.fails(Unavailable, attacher.detach(machine, volume)))
            await self.fails(FailedPrecondition, attacher.files.delete(volume))
        self.assertEqual(await attacher.attached(machine), frozenset())
        await self.end(attacher, machine)
        await self.fails(Unavailable, attacher.detach(machine, volume))
        await self.fails(FailedPrecondition, attacher.files.delete(volume))
        del attacher.vms[machine]
        await attacher.detach(machine, volume)
        await attacher.files.delete(volume)

    # ---- How it is attached, and what can go wrong

    async def one(self) -> tuple[BareQemus, str, str]:
        """Return an attacher, a machine and a volume."""
        attacher = await self.attacher()
        return attacher, await self.machine(attacher), await self.volume(attacher, "one")

    async def monitor(self, attacher: BareQemus, machine: str) -> QmpConnection:
        """Return the connection that the daemon uses; it has answered before."""
        await attacher.attached(machine)
        connected = attacher.vms[machine].connections
        assert connected is not None
        return connected.qmp

    async def assert_nothing_is_left(self, attacher: BareQemus, machine: str) -> None:
        await attacher.detach(machine, "one")
        qmp = await self.monitor(attacher, machine)
        self.assertEqual(await qmp.execute("query-named-block-nodes"), [])
        self.assertEqual(await qmp.execute("query-fdsets"), [])

    async def test_its_file_is_open_as_qemu_is_to_use_it(self) -> None:
        """QEMU 9.1 and later refuse files that are opened in another mode."""
        attacher = await self.attacher()
        volume = await self.volume(attacher, "one")
        for read_only in (False, True):
            file = open_volume(volume, self.file(volume), read_only)
            self.addCleanup(os.close, file.descriptor)
            flags = fcntl.fcntl(file.descriptor, fcntl.F_GETFL)
            self.assertEqual(bool(flags & os.O_DIRECT), file.direct)
            fcntl.flock(file.descriptor, fcntl.LOCK_UN)

    def test_a_file_system_that_can_not_do_without_the_page_cache_is_found_out(self) -> None:
        with self.file("one").open("w+b") as file, open("/proc/self/status", "rb") as other:
            self.assertTrue(make_direct(file.fileno()))
            self.assertTrue(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
            self.assertFalse(make_direct(other.fileno()))

    async def test_what_the_guest_flushes_is_flushed(self) -> None:
        attacher, machine, volume = await self.one()
        serial = await attacher.attach(machine, volume, False)
        qmp = await self.monitor(attacher, machine)
        [node] = await qmp.execute("query-named-block-nodes", flat=True)
        self.assertEqual(node["node-name"], f"volume-{serial}")
        self.assertIs(node["cache"]["no-flush"], False)
        self.assertIs(node["ro"], False)
        device = f"/machine/peripheral/volume-0-{serial}"
        for name, value in (("serial", serial), ("scsi-id", TARGET), ("lun", 0), ("werror", "report")):
            self.assertEqual(await qmp.execute("qom-get", path=device, property=name), value)

    async def test_nothing_but_the_lock_on_its_open_file_holds_it(self) -> None:
        """QEMU's own locks, which are of another kind, would also refuse who may have it."""
        attacher, machine, volume = await self.one()
        for read_only in (False, True):
            await attacher.attach(machine, volume, read_only)
            inode = f":{self.file(volume).stat().st_ino}"
            locks = [each.split() for each in Path("/proc/locks").read_text().splitlines()]
            self.assertEqual([each[1] for each in locks if each[5].endswith(inode)], ["FLOCK"])
            await attacher.detach(machine, volume)

    async def test_a_read_only_one_can_not_be_written_to(self) -> None:
        attacher, machine, volume = await self.one()
        await attacher.attach(machine, volume, True)
        qmp = await self.monitor(attacher, machine)
        [node] = await qmp.execute("query-named-block-nodes", flat=True)
        self.assertIs(node["ro"], True)
        self.assertEqual(await attacher.attached(machine), {serial_of(volume)})

    async def test_one_that_has_grown_is_seen_so(self) -> None:
        attacher, machine, volume = await self.one()
        await attacher.files.expand(volume, 2 * _SIZE)
        await attacher.attach(machine, volume, False)
        for _ in range(2):
            await attacher.files.expand(volume, 3 * _SIZE)
        qmp = await self.monitor(attacher, machine)
        [node] = await qmp.execute("query-named-block-nodes", flat=True)
        self.assertEqual(node["image"]["virtual-size"], 3 * _SIZE)

    async def test_what_is_no_disk_is_refused(self) -> None:
        attacher, machine, _ = await self.one()
        self.file("empty").touch()
        self.file("odd").write_bytes(b"x" * 1000)
        self.file("directory").mkdir()
        refusals = {"empty": FailedPrecondition, "odd": FailedPrecondition, "directory": NotFound}
        for bad, error in refusals.items():
            for _ in range(2):
                self.assertIn(bad, await self.fails(error, attacher.attach(machine, bad, True)))
        await self.assert_nothing_is_left(attacher, machine)

    async def test_as_many_as_there_are_places_and_no_more(self) -> None:
        self.patch(attached, "MOST", 2)
        attacher, machine, volume = await self.one()
        for name in ("two", "three"):
            self.assertEqual(await self.volume(attacher, name), name)
        await attacher.attach(machine, volume, False)
        await attacher.attach(machine, "two", False)
        words = await self.fails(ResourceExhausted, attacher.attach(machine, "three", False))
        self.assertIn("2 volumes", words)
        await attacher.detach(machine, volume)
        await attacher.attach(machine, "three", False)

    async def test_when_the_monitor_is_lost_anywhere_the_next_call_makes_it_whole(self) -> None:
        """After each of the commands; and no other VM gets the volume in the meantime."""
        for lost_at in range(1, 8):  # three questions, and four commands
            attacher, machine = await self.attacher(), ""
            machine = await self.machine(attacher)
            volume = await self.volume(attacher, f"lost at {lost_at}")
            qmp = await self.monitor(attacher, machine)
            count = 0

            def lossy(
                name: str,
                *seconds: float,
                qmp: Any = qmp,
                at: int = lost_at,
                do: Any = qmp.execute,
                **rest: Any,
            ) -> Any:  # Any: as `execute`
                nonlocal count
                count += 1
                answer = do(name, *seconds, **rest)
                if count == at:
                    qmp.close()
                return answer

            self.patch(qmp, "execute", lossy)
            await self.fails(Unavailable, attacher.attach(machine, volume, False))
            await attacher.attach(machine, volume, False)
            other = await self.machine(attacher)
            await self.fails(FailedPrecondition, attacher.attach(other, volume, False))
            await attacher.detach(machine, volume)
            await attacher.attach(other, volume, False)
            for each in (machine, other):
                self.processes[each].kill()

    async def test_halves_that_a_killed_daemon_left_hold_it_until_they_are_removed(self) -> None:
        attacher, machine, volume = await self.one()
        other = await self.machine(attacher)
        qmp = await self.monitor(attacher, machine)
        file = open_volume(volume, self.file(volume), False)
        node = f"volume-{serial_of(volume)}"
        number = await qmp.add_file(node, file.descriptor)
        os.close(file.descriptor)
        filename = f"/dev/fdset/{number}"
        await qmp.execute(
            "blockdev-add",
            driver="file",
            node_name=node,
            filename=filename,
            locking="off",
            cache={"direct": file.direct},
        )
        attacher = await self.next_daemon(attacher)
        await self.fails(FailedPrecondition, attacher.attach(other, volume, False))
        await attacher.detach(machine, volume)
        await attacher.attach(other, volume, False)
        await self.assert_nothing_is_left(attacher, machine)

    async def test_two_at_once_have_places_of_their_own(self) -> None:
        attacher, machine, _ = await self.one()
        await self.volume(attacher, "two")
        serials = await gatherResults([attacher.attach(machine, name, False) for name in ("one", "two")])
        self.assertEqual(await attacher.attached(machine), frozenset(serials))
        self.assertEqual(len(await attacher.attached(machine)), 2)

    async def test_of_one_that_qemu_refuses_nothing_is_left(self) -> None:
        attacher, machine, volume = await self.one()
        qmp = await self.monitor(attacher, machine)
        execute = qmp.execute

        def refusing(name: str, *more: Any, **arguments: Any) -> Any:  # Any: as `execute`
            return fail(QmpError("no room")) if name == "device_add" else execute(name, *more, **arguments)

        patch = self.patch(qmp, "execute", refusing)
        words = await self.fails(Unavailable, attacher.attach(machine, volume, False))
        self.assertIn(f"can't be given volume {volume}: no room", words)
        patch.restore()
        self.assertEqual(await qmp.execute("query-named-block-nodes"), [])
        self.assertFalse(self.has(machine, volume))

    async def test_one_in_the_other_mode_is_told_by_the_mode_that_it_has(self) -> None:
        attacher, machine, volume = await self.one()
        for read_only, mode in ((True, "read-only"), (False, "for writing")):
            await attacher.attach(machine, volume, read_only)
            words = await self.fails(FailedPrecondition, attacher.attach(machine, volume, not read_only))
            self.assertIn(f"is attached to VM {machine} {mode}: detach it first", words)
            await attacher.detach(machine, volume)

    async def test_one_that_starts_is_given_none_yet(self) -> None:
        attacher, machine, volume = await self.one()
        vm = attacher.vms[machine]
        vm.record = attrs.evolve(vm.record, phase=Phase.STARTING)
        words = await self.fails(Unavailable, attacher.attach(machine, volume, False))
        self.assertIn("can be given volumes once it runs", words)
        vm.record = attrs.evolve(vm.record, phase=Phase.READY)
        await attacher.attach(machine, volume, False)

    async def test_of_several_the_one_that_has_it_sees_its_new_size(self) -> None:
        attacher = await self.attacher()
        first, second, volume = await self.machine(attacher), "", await self.volume(attacher, "one")
        second = await self.machine(attacher)
        await attacher.attach(second, volume, False)
        await attacher.files.expand(volume, 3 * _SIZE)
        [node] = await (await self.monitor(attacher, second)).execute("query-named-block-nodes", flat=True)
        self.assertEqual(node["image"]["virtual-size"], 3 * _SIZE)
        self.assertEqual(await attacher.attached(first), frozenset())

    async def test_a_detach_that_hangs_is_told_in_time_and_the_volume_stays_attached(self) -> None:
        attacher, machine, volume = await self.one()
        other = await self.machine(attacher)
        await attacher.attach(machine, volume, False)
        qmp = await self.monitor(attacher, machine)
        node = f"volume-{serial_of(volume)}"
        await qmp.execute("blockdev-add", driver="raw", node_name="holder", file=node, read_only=True)
        for _ in range(2):
            words = await self.fails(Unavailable, attacher.detach(machine, volume))
            self.assertIn("does not give up volume one", words)
            await self.fails(FailedPrecondition, attacher.attach(other, volume, False))
        await qmp.execute("blockdev-del", node_name="holder")
        await self.assert_nothing_is_left(attacher, machine)
        await attacher.attach(other, volume, False)

    async def test_a_device_whose_end_is_never_told_is_waited_for_in_bounds(self) -> None:
        attacher, machine, volume = await self.one()
        await attacher.attach(machine, volume, False)
        self.patch(attached, "_UNPLUG_SECONDS", 0.2)
        self.patch(VmConnections, "_on_event", lambda connection, event: None)
        attacher = await self.next_daemon(attacher)
        await attacher.detach(machine, volume)  # it is gone already, which QEMU reports when it is asked
        await self.assert_nothing_is_left(attacher, machine)

    async def test_one_that_is_attached_is_not_deleted_until_it_is_detached(self) -> None:
        attacher, machine, volume = await self.one()
        await attacher.attach(machine, volume, False)
        for _ in range(2):
            await self.fails(FailedPrecondition, attacher.files.delete(volume))
        await attacher.detach(machine, volume)
        await attacher.files.delete(volume)
        await self.fails(NotFound, attacher.attach(machine, volume, False))
