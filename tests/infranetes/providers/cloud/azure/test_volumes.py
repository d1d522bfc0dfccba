# SPDX-License-Identifier: Apache-2.0
"""Volumes on a simulated Azure over HTTP, which enforces the manual's roles."""

from __future__ import annotations

from twisted.internet.defer import gatherResults
from twisted.trial.unittest import TestCase

from infranetes.providers.annotations import PREFIX
from infranetes.providers.cloud.azure.driver import Driver
from infranetes.providers.cloud.interface import CLUSTER, NODE, TOKEN
from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.volumes import IVolumes
from infranetes_common.concurrency import settled
from infranetes_common.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from infranetes_common.volume_disks import serial_at_lun
from tests.contract.volumes import VolumesContract
from tests.infranetes.providers.cloud.azure.volumes_case import GIB, AzureVolumesCase
from tests.infranetes.providers.cloud.volumes_case import CloudAttachedVolumesContract
from tests.support.clouds import azure_resources
from tests.support.clouds.azure_resources import LOCATION, VMS, ZONES
from tests.support.clouds.faults import FaultKind

CHANGES = ("create disks", "change disks", "attach disk", "detach disk", "delete disks")


class AzureVolumesTests(AzureVolumesCase, VolumesContract, TestCase):
    """The contract of volumes."""


class AzureAttachedVolumesTests(AzureVolumesCase, CloudAttachedVolumesContract[Driver], TestCase):
    """The contract of attached volumes."""

    of_attaching = ("attach disk", "detach disk")
    unknown_machine = "infranetes-" + "0" * 32 + "-0"
    has_modes = False

    def serial(self, volume: str) -> str:
        [lun] = [
            entry["lun"]
            for vm in self.world.arm.of["virtualMachines"]
            for name, entry in self.listed(vm).items()
            if name == volume
        ]
        return serial_at_lun(lun, volume)


