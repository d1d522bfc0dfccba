# SPDX-License-Identifier: Apache-2.0
"""Volumes as first class disks of govmomi's simulated vCenter."""

from __future__ import annotations

from typing import Any

from pyVmomi import vim
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.hardware import AttachedDisk, hardware
from infranetes.providers.interface import InstanceState, IPodProvider
from infranetes.providers.volumes import IHasVolumes, IVolumes
from infranetes_common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from tests.contract.attached_volumes import AttachedVolumesContract, Attacher
from tests.contract.volumes import VolumesContract
from tests.infranetes.providers.cloud.vsphere_case import VsphereCase
from tests.support.clouds import vcsim
from tests.support.clouds.faults import NO_AGENT, FaultKind
from tests.support.clouds.first_class_disks import KEEP

MIB = 1 << 20
ParaVirtualSCSIController: Any = vim.vm.device.ParaVirtualSCSIController
VirtualLsiLogicController: Any = vim.vm.device.VirtualLsiLogicController
VirtualDisk: Any = vim.vm.device.VirtualDisk


class VolumesCase(VsphereCase):
    """A provider with volumes, whose VMs have no agents."""

    provider: IPodProvider

    async def volumes(self) -> IVolumes:
        self.world.behaviour = NO_AGENT
        self.provider = await self.started()
        return self.of(self.provider)

    def of(self, provider: IPodProvider) -> IVolumes:
        return IHasVolumes(provider).volumes

    async def next_volumes(self, volumes: IVolumes) -> IVolumes:
        self.provider = await self.restarted(self.provider)
        return self.of(self.provider)

    async def machine(self, attacher: Attacher) -> str:
        return (await self.running(self.provider, self.spec())).id

    def has(self, machine: str, volume: str) -> bool:
        return machine in [vm.name for vm in self.world.disks.users(volume)]

    def serial(self, volume: str) -> str:
        """The UUID of a disk's file, as vCenter tells it of the VM that has the disk."""
        [vm] = self.world.disks.users(volume)
        [uuid] = [
            device.backing.uuid
            for device in vm.config.hardware.device
            if getattr(device, "vDiskId", None) is not None and device.vDiskId.id == volume
        ]
        return str(uuid).replace("-", "")


class VolumesTests(VolumesCase, VolumesContract, TestCase):
    """The promises of all volumes that nobody has."""


class AttachedVolumesTests(VolumesCase, AttachedVolumesContract, TestCase):
    """The promises of all volumes that VMs have."""

    has_modes = False
    unknown_machine = "infranetes-" + "0" * 12 + "-" + "0" * 32 + "-0"

    async def attacher(self) -> Attacher:
        return await self.volumes()

    async def next_daemon(self, attacher: Attacher) -> Attacher:
        return await self.next_volumes(self.of(self.provider))

    async def volume(self, attacher: Attacher, name: str) -> str:
        return (await self.of(self.provider).create(name, MIB)).id

    async def end(self, attacher: Attacher, machine: str) -> None:
        ended: list[str] = []
        self.provider.watch(lambda instance: ended.append(instance.id))
        self.world.end(machine)
        await self.until(lambda: machine in ended, "the end of the VM is noticed")
        self.assertIs((await self.provider.get(machine)).state, InstanceState.ENDED)


