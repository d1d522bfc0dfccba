# SPDX-License-Identifier: Apache-2.0
"""Disks that a QEMU shows to its VM: a real QEMU without a guest, and what can go wrong."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase
from zope.interface import implementer

from infranetes.providers.interface import IShowsDisks, ReadOnlyDisk, ShownDisk
from infranetes.providers.qemu.program.command_line import SCSI
from infranetes.providers.qemu.program.qmp import QmpConnection, QmpError
from infranetes.providers.qemu.vm import connections, disks
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.disks import Disks
from infranetes.providers.qemu.vm.record import VmRecord
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.concurrency import Flight, deferred
from infranetes_common.errors import NotFound, Unavailable
from tests.contract.shown_disks import ShownDisksContract
from tests.harness.needs import needs_programs
from tests.infranetes.providers.qemu.bare_qemu import BareQemuCase, reactor


@implementer(IShowsDisks)
class BareQemus:
    """Show disks to the VMs that it is given, as the provider does."""

    def __init__(self, vms: dict[str, Vm]) -> None:
        self.vms = vms
        self.disks = Disks(reactor)

    def find(self, instance_id: str) -> Vm:
        if instance_id not in self.vms:
            raise NotFound(f"there is no VM {instance_id}")
        return self.vms[instance_id]

    @deferred
    async def show_disks(self, instance_id: str, disks: Sequence[ReadOnlyDisk]) -> Sequence[ShownDisk]:
        return await Flight(self.disks.show(self.find(instance_id), disks)).join()

    @deferred
    async def shown_disks(self, instance_id: str) -> Sequence[ShownDisk]:
        return await Flight(self.disks.shown(self.find(instance_id))).join()

    @deferred
    async def hide_disks(self, instance_id: str, names: Sequence[str]) -> None:
        await Flight(self.disks.hide(self.find(instance_id), names)).join()


@needs_programs("qemu-system-x86_64")
class QemuDisksTests(BareQemuCase, ShownDisksContract, TestCase):
    """The contract, over a QEMU that has no guest; and its faults."""

    most = disks.MOST

    async def shower(self) -> BareQemus:
        return BareQemus({})

    async def machine(self, shower: IShowsDisks) -> str:
        assert isinstance(shower, BareQemus)
        vm = self.bare_vm()
        shower.vms[vm.record.id] = vm
        return vm.record.id

    async def next_daemon(self, shower: IShowsDisks) -> BareQemus:
        assert isinstance(shower, BareQemus)
        found = BareQemus({})
        for vm in shower.vms.values():
            found.vms[vm.record.id] = self.found_again(vm)
        return found

    async def end(self, shower: IShowsDisks, machine: str) -> None:
        assert isinstance(shower, BareQemus)
        await self.killed(shower.vms[machine])

    def is_open(self, path: Path) -> bool:
        return any(self.open_files(machine).count(str(path)) for machine in self.processes)

    # ---- What can go wrong

    async def monitor(self, shower: BareQemus, machine: str) -> QmpConnection:
        """Return the connection that the daemon uses; it has answered before."""
        await shower.shown_disks(machine)
        connected = shower.vms[machine].connections
        assert connected is not None
        return connected.qmp

    async def assert_nothing_is_left(self, shower: BareQemus, machine: str) -> None:
        """Check that there are neither disks nor parts of them."""
        self.assertEqual(list(await shower.shown_disks(machine)), [])
        qmp = await self.monitor(shower, machine)
        self.assertEqual(await qmp.execute("query-named-block-nodes"), [])
        self.assertEqual(await qmp.execute("query-fdsets"), [])
        [controller] = [
            each["name"]
            for each in await qmp.execute("qom-list", path="/machine/peripheral")
            if each["type"].startswith("child<")
        ]
        self.assertEqual(controller, SCSI)

    async def test_a_disk_takes_one_descriptor_of_qemus(self) -> None:
        shower = await self.shower()
        machine = await self.machine(shower)
        layers = self.disks(3)
        await shower.show_disks(machine, layers)
        self.assertEqual([self.open_files(machine).count(str(each.path)) for each in layers], [1, 1, 1])

    async def test_one_that_does_not_execute_yet_is_shown_its_first(self) -> None:
        vm = self.bare_vm()
        layers = self.disks(2)
        await (await vm.monitor(reactor)).qmp.execute("query-status")  # as its state is loaded before
        await disks.Disks(reactor).show_first(vm, layers)
        shown = await disks.Disks(reactor).shown(vm)
        self.assertEqual([each.name for each in shown], [each.name for each in layers])

    async def test_a_disk_takes_no_descriptor_of_the_daemons(self) -> None:
        shower = await self.shower()
        machine = await self.machine(shower)
        await self.monitor(shower, machine)
        before = len(os.listdir("/proc/self/fd"))
        await shower.show_disks(machine, self.disks(3))
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)

    async def test_a_disk_has_the_beginnings_of_its_name_that_every_qemu_takes(self) -> None:
        """From 9.1 on, QEMU refuses a serial number of more than 20 characters as the device's id."""
        shower = await self.shower()
        machine = await self.machine(shower)
        qmp = await self.monitor(shower, machine)
        [shown] = await shower.show_disks(machine, self.disks(1))
        path = f"/machine/peripheral/shown-{shown.target}-{shown.lun}-{shown.name}"
        for property, characters in (("serial", 36), ("device_id", 20)):
            value = await qmp.execute("qom-get", path=path, property=property)
            self.assertEqual(value, shown.name[:characters])

    async def test_the_monitor_serves_on_while_disks_are_shown(self) -> None:
        """Commands between those that pass files neither lose nor confuse the files."""
        shower = await self.shower()
        machine = await self.machine(shower)
        qmp = await self.monitor(shower, machine)
        layers = self.disks(20)
        showing = shower.show_disks(machine, layers)
        while not showing.called:
            await qmp.execute("query-status")
        shown = await showing
        nodes = {each["node-name"]: each for each in await qmp.execute("query-named-block-nodes")}
        for each in shown:
            self.assertTrue(nodes[f"shown-{each.target}-{each.lun}-{each.name[:16]}"]["ro"])
        for layer in layers:
            self.assertTrue(self.is_open(layer.path))

    async def test_when_qemu_refuses_one_none_is_shown(self) -> None:
        shower = await self.shower()
        machine = await self.machine(shower)
        qmp = await self.monitor(shower, machine)
        await qmp.execute("blockdev-add", driver="null-co", node_name="other", read_only=True)
        await qmp.execute(
            "device_add", driver="scsi-hd", id="other", bus=f"{SCSI}.0", scsi_id=0, lun=1, drive="other"
        )
        layers = self.disks(3)
        words = await self.fails(Unavailable, shower.show_disks(machine, layers))
        self.assertIn("lun already used", words)
        self.assertEqual(list(await shower.shown_disks(machine)), [])
        self.assertFalse(any(self.is_open(layer.path) for layer in layers))
        self.assertEqual(len(await shower.show_disks(machine, layers)), 3, "at other places")
        await shower.hide_disks(machine, [layer.name for layer in layers])
        await qmp.execute("device_del", id="other")
        await self.eventually(lambda: qmp.execute("blockdev-del", node_name="other"))
        await self.assert_nothing_is_left(shower, machine)

    async def eventually(self, work: Any) -> None:  # Any: a call that fails with QmpError until then
        for _ in range(100):
            try:
                await work()
                return
            except QmpError:
                await deferLater(reactor, 0.01, lambda: None)
        self.fail("QEMU still refuses")

    async def test_when_the_monitor_is_lost_anywhere_none_is_shown(self) -> None:
        """After each of the commands."""
        for lost_at in range(1, 16):  # three questions, and four commands for each disk
            shower = await self.shower()
            machine = await self.machine(shower)
            qmp = await self.monitor(shower, machine)
            execute = qmp.execute
            count = 0

            def lossy(
                name: str, *seconds: float, qmp: Any = qmp, at: int = lost_at, do: Any = execute, **rest: Any
            ) -> Any:  # Any: as `execute`
                nonlocal count
                count += 1
                answer = do(name, *seconds, **rest)
                if count == at:
                    qmp.close()
                return answer

            self.patch(qmp, "execute", lossy)
            layers = self.disks(3)
            await self.fails(Unavailable, shower.show_disks(machine, layers))
            await self.assert_nothing_is_left(shower, machine)
            self.assertEqual(len(await shower.show_disks(machine, layers)), 3)
            self.processes[machine].kill()

    async def test_halves_that_a_killed_daemon_left_are_made_whole_or_removed(self) -> None:
        shower = await self.shower()
        machine = await self.machine(shower)
        layers = self.disks(3)
        qmp = await self.monitor(shower, machine)
        for number, layer in enumerate(layers[:2]):
            with layer.path.open("rb") as file:
                descriptors = await qmp.add_file(f"infranetes-{layer.name}", file.fileno())
            if number:
                await qmp.execute(
                    "blockdev-add",
                    driver="file",
                    node_name=f"shown-0-0-{layer.name[:16]}",
                    filename=f"/dev/fdset/{descriptors}",
                    read_only=True,
                )
        shower = await self.next_daemon(shower)
        self.assertEqual(list(await shower.shown_disks(machine)), [])
        shown = await shower.show_disks(machine, layers[:1])
        self.assertEqual(list(await shower.shown_disks(machine)), list(shown))
        self.assertEqual([self.is_open(layer.path) for layer in layers], [True, False, False])
        await shower.show_disks(machine, layers)
        await shower.hide_disks(machine, [layer.name for layer in layers])
        await self.assert_nothing_is_left(shower, machine)

    async def test_a_file_that_qemu_does_not_let_go_of(self) -> None:
        """It is reported each time, its slot is not reused, and it is gone once QEMU lets go."""
        shower = await self.shower()
        machine = await self.machine(shower)
        layers = self.disks(2)
        [shown] = await shower.show_disks(machine, layers[:1])
        qmp = await self.monitor(shower, machine)
        node = f"shown-{shown.target}-{shown.lun}-{shown.name[:16]}"
        await qmp.execute("blockdev-add", driver="raw", node_name="holder", file=node, read_only=True)
        for _ in range(2):
            words = await self.fails(Unavailable, shower.hide_disks(machine, [shown.name]))
            self.assertIn("still uses", words)
        again, other = await shower.show_disks(machine, layers)
        self.assertEqual(len({(each.target, each.lun) for each in (shown, again, other)}), 3)
        await qmp.execute("blockdev-del", node_name="holder")
        await shower.hide_disks(machine, [layer.name for layer in layers])
        await self.assert_nothing_is_left(shower, machine)

    async def test_a_device_that_never_goes_is_told_in_time(self) -> None:
        shower = await self.shower()
        machine = await self.machine(shower)
        [shown] = await shower.show_disks(machine, self.disks(1))
        self.patch(disks, "_UNPLUG_SECONDS", 0.2)
        deaf = self.patch(VmConnections, "_on_event", lambda connection, event: None)
        shower = await self.next_daemon(shower)
        words = await self.fails(Unavailable, shower.hide_disks(machine, [shown.name]))
        self.assertIn("0.2 s", words)
        deaf.restore()
        await shower.hide_disks(machine, [shown.name])
        await self.assert_nothing_is_left(shower, machine)

    async def test_a_qemu_that_hangs_is_told_and_undone_later(self) -> None:
        shower = await self.shower()
        machine = await self.machine(shower)
        await self.monitor(shower, machine)
        execute = QmpConnection.execute

        def hurried(connection: Any, name: str, seconds: float = 0.3, /, **arguments: Any) -> Any:
            return execute(connection, name, seconds, **arguments)  # Any: as `execute`

        impatient = self.patch(QmpConnection, "execute", hurried)
        self.processes[machine].send_signal(19)
        for _ in range(2):
            words = await self.fails(Unavailable, shower.show_disks(machine, self.disks(2)))
            self.assertIn("did not answer", words)
            await self.fails(Unavailable, shower.shown_disks(machine))
            await self.fails(Unavailable, shower.hide_disks(machine, ["0" * 64]))
        self.processes[machine].send_signal(18)
        impatient.restore()
        await shower.hide_disks(machine, [])
        await self.assert_nothing_is_left(shower, machine)

    async def test_a_qemu_that_answers_nonsense_harms_nobody(self) -> None:
        shower = await self.shower()
        machine = await self.machine(shower)
        nonsense: object
        for nonsense in (None, 7, "x", {}, [7, None, "x"], [{"name": 7, "node-name": [], "fds": 3}]):
            qmp = await self.monitor(shower, machine)

            def lie(name: str, *_: Any, nonsense: Any = nonsense, do: Any = qmp.execute, **rest: Any) -> Any:
                return do(name, *_, **rest).addCallback(lambda answer: nonsense)  # Any: as `execute`

            liar = self.patch(qmp, "execute", lie)
            self.assertEqual(list(await shower.shown_disks(machine)), [])
            await self.fails(Unavailable, shower.show_disks(machine, self.disks(1)))
            liar.restore()

    async def test_one_that_starts_is_not_touched(self) -> None:
        shower = await self.shower()
        machine = await self.machine(shower)
        vm = shower.vms[machine]
        vm.record = VmRecord(vm.record.token, "sandbox", "cluster", "node", "10.0.0.2", 1.0)
        self.assertIn("starting", await self.fails(Unavailable, shower.show_disks(machine, self.disks(1))))
        self.assertEqual(list(await shower.shown_disks(machine)), [])
        await shower.hide_disks(machine, ["0" * 64])
        self.assertIsNone(vm.connections)
        self.assertTrue(connections.VmConnections(reactor).lost)
