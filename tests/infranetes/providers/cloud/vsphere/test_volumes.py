# SPDX-License-Identifier: Apache-2.0
"""Volumes as first class disks of govmomi's simulated vCenter."""

from __future__ import annotations

from operator import methodcaller
from unittest.mock import patch

from pyVmomi import vim
from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.interface import IPodProvider
from infranetes.providers.volumes import IHasVolumes, IVolumes
from infranetes_common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from tests.contract.attached_volumes import Attacher
from tests.contract.volumes import VolumesContract
from tests.infranetes.providers.cloud.volumes_case import CloudAttachedVolumesContract, CloudVolumesCase
from tests.infranetes.providers.cloud.vsphere.case import VsphereCase
from tests.support.clouds import vcsim
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.first_class_disks import KEEP

MIB = 1 << 20


class VolumesCase(VsphereCase, CloudVolumesCase[Driver]):
    """Volumes on a vCenter."""

    def of(self, provider: IPodProvider) -> IVolumes:
        return IHasVolumes(provider).volumes

    async def machine(self, volumes: Attacher) -> str:
        return await self.vm()

    def has(self, machine: str, volume: str) -> bool:
        return machine in [vm.name for vm in self.world.disks.users(volume)]

    def serial(self, volume: str) -> str:
        """Return the UUID of a disk's file, as vCenter reports it for the VM that has the disk."""
        [vm] = self.world.disks.users(volume)
        [uuid] = [
            device.backing.uuid
            for device in vm.config.hardware.device
            if getattr(device, "vDiskId", None) is not None and device.vDiskId.id == volume
        ]
        return str(uuid).replace("-", "")


class VolumesTests(VolumesCase, VolumesContract, TestCase):
    """The contract of volumes that are not attached."""


class AttachedVolumesTests(VolumesCase, CloudAttachedVolumesContract[Driver], TestCase):
    """The contract of attached volumes."""

    has_modes = False
    of_attaching = ("AttachDisk_Task", "DetachDisk_Task")
    unknown_machine = "infranetes-" + "0" * 12 + "-" + "0" * 32 + "-0"


class DestroyedVmTests(VolumesCase, TestCase):
    """vCenter deletes a VM's disks with the VM, except for first class disks with a flag."""

    async def attached(self) -> tuple[IVolumes, str, str]:
        volumes = await self.volumes()
        machine = await self.machine(volumes)
        volume = (await volumes.create("data", MIB)).id
        await volumes.attach(machine, volume, False)
        return volumes, machine, volume

    async def test_a_volume_outlives_its_vm(self) -> None:
        """The simulated vCenter deletes whatever is still attached, without regard to flags."""
        volumes, machine, volume = await self.attached()
        await self.provider.destroy(machine)
        self.assertEqual(self.world.names(), [])
        self.assertEqual(await volumes.list(), [await volumes.get(volume)])
        other = await self.machine(volumes)
        await volumes.attach(other, volume, False)
        self.assertTrue(self.has(other, volume))

    async def test_a_vm_is_not_destroyed_while_it_has_a_volume(self) -> None:
        """Nor by the next daemon."""
        volumes, machine, volume = await self.attached()
        stuck = self.world.faults.add(FaultKind.BUSY, "DetachDisk_Task")
        with patch.dict(self.settings, destroy_seconds=1.0):
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
    """vCenter has carried out a request, and its answer was lost."""

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
    """Volumes use separate sessions at the vCenter."""

    def sessions(self) -> list[str]:
        """Return all sessions but the test's own."""
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
    """A daemon is lost after any step: the next one finishes what was begun."""

    async def test_each_step_of_making_one(self) -> None:
        for number, action in enumerate(
            ("CreateVirtualDisk_Task", "RegisterDisk", "SetVStorageObjectControlFlags")
        ):
            make = methodcaller("create", f"data-{number}", MIB)
            await self.killed_at(action, make)
            made = await make(self.provider.volumes)
            self.assertIn(made.id, [disk.id for disk in await self.provider.volumes.list()])
            self.assertIn(KEEP, self.world.disks.flags[made.id])
            self.assertEqual(len(self.world.disks.ids()), number + 1)

    async def test_each_step_with_a_vm(self) -> None:
        volumes = await self.volumes()
        machine = await self.vm()
        volume = (await volumes.create("data", MIB)).id
        await self.killed_at("AttachDisk_Task", methodcaller("attach", machine, volume, False))
        self.assertTrue(self.has(machine, volume))
        await self.killed_at("DetachDisk_Task", methodcaller("detach", machine, volume))
        self.assertFalse(self.has(machine, volume))
        await self.killed_at("DeleteVStorageObject_Task", methodcaller("delete", volume))
        self.assertEqual(self.world.disks.ids(), [])