class DestroyedVmTests(VolumesCase, TestCase):
    """vCenter deletes the files of a VM's disks with the VM, but for first class disks with a flag."""

    async def attached(self) -> tuple[IVolumes, str, str]:
        volumes = await self.volumes()
        machine = await self.machine(volumes)
        volume = (await volumes.create("data", MIB)).id
        await volumes.attach(machine, volume, False)
        return volumes, machine, volume

    async def test_a_volume_outlives_its_vm(self) -> None:
        """The simulated vCenter deletes what is still attached, whatever its flags are."""
        volumes, machine, volume = await self.attached()
        await self.provider.destroy(machine)
        self.assertEqual(self.world.names(), [])
        self.assertEqual(await volumes.list(), [await volumes.get(volume)])
        other = await self.machine(volumes)
        await volumes.attach(other, volume, False)
        self.assertTrue(self.has(other, volume))

    async def test_a_vm_is_not_destroyed_while_it_has_a_volume(self) -> None:
        """Also by the next daemon."""
        volumes, machine, volume = await self.attached()
        stuck = self.world.faults.add(FaultKind.BUSY, "DetachDisk_Task")
        self.settings["destroy_seconds"] = 1.0
        volumes = await self.next_volumes(volumes)
        await self.refused(Unavailable, self.provider.destroy(machine))
        self.assertGreater(stuck.happened, 0)
        self.assertTrue(self.has(machine, volume))
        self.world.faults.clear()
        volumes = await self.next_volumes(volumes)
        await self.provider.destroy(machine)
        self.assertEqual(self.world.names(), [])
        await volumes.get(volume)

    async def test_a_vm_whose_destruction_was_not_answered_took_nothing_along(self) -> None:
        volumes, machine, volume = await self.attached()
        lost = [
            self.world.faults.add(FaultKind.LOST, action, times=1)
            for action in ("PowerOffVM_Task", "DetachDisk_Task", "Destroy_Task")
        ]
        await self.provider.destroy(machine)
        self.assertEqual([fault.happened for fault in lost], [1, 1, 1])
        await volumes.get(volume)

    async def test_vcenter_is_told_to_keep_a_volume_before_any_vm_has_it(self) -> None:
        _, _, volume = await self.attached()
        self.assertIn(KEEP, self.world.disks.flags[volume])

    async def test_one_that_a_person_made_is_kept_too(self) -> None:
        volumes = await self.volumes()
        machine = await self.machine(volumes)
        volume = self.world.disks.make("of-a-person", 3)
        self.assertEqual((await volumes.get(volume)).size, 3 * MIB)
        self.assertEqual(await volumes.list(), [])
        await volumes.attach(machine, volume, False)
        self.assertIn(KEEP, self.world.disks.flags[volume])
        await self.provider.destroy(machine)
        await self.refused(FailedPrecondition, volumes.delete(volume))
        await volumes.get(volume)


class LostAnswerTests(VolumesCase, TestCase):
    """vCenter has done what it was asked for, and nobody was told."""

    async def life(self, kind: FaultKind) -> list[int]:
        volumes = await self.volumes()
        machine = await self.machine(volumes)
        faults = [
            self.world.faults.add(kind, action, times=1)
            for action in (
                "CreateVirtualDisk_Task",
                "MakeDirectory",
                "RegisterDisk",
                "SetVStorageObjectControlFlags",
                "AttachDisk_Task",
                "ExtendDisk_Task",
                "DetachDisk_Task",
                "DeleteVStorageObject_Task",
            )
        ]
        made = await volumes.create("data", MIB)
        self.assertEqual(await volumes.list(), [made])
        self.assertEqual(self.world.disks.ids(), [made.id])
        await volumes.attach(machine, made.id, False)
        self.assertTrue(self.has(machine, made.id))
        self.assertEqual((await volumes.expand(made.id, 2 * MIB)).size, 2 * MIB)
        await volumes.detach(machine, made.id)
        self.assertFalse(self.has(machine, made.id))
        await volumes.delete(made.id)
        self.assertEqual(self.world.disks.ids(), [])
        return [fault.happened for fault in faults]

    async def test_the_connection_breaks(self) -> None:
        self.assertEqual(await self.life(FaultKind.LOST), [1] * 8)

    async def test_the_answer_is_an_error(self) -> None:
        self.assertEqual(await self.life(FaultKind.ACTED), [1] * 8)

    async def test_nothing_was_done(self) -> None:
        self.assertEqual(await self.life(FaultKind.ERROR), [1] * 8)