class RequestTests(AzureVolumesCase, TestCase):
    """Requests to Azure."""

    async def test_a_disk_says_whose_it_is_from_the_beginning(self) -> None:
        self.settings["volume_type"] = "Premium_LRS"
        volumes = await self.volumes()
        made = await volumes.create("pvc-1 für Ada", 10 * GIB)
        [disk] = self.disks().values()
        self.assertEqual(disk["tags"], {CLUSTER: self.cluster, "infranetes-volume": "pvc-1 für Ada"})
        self.assertEqual((disk["properties"]["diskSizeGB"], disk["sku"]), (10, {"name": "Premium_LRS"}))
        self.assertEqual((disk["location"], disk["zones"]), (LOCATION, ["1"]))
        self.assertEqual((made.id, made.zone), (disk["name"], ZONES[0]))
        self.assertEqual(len(self.asked("create disks")), 1)

    async def test_one_of_all_zones_is_in_none_and_attached_in_each(self) -> None:
        self.settings |= {"volume_type": "StandardSSD_ZRS", "zones": ["2"]}
        volumes = await self.volumes()
        made, vm = await volumes.create("data", GIB), await self.vm()
        self.assertEqual((made.zone, volumes.topology), ("", {}))
        self.assertNotIn("zones", self.disks()[made.id])
        await volumes.attach(vm, made.id, False)
        self.assertTrue(self.has(vm, made.id))
        await volumes.detach(vm, made.id)

    async def test_where_vms_are_in_no_zone_disks_are_in_none(self) -> None:
        self.settings["zones"] = []
        volumes = await self.volumes()
        made, vm = await volumes.create("data", GIB), await self.vm()
        self.assertEqual((made.zone, self.disks()[made.id].get("zones")), ("", None))
        await volumes.attach(vm, made.id, False)
        await volumes.detach(vm, made.id)

    async def test_it_outlives_its_vm_and_is_free_once_azure_says_so(self) -> None:
        self.world.release_seconds = 0.5
        volumes = await self.volumes()
        made, first, second = await volumes.create("data", GIB), await self.vm(), await self.vm()
        await volumes.attach(first, made.id, False)
        self.assertEqual(self.listed(first)[made.id]["deleteOption"], "Detach")
        await self.within(self.provider.destroy(first))
        await self.until(lambda: first not in self.world.arm.of["virtualMachines"], "the VM is gone")
        self.assertEqual(self.disks()[made.id]["properties"]["diskState"], "Attached")
        self.assertEqual(await volumes.list(), [made])
        await volumes.attach(second, made.id, False)
        self.assertTrue(self.has(second, made.id))
        await volumes.detach(second, made.id)

    async def test_the_disk_of_a_deallocated_vm_is_detached(self) -> None:
        volumes = await self.volumes()
        made, first, second = await volumes.create("data", GIB), await self.vm(), await self.vm()
        await volumes.attach(first, made.id, False)
        self.world.evict(first)
        await self.until_ended(first)
        self.assertEqual(self.disks()[made.id]["properties"]["diskState"], "Reserved")
        await volumes.detach(first, made.id)
        await volumes.attach(second, made.id, False)
        await volumes.detach(second, made.id)
        self.assertEqual([one["force"] for one in self.asked("detach disk")], ["False", "False"])

    async def test_a_disk_that_the_guest_keeps_is_taken_from_a_vm_that_is_off(self) -> None:
        volumes = await self.hurried()
        made, vm = await volumes.create("data", GIB), await self.vm()
        await volumes.attach(vm, made.id, False)
        self.azure.stuck.add(made.id)
        for _ in range(2):
            with self.assertRaisesRegex(Unavailable, "still used by the VM's system"):
                await volumes.detach(vm, made.id)
        self.world.end(vm)
        await self.until_ended(vm)
        self.assertEqual({one["force"] for one in self.asked("detach disk")}, {"False"})
        await volumes.detach(vm, made.id)
        self.assertEqual(self.asked("detach disk")[-1]["force"], "True")
        self.assertEqual(self.listed(vm), {})

    async def hurried(self) -> IVolumes:
        await self.volumes()
        return await self.hurried_volumes()

    async def test_volumes_of_one_vm_take_turns(self) -> None:
        """Azure refuses a change of a VM that is being changed: that is never asked for."""
        volumes, vm = await self.volumes(), await self.vm_with_places()
        made = await gatherResults([volumes.create(f"data-{number}", GIB) for number in range(4)])
        await gatherResults([volumes.attach(vm, each.id, False) for each in made])
        self.assertEqual(sorted(each["lun"] for each in self.listed(vm).values()), [0, 1, 2, 3])
        await volumes.detach(vm, made[1].id)
        leaving = [volumes.detach(vm, made[0].id), volumes.detach(vm, made[2].id)]
        coming = volumes.attach(vm, made[1].id, False)
        await gatherResults(leaving)
        await coming
        self.assertEqual(set(self.listed(vm)), {made[1].id, made[3].id})
        await gatherResults([volumes.detach(vm, made[number].id) for number in (1, 3)])
        self.assertEqual((len(self.asked("attach disk")), len(self.asked("detach disk"))), (5, 5))

    async def vm_with_places(self) -> str:
        """Launch a VM for four volumes."""
        spec = self.spec(annotations={f"{PREFIX}instance-type": "Standard_B2s"})
        return (await self.running(self.provider, spec)).id

    async def test_a_vm_that_somebody_else_changes_is_waited_for(self) -> None:
        volumes = await self.volumes()
        made, vm = await volumes.create("data", GIB), await self.vm()
        properties = self.world.arm.of["virtualMachines"][vm]["properties"]
        properties["provisioningState"] = "Updating"
        waiting = volumes.attach(vm, made.id, False)
        await self.until_asked(2, "attach disk")
        properties["provisioningState"] = "Succeeded"
        await waiting
        self.assertTrue(self.has(vm, made.id))
        properties["provisioningState"] = "Updating"
        leaving = volumes.detach(vm, made.id)
        await self.until_asked(3)
        self.assertEqual(self.asked("detach disk"), [])
        properties["provisioningState"] = "Succeeded"
        await leaving

    async def test_a_vm_with_as_many_disks_as_its_size_can_have(self) -> None:
        volumes, vm = await self.volumes(), await self.vm()
        made = [await volumes.create(f"data-{number}", GIB) for number in range(3)]
        outcomes = await settled([volumes.attach(vm, each.id, False) for each in made])
        failures = [each for each in outcomes if not isinstance(each, str)]
        self.assertEqual(len(failures), 1, failures)
        self.assertIsInstance(failures[0].value, ResourceExhausted)
        self.assertIn("VM of this size is 2", str(failures[0].value))

    async def test_a_disk_of_another_zone_is_refused(self) -> None:
        self.settings["zones"] = ["2", "1"]
        far = await (await self.volumes()).create("far", GIB)
        self.settings["zones"] = ["1", "2"]
        volumes = await self.next_volumes(self.provider.volumes)
        vm = await self.vm()
        with self.assertRaisesRegex(FailedPrecondition, f"is in zone {ZONES[1]}, and VM {vm} in {ZONES[0]}"):
            await volumes.attach(vm, far.id, False)
        self.assertEqual(self.asked("attach disk"), [])

    async def test_a_disk_of_no_zone_is_refused_by_azure(self) -> None:
        self.add_disk("mine")
        volumes, vm = await self.volumes(), await self.vm()
        with self.assertRaisesRegex(FailedPrecondition, "not in the same zone"):
            await volumes.attach(vm, "mine", False)
        del self.world.arm.of["disks"]["mine"]

    def add_disk(self, name: str, **more: object) -> None:
        """Add a disk that somebody else has made."""
        disk = azure_resources.disk(name, {})
        disk["properties"] |= more
        self.world.arm.of["disks"][name] = disk

    async def test_a_persons_disk_is_attached_by_its_name_and_never_deleted(self) -> None:
        self.settings["zones"] = []
        self.add_disk("database")
        volumes, vm = await self.volumes(), await self.vm()
        self.assertEqual((await volumes.get("database")).size, 8 * GIB)
        await volumes.attach(vm, "database", False)
        self.assertTrue(self.has(vm, "database"))
        await volumes.detach(vm, "database")
        with self.assertRaisesRegex(FailedPrecondition, "by hand"):
            await volumes.delete("database")
        self.assertEqual(await volumes.list(), [])
        self.add_disk("shared", maxShares=2)
        with self.assertRaisesRegex(FailedPrecondition, "maxShares"):
            await volumes.attach(vm, "shared", False)
        for name in ("database", "shared"):
            del self.world.arm.of["disks"][name]

    async def test_one_that_a_persons_vm_has_is_refused(self) -> None:
        volumes = await self.volumes()
        made, vm = await volumes.create("data", GIB), await self.vm()
        elsewhere = VMS.replace("/resourceGroups/pods", "/resourceGroups/people") + "/desktop"
        self.disks()[made.id]["managedBy"] = elsewhere
        with self.assertRaisesRegex(FailedPrecondition, f"attached to VM {elsewhere}"):
            await volumes.attach(vm, made.id, False)
        with self.assertRaisesRegex(FailedPrecondition, f"attached to VM {elsewhere}"):
            await volumes.delete(made.id)

    async def test_what_can_be_no_disk_is_not_asked_for(self) -> None:
        volumes = await self.volumes()
        begun = len(self.world.requests)
        for id in ("a/b", "-x", "x" * 81, "data?x=1", ".."):
            with self.assertRaises(NotFound):
                await volumes.get(id)
            await volumes.delete(id)
        self.assertEqual(self.world.requests[begun:], [])

    async def test_the_same_name_is_another_volume_in_another_cluster(self) -> None:
        mine = await (await self.volumes()).create("data", GIB)
        other = await self.started(cluster="other")
        assert isinstance(other, CloudProvider)
        theirs = await other.volumes.create("data", GIB)
        self.assertNotEqual(mine.id, theirs.id)
        self.assertEqual(await other.volumes.list(), [theirs])
        self.assertEqual(await self.provider.volumes.list(), [mine])
        with self.assertRaisesRegex(FailedPrecondition, "by hand"):
            await self.provider.volumes.delete(theirs.id)

    async def test_no_sweep_takes_a_volume_that_no_vm_has(self) -> None:
        """Only what was created together with a VM of this node is swept."""
        self.settings["sweep_seconds"] = 0.1
        volumes = await self.volumes()
        made = await volumes.create("data", GIB)
        tags = {CLUSTER: self.cluster, NODE: self.node, TOKEN: "0" * 32}
        disks = self.world.arm.of["disks"]
        disks["rest"] = azure_resources.disk("rest", tags)
        await self.until(lambda: "rest" not in disks, "the rest is swept", 60.0)
        self.assertEqual(await volumes.list(), [made])

    async def test_many_who_look_are_few_requests(self) -> None:
        """Even while lists do not show what is made."""
        self.world.lag_seconds = 0.1
        volumes = await self.volumes()
        begun = len(self.world.requests)
        made = await gatherResults([volumes.create(f"data-{number}", GIB) for number in range(30)])
        self.assertEqual(len({each.id for each in made}), 30)
        actions = [one["Action"] for one in self.world.requests[begun:]]
        self.assertEqual(actions.count("create disks"), 30)
        await self.until(lambda: not self.azure.hidden, "lists show them")
        begun = len(self.world.requests)
        found = await gatherResults([volumes.get(each.id) for each in made])
        self.assertEqual(found, made)
        actions = [one["Action"] for one in self.world.requests[begun:]]
        self.assertLessEqual(len(actions), 2, "the first one's may be of its own")
        self.assertIn("list disks", actions)