class TaskTests(VolumesCase, TestCase):
    """Faults that vCenter reports only while or after a task runs."""

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
        self.world.disks.looks["CreateVirtualDisk_Task"] = 12  # while a call polls ten times
        asked = len(self.world.asked("CreateVirtualDisk_Task"))
        made = await volumes.create("data", MIB)
        again = len(self.world.asked("CreateVirtualDisk_Task")) - asked
        self.assertGreater(again, 1, "it is asked for again")
        self.assertEqual(self.world.disks.ids(), [first.id, made.id])

    async def test_one_that_cannot_be_detached_stays_and_says_why(self) -> None:
        """For example, while a user's snapshot of the VM exists."""
        volumes = await self.volumes()
        machine = await self.machine(volumes)
        volume = (await volumes.create("data", MIB)).id
        await volumes.attach(machine, volume, False)
        self.world.disks.refused["DetachDisk_Task"] = "InvalidState"
        hurried = await self.hurried_volumes()
        words = await self.refused(Unavailable, hurried.detach(machine, volume))
        self.assertIn("InvalidState", str(words))
        self.assertTrue(self.has(machine, volume))
        self.world.disks.refused.clear()
        volumes = await self.next_volumes(hurried)
        await volumes.detach(machine, volume)

    async def test_a_vcenter_that_enlarges_none_that_is_attached_says_so(self) -> None:
        volumes = await self.volumes()
        volume = (await volumes.create("data", MIB)).id
        self.world.disks.refused["ExtendDisk_Task"] = "InvalidState"
        hurried = await self.hurried_volumes()
        words = await self.refused(Unavailable, hurried.expand(volume, 2 * MIB))
        self.assertIn("InvalidState", str(words))
        self.assertEqual((await hurried.get(volume)).size, MIB)

    async def test_a_datastore_that_is_full_is_told(self) -> None:
        volumes = await self.volumes()
        self.world.disks.refused["CreateVirtualDisk_Task"] = "NoDiskSpace"
        await self.refused(ResourceExhausted, volumes.create("data", MIB))
        self.world.disks.refused.clear()
        made = await volumes.create("data", MIB)
        self.assertEqual(await volumes.list(), [made])

    async def test_a_vm_that_is_being_destroyed_gets_none(self) -> None:
        volumes = await self.volumes()
        machine = await self.machine(volumes)
        one, other = [(await volumes.create(name, MIB)).id for name in ("one", "other")]
        await volumes.attach(machine, one, False)
        self.world.disks.refused["DetachDisk_Task"] = "TaskInProgress"
        with patch.dict(self.settings, destroy_seconds=1.0):
            hurried = await self.hurried_volumes()
        await self.refused(Unavailable, self.provider.destroy(machine))
        await self.refused(Unavailable, hurried.attach(machine, other, False))
        self.assertFalse(self.has(machine, other))
        self.world.disks.refused.clear()
        volumes = await self.next_volumes(hurried)
        await self.provider.destroy(machine)
        self.assertEqual(len(await volumes.list()), 2)


class PlacesTests(VolumesCase, TestCase):
    """Where volumes are, and to which VM they are attached."""

    async def test_a_controller_is_added_once_the_others_are_full(self) -> None:
        volumes = await self.volumes()
        machine = await self.machine(volumes)
        self.world.disks.fill(self.world.vm(machine), 14)  # beside the root disk
        made = [(await volumes.create(name, MIB)).id for name in ("one", "other")]
        for volume in made:
            await volumes.attach(machine, volume, False)
        devices = self.world.vm(machine).config.hardware.device
        controllers = [each for each in devices if isinstance(each, vim.vm.device.ParaVirtualSCSIController)]
        self.assertEqual([each.busNumber for each in controllers], [0, 1])
        self.assertTrue(all(self.has(machine, volume) for volume in made))

    async def test_the_guest_is_shown_the_uuids_of_its_disks(self) -> None:
        volumes = await self.volumes()
        machine = await self.machine(volumes)
        self.assertEqual(vcsim.extra_config(self.world.vm(machine))["disk.EnableUUID"], "TRUE")

    async def test_a_vm_whose_guest_is_not_shown_them_is_given_no_volume(self) -> None:
        """The guest could not find it, and vSphere can't change that for a running VM."""
        volumes = await self.volumes()
        machine = await self.machine(volumes)
        volume = (await volumes.create("data", MIB)).id
        for value in ("", "FALSE"):
            self.world.vcsim.reconfigure(self.world.vm(machine), {"disk.EnableUUID": value})
            refused = await self.refused(FailedPrecondition, volumes.attach(machine, volume, False))
            self.assertIn("disk.EnableUUID", str(refused))
            self.assertIn("recreate its pod", str(refused))
        self.assertEqual((self.world.asked("AttachDisk_Task"), self.has(machine, volume)), ([], False))
        self.world.vcsim.reconfigure(self.world.vm(machine), {"disk.EnableUUID": "true"})  # by someone
        await volumes.attach(machine, volume, False)
        self.assertTrue(self.has(machine, volume))

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