class SessionTests(VolumesCase, TestCase):
    """Volumes have sessions of their own at the vCenter."""

    def sessions(self) -> list[Any]:
        """All but the test's own."""
        manager = self.world.vcsim.content.sessionManager
        mine = manager.currentSession.key
        return [each.key for each in manager.sessionList if each.key != mine]

    async def test_those_that_have_expired_are_renewed_and_all_are_ended(self) -> None:
        before = self.sessions()
        volumes = await self.volumes()
        made = await volumes.create("data", MIB)
        expired = [key for key in self.sessions() if key not in before]
        self.world.vcsim.content.sessionManager.TerminateSession(expired)
        self.assertEqual(await volumes.list(), [made])
        self.assertEqual((await volumes.expand(made.id, 2 * MIB)).size, 2 * MIB)
        await volumes.delete(made.id)
        await self.provider.stop()
        self.assertEqual([key for key in self.sessions() if key not in before], [])


class NextDaemonTests(VolumesCase, TestCase):
    """A daemon that is gone after any step: the next one finishes what it finds."""

    async def stopped_after(self, action: str, asking: Any, *arguments: object) -> IVolumes:
        """Ask for something, and stop the daemon once vCenter has served the request `action`."""
        served = self.world.faults.add(FaultKind.LOST, action)
        waiting = asking(*arguments)
        waiting.addErrback(lambda failure: None)
        await self.until(lambda: served.happened, action)
        await self.provider.stop()
        self.world.faults.clear()
        return await self.next_volumes(self.of(self.provider))

    async def test_each_step_of_making_one(self) -> None:
        for number, action in enumerate(
            ("CreateVirtualDisk_Task", "RegisterDisk", "SetVStorageObjectControlFlags")
        ):
            volumes = await self.volumes()
            name = f"data-{number}"
            volumes = await self.stopped_after(action, volumes.create, name, MIB)
            made = await volumes.create(name, MIB)
            self.assertIn(made.id, [disk.id for disk in await volumes.list()])
            self.assertIn(KEEP, self.world.disks.flags[made.id])
            self.assertEqual(len(self.world.disks.ids()), number + 1)

    async def test_each_step_with_a_vm(self) -> None:
        volumes = await self.volumes()
        machine = await self.machine(volumes)
        volume = (await volumes.create("data", MIB)).id
        volumes = await self.stopped_after("AttachDisk_Task", volumes.attach, machine, volume, False)
        await volumes.attach(machine, volume, False)
        self.assertTrue(self.has(machine, volume))
        volumes = await self.stopped_after("DetachDisk_Task", volumes.detach, machine, volume)
        await volumes.detach(machine, volume)
        self.assertFalse(self.has(machine, volume))
        volumes = await self.stopped_after("DeleteVStorageObject_Task", volumes.delete, volume)
        await volumes.delete(volume)
        self.assertEqual(self.world.disks.ids(), [])