class GrowthTests(AzureVolumesCase, TestCase):
    """Volumes that are enlarged, while a VM has them and afterwards."""

    async def test_it_grows_or_azure_says_why_not(self) -> None:
        volumes = await self.volumes()
        made, vm = await volumes.create("data", GIB), await self.vm()
        await volumes.attach(vm, made.id, False)
        self.assertEqual((await volumes.expand(made.id, 2 * GIB)).size, 2 * GIB)
        self.azure.grows_online = False
        for _ in range(2):
            with self.assertRaisesRegex(Unavailable, "Cannot resize disk .* while it is attached"):
                await volumes.expand(made.id, 3 * GIB)
        await volumes.detach(vm, made.id)
        self.assertEqual((await volumes.expand(made.id, 3 * GIB)).size, 3 * GIB)

    async def test_beyond_4_tib_it_grows_once_no_vm_has_it(self) -> None:
        volumes = await self.volumes()
        made, vm = await volumes.create("data", 4095 * GIB), await self.vm()
        await volumes.attach(vm, made.id, False)
        with self.assertRaisesRegex(Unavailable, "beyond 4095 GiB when attached"):
            await volumes.expand(made.id, 4096 * GIB)
        await volumes.detach(vm, made.id)
        self.assertEqual((await volumes.expand(made.id, 4096 * GIB)).size, 4096 * GIB)

    async def test_one_whose_growth_has_failed_keeps_what_it_holds(self) -> None:
        """It is neither deleted nor made anew, though Azure says that it has failed."""
        volumes = await self.volumes()
        made, vm = await volumes.create("data", GIB), await self.vm()
        await volumes.attach(vm, made.id, False)
        await volumes.detach(vm, made.id)
        self.azure.failing["grow"] = ("InternalServerError", "Try again later.")
        self.assertEqual((await volumes.expand(made.id, 2 * GIB)).size, 2 * GIB)
        self.disks()[made.id]["properties"]["provisioningState"] = "Failed"
        self.assertEqual((await volumes.create("data", GIB)).id, made.id)
        await volumes.attach(vm, made.id, False)
        await volumes.detach(vm, made.id)
        self.assertEqual((len(self.asked("create disks")), self.asked("delete disks")), (1, []))