class TaskTests(VolumesCase, TestCase):
    """What vCenter says only once a task runs, or ends."""

    async def test_tasks_that_take_long_are_waited_for(self) -> None:
        volumes = await self.volumes()
        machine = await self.machine(volumes)
        for action in ("AttachDisk_Task", "DetachDisk_Task", "ExtendDisk_Task", "DeleteVStorageObject_Task"):
            self.world.disks.looks[action] = 3
        made = await volumes.create("data", MIB)
        await volumes.attach(machine, made.id, False)
        self.assertTrue(self.has(machine, made.id))
        await volumes.expand(made.id, 2 * MIB)
        await volumes.detach(machine, made.id)
        await volumes.delete(made.id)
        self.assertEqual(self.world.disks.ids(), [])

    async def test_a_file_that_takes_longer_than_a_call_becomes_one_volume(self) -> None:
        volumes = await self.volumes()
        first = await volumes.create("first", MIB)
        self.world.disks.looks["CreateVirtualDisk_Task"] = 12  # a call looks ten times
        asked = len(self.world.asked("CreateVirtualDisk_Task"))
        made = await volumes.create("data", MIB)
        again = len(self.world.asked("CreateVirtualDisk_Task")) - asked
        self.assertGreater(again, 1, "it is asked for again")
        self.assertEqual(self.world.disks.ids(), [first.id, made.id])

    async def test_one_that_cannot_be_detached_stays_and_says_why(self) -> None:
        """Such as with a snapshot of the VM that somebody made."""
        self.settings["volume_seconds"] = 1.0
        volumes = await self.volumes()
        machine = await self.machine(volumes)
        volume = (await volumes.create("data", MIB)).id
        await volumes.attach(machine, volume, False)
        self.world.disks.refused["DetachDisk_Task"] = "InvalidState"
        words = await self.refused(Unavailable, volumes.detach(machine, volume))
        self.assertIn("InvalidState", str(words))
        self.assertTrue(self.has(machine, volume))
        self.world.disks.refused.clear()
        await volumes.detach(machine, volume)

    async def test_a_vcenter_that_enlarges_none_that_is_attached_says_so(self) -> None:
        self.settings["volume_seconds"] = 1.0
        volumes = await self.volumes()
        volume = (await volumes.create("data", MIB)).id
        self.world.disks.refused["ExtendDisk_Task"] = "InvalidState"
        words = await self.refused(Unavailable, volumes.expand(volume, 2 * MIB))
        self.assertIn("InvalidState", str(words))
        self.assertEqual((await volumes.get(volume)).size, MIB)

    async def test_a_datastore_that_is_full_is_told(self) -> None:
        volumes = await self.volumes()
        self.world.disks.refused["CreateVirtualDisk_Task"] = "NoDiskSpace"
        await self.refused(ResourceExhausted, volumes.create("data", MIB))
        self.world.disks.refused.clear()
        made = await volumes.create("data", MIB)
        self.assertEqual(await volumes.list(), [made])

    async def test_a_vm_that_is_being_destroyed_gets_none(self) -> None:
        self.settings["volume_seconds"] = 1.0
        self.settings["destroy_seconds"] = 1.0
        volumes = await self.volumes()
        machine = await self.machine(volumes)
        one, other = [(await volumes.create(name, MIB)).id for name in ("one", "other")]
        await volumes.attach(machine, one, False)
        self.world.disks.refused["DetachDisk_Task"] = "TaskInProgress"
        await self.refused(Unavailable, self.provider.destroy(machine))
        await self.refused(Unavailable, volumes.attach(machine, other, False))
        self.assertFalse(self.has(machine, other))
        self.world.disks.refused.clear()
        await self.provider.destroy(machine)
        self.assertEqual(len(await volumes.list()), 2)


class ControllerTests(SynchronousTestCase):
    """Which controllers a VM's disks are on."""

    def vm(self, *disks: int, kind: type = ParaVirtualSCSIController) -> list[Any]:
        """The devices of a VM with a controller for each number, and so many disks on it."""
        found = []
        for bus, number in enumerate(disks):
            found.append(kind(key=1000 + bus, busNumber=bus))
            found += [
                VirtualDisk(
                    controllerKey=1000 + bus,
                    backing=VirtualDisk.FlatVer2BackingInfo(uuid="6000C293-7BA0-3a03-9f22-562993b727b1"),
                    vDiskId=vim.vslm.ID(id=f"{bus}-{unit}") if unit else None,
                )
                for unit in range(number)
            ]
        return found

    def test_the_first_one_with_room_is_taken(self) -> None:
        self.assertEqual(hardware(self.vm(14, 3)).controller(), 1000)
        self.assertEqual(hardware(self.vm(15, 3)).controller(), 1001)

    def test_one_is_added_on_a_bus_that_is_free(self) -> None:
        full = hardware(self.vm(15, 15))
        self.assertIsNone(full.controller())
        spec: Any = full.one_more_controller()
        [change] = spec.deviceChange
        self.assertEqual((type(change.device), change.device.busNumber), (ParaVirtualSCSIController, 2))

    def test_those_that_the_guest_does_not_know_are_not_used(self) -> None:
        self.assertIsNone(hardware(self.vm(1, kind=VirtualLsiLogicController)).controller())

    def test_a_vm_with_four_full_ones_has_no_place_left(self) -> None:
        with self.assertRaisesRegex(CloudError, "56 volumes") as caught:
            hardware(self.vm(15, 15, 15, 15)).controller()
        self.assertIs(caught.exception.kind, ErrorKind.QUOTA)

    def test_a_disk_is_known_by_its_id_and_found_by_its_files_uuid(self) -> None:
        """The VM's own disk is no first class disk, and none of ours."""
        found = hardware(self.vm(2)).disks
        self.assertEqual(found, [AttachedDisk("0-1", "6000c2937ba03a039f22562993b727b1")])