class FailureTests(AzureVolumesCase, TestCase):
    """Operations that fail."""

    async def test_one_that_can_not_be_made_leaves_nothing_and_says_why(self) -> None:
        volumes = await self.volumes()
        self.azure.failing["create disks"] = ("QuotaExceeded", "The quota of disks is used up.")
        with self.assertRaisesRegex(ResourceExhausted, "The quota of disks"):
            await volumes.create("data", GIB)
        [left] = self.disks().values()
        self.assertEqual(left["properties"]["provisioningState"], "Failed")
        self.assertEqual([one.id for one in await volumes.list()], [])
        with self.assertRaisesRegex(ResourceExhausted, "provisioningState is Failed"):
            await volumes.create("data", GIB)
        await self.until(lambda: not self.disks(), "it is deleted")
        await volumes.create("data", GIB)

    async def test_a_quota_that_is_used_up_leaves_nothing(self) -> None:
        volumes = await self.volumes()
        self.azure.most = len(self.world.arm.of["disks"])
        for _ in range(2):
            with self.assertRaisesRegex(ResourceExhausted, "StandardSSDStorageDisks quota"):
                await volumes.create("data", GIB)
        self.assertEqual(self.disks(), {})

    async def test_what_was_not_attached_is_taken_from_the_vms_list_and_asked_for_again(self) -> None:
        """Azure would try to attach it with the VM's next change."""
        volumes = await self.volumes()
        made, vm = await volumes.create("data", GIB), await self.vm()
        self.azure.failing["attach"] = ("AttachDiskFailed", "The disk has no lease.")
        await volumes.attach(vm, made.id, False)
        self.assertTrue(self.has(vm, made.id))
        self.assertEqual((len(self.asked("attach disk")), len(self.asked("detach disk"))), (2, 1))
        await volumes.detach(vm, made.id)

    async def test_what_a_daemon_has_left_in_the_vms_list_is_cleared_first(self) -> None:
        volumes = await self.volumes()
        made, vm = await volumes.create("data", GIB), await self.vm()
        asked = {"lun": 0, "caching": "None", "deleteOption": "Detach"}
        entry = azure_resources.data_disk(self.disks()[made.id], asked)
        self.world.arm.of["virtualMachines"][vm]["properties"]["storageProfile"]["dataDisks"] = [entry]
        await volumes.attach(vm, made.id, False)
        self.assertTrue(self.has(vm, made.id))
        self.assertEqual(len(self.listed(vm)), 1)
        await volumes.detach(vm, made.id)

    async def test_one_that_is_being_attached_is_not_deleted(self) -> None:
        """Azure shows such a disk as unattached until the VM has it, and would delete it."""
        volumes = await self.volumes()
        made, vm = await volumes.create("data", GIB), await self.vm()
        self.world.operation_seconds = 0.5
        self.world.faults.add(FaultKind.LOST, "attach disk")
        waiting = volumes.attach(vm, made.id, False)
        await self.until(lambda: bool(self.listed(vm)), "the VM lists it")
        await self.within(self.provider.stop())
        with self.assertRaises(Unavailable):
            await waiting
        self.world.faults.clear()
        volumes = await self.volumes()
        self.assertNotIn("managedBy", self.disks()[made.id])
        with self.assertRaisesRegex(FailedPrecondition, f"attached to VM {vm}"):
            await volumes.delete(made.id)
        await volumes.detach(vm, made.id)
        await volumes.delete(made.id)

    async def test_of_two_daemons_that_attach_at_once_one_gets_it(self) -> None:
        volumes = await self.volumes()
        made, vms = await volumes.create("data", GIB), [await self.vm(), await self.vm()]
        other = await self.started()  # another daemon, whose calls are not ordered with the first one's
        assert isinstance(other, CloudProvider)
        outcomes = await settled(
            [volumes.attach(vms[0], made.id, False), other.volumes.attach(vms[1], made.id, False)]
        )
        self.assertEqual([isinstance(each, str) for each in outcomes].count(True), 1, outcomes)
        await self.until(lambda: sum(bool(self.listed(vm)) for vm in vms) == 1, "one VM lists it")
        for vm in vms:
            await volumes.detach(vm, made.id)


class LostAnswerTests(AzureVolumesCase, TestCase):
    """A step takes effect, but its answer is lost."""

    async def life(self) -> None:
        """Take a volume through its life."""
        volumes = await self.volumes()
        vm = await self.vm()
        made = await volumes.create("data", GIB)
        await volumes.attach(vm, made.id, False)
        self.assertTrue(self.has(vm, made.id))
        self.assertEqual((await volumes.expand(made.id, 2 * GIB)).size, 2 * GIB)
        await volumes.detach(vm, made.id)
        self.assertEqual(self.listed(vm), {})
        await volumes.delete(made.id)
        self.assertEqual(await volumes.list(), [])
        await self.until(lambda: not self.disks(), "the disk is gone")

    async def test_lost_answers_change_nothing(self) -> None:
        for kind in (FaultKind.LOST, FaultKind.ACTED):
            faults = [self.world.faults.add(kind, action, times=2) for action in CHANGES]
            await self.life()
            self.assertTrue(all(fault.happened for fault in faults), faults)
            self.world.faults.clear()

    async def test_refusals_that_pass_are_waited_for(self) -> None:
        for kind in (FaultKind.ERROR, FaultKind.THROTTLE):
            actions = (*CHANGES, "get disks", "operation")
            faults = [self.world.faults.add(kind, action, times=2) for action in actions]
            await self.life()
            self.assertEqual([fault.happened for fault in faults], [2] * len(actions))
            self.world.faults.clear()

    async def test_operations_that_fail_for_now_are_asked_for_again(self) -> None:
        """Whether another operation has taken their place, too much was asked for, or nobody says why."""
        for code in ("OperationPreempted", "TooManyRequests", "SomethingNew"):
            failing, error = self.azure.failing, (code, "Try again later.")
            failing.update(dict.fromkeys(("grow", "attach", "detach", "delete disks"), error))
            await self.life()
            self.assertEqual(failing, {})
            self.assertFalse(self.provider._calls.is_open)


class KilledTests(AzureVolumesCase, TestCase):
    """The daemon is killed right after a request took effect, and the next one goes on from there."""

    operation_seconds = 0.3

    async def test_each_step_is_finished_by_the_next_daemon(self) -> None:
        await self.volumes()
        vm = await self.vm()
        await self.killed_at("create disks", lambda volumes: volumes.create("data", GIB))
        [id] = self.disks()
        await self.killed_at("change disks", lambda volumes: volumes.expand(id, 2 * GIB))
        self.assertEqual(self.disks()[id]["properties"]["diskSizeGB"], 2)
        await self.killed_at("attach disk", lambda volumes: volumes.attach(vm, id, False))
        self.assertTrue(self.has(vm, id))
        await self.killed_at("detach disk", lambda volumes: volumes.detach(vm, id))
        self.assertEqual(self.listed(vm), {})
        await self.killed_at("delete disks", lambda volumes: volumes.delete(id))
        await self.until(lambda: not self.disks(), "the disk is gone")