class PlacesTests(VolumesCase, TestCase):
    """Where volumes are, and who has them."""

    async def test_a_controller_is_added_once_the_others_are_full(self) -> None:
        volumes = await self.volumes()
        machine = await self.machine(volumes)
        self.world.disks.fill(self.world.vm(machine), 14)  # beside the disk with the root
        made = [(await volumes.create(name, MIB)).id for name in ("one", "other")]
        for volume in made:
            await volumes.attach(machine, volume, False)
        devices = self.world.vm(machine).config.hardware.device
        controllers = [each for each in devices if isinstance(each, ParaVirtualSCSIController)]
        self.assertEqual([each.busNumber for each in controllers], [0, 1])
        self.assertTrue(all(self.has(machine, volume) for volume in made))

    async def test_the_guest_is_shown_the_uuids_of_its_disks(self) -> None:
        volumes = await self.volumes()
        machine = await self.machine(volumes)
        self.assertEqual(vcsim.extra_config(self.world.vm(machine))["disk.EnableUUID"], "TRUE")

    async def test_one_that_another_nodes_vm_has_is_refused(self) -> None:
        volumes = await self.volumes()
        machine = await self.machine(volumes)
        volume = (await volumes.create("data", MIB)).id
        await volumes.attach(machine, volume, False)
        other = await self.started(node="node-2")
        elsewhere = (await self.running(other, self.spec(node="node-2"))).id
        await self.refused(FailedPrecondition, self.of(other).attach(elsewhere, volume, False))
        await self.refused(FailedPrecondition, self.of(other).delete(volume))
        await self.of(other).detach(elsewhere, volume)
        self.assertTrue(self.has(machine, volume))
        await other.destroy(elsewhere)

    async def test_clusters_do_not_see_each_others(self) -> None:
        volumes = await self.volumes()
        volume = (await volumes.create("data", MIB)).id
        other = self.of(await self.started(cluster=f"{self.cluster}-other"))
        self.assertEqual(await other.list(), [])
        await self.refused(FailedPrecondition, other.delete(volume))
        self.assertNotEqual((await other.create("data", MIB)).id, volume)

    async def test_the_datastores_room_is_told_and_not_exceeded(self) -> None:
        volumes = await self.volumes()
        room = self.world.disks.datastore.summary.freeSpace // MIB * MIB
        self.assertEqual(await volumes.free(), room)
        self.assertLess(room, 62 << 40)
        for _ in range(2):
            await self.refused(ResourceExhausted, volumes.create("data", room + MIB))
        self.assertEqual(self.world.asked("CreateVirtualDisk_Task"), [])
        self.assertEqual((await volumes.create("data", room)).size, room)

    async def test_without_a_datastore_for_them_there_are_none(self) -> None:
        del self.settings["volumes_datastore"]
        self.assertFalse(IHasVolumes.providedBy(await self.started()))
