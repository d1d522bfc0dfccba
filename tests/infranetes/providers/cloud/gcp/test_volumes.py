# SPDX-License-Identifier: Apache-2.0
"""Volumes on a simulated Compute Engine over HTTP, which enforces the manual's role."""

from __future__ import annotations

from functools import partial
from typing import Any

from twisted.internet.defer import gatherResults
from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.gcp.disks import GcpDisks
from infranetes.providers.cloud.gcp.driver import Driver
from infranetes.providers.cloud.gcp.names import split_id
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.interface import CLUSTER, NODE, TOKEN, CloudError, ErrorKind
from infranetes.providers.cloud.provider import CloudProvider
from infranetes_common import config
from infranetes_common.concurrency import settled
from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from infranetes_common.volume_disks import serial_of
from tests.contract.volumes import VolumesContract
from tests.infranetes.providers.cloud.case import GcpCase
from tests.infranetes.providers.cloud.volumes_case import (
    CloudAttachedVolumesContract,
    CloudVolumesCase,
    Step,
)
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.gce_resources import ZONES

GIB = 1 << 30


class GcpVolumesCase(GcpCase, CloudVolumesCase[Driver]):
    """Volumes on Compute Engine."""

    operation_seconds = 0.02

    def setUp(self) -> object:
        result = super().setUp()
        self.world.operation_seconds = self.operation_seconds
        return result

    def disks(self) -> dict[str, Any]:
        """Return the disks of volumes, by their ids."""
        return {
            f"{zone}.{name}": disk
            for (zone, name), disk in self.world.api.disks.items()
            if "infranetes-volume" in disk["labels"]
        }

    def has(self, machine: str, volume: str) -> bool:
        zone, name = split_id(volume)
        disks = self.world.api.instances[split_id(machine)]["disks"]
        return f"{zone}/disks/{name}" in " ".join(each["source"] for each in disks)

    def leftovers(self) -> list[str]:
        """Return what VMs have left. Volumes outlive them, but may only be attached to VMs being deleted."""
        going = {words.rpartition(".")[2] for words in self.world.api.going()}
        for id, disk in self.disks().items():
            self.assertLessEqual({user.rpartition("/")[2] for user in disk.get("users", ())}, going)
            del self.world.api.disks[split_id(id)]
        return super().leftovers()


class GcpVolumesTests(GcpVolumesCase, VolumesContract, TestCase):
    """The contract of volumes."""


class GcpAttachedVolumesTests(GcpVolumesCase, CloudAttachedVolumesContract[Driver], TestCase):
    """The contract of attached volumes."""

    of_attaching = ("attach disk", "detach disk")
    unknown_machine = f"{ZONES[0]}.infranetes-none"


class DiskTests(GcpVolumesCase, TestCase):
    """Requests to Google."""

    async def test_a_disk_says_whose_it_is_from_the_beginning(self) -> None:
        self.settings["volume_type"] = "pd-ssd"
        volumes = await self.volumes()
        made = await volumes.create("pvc-1 für Ada", 10 * GIB)
        [disk] = self.disks().values()
        self.assertEqual(
            disk["labels"], {CLUSTER: self.cluster, "infranetes-volume": "pvc-1_20f_c3_bcr_20_41da"}
        )
        self.assertEqual((disk["sizeGb"], disk["type"].rpartition("/")[2]), ("10", "pd-ssd"))
        self.assertEqual((made.id, made.zone), (f"{ZONES[0]}.{disk['name']}", ZONES[0]))
        self.assertNotIn("setLabels disk", [one["Action"] for one in self.world.requests])

    async def test_it_outlives_its_vm_which_knows_it_by_its_serial_number(self) -> None:
        volumes = await self.volumes()
        made, vm = await volumes.create("data", GIB), await self.vm()
        self.assertEqual(await volumes.attach(vm, made.id, False), serial_of(made.id))
        attached = self.world.api.instances[split_id(vm)]["disks"][1]
        self.assertEqual(
            (attached["deviceName"], attached["autoDelete"], attached["mode"]),
            (serial_of(made.id), False, "READ_WRITE"),
        )
        await self.within(self.provider.destroy(vm))
        self.assertEqual(await volumes.list(), [made])
        await self.until(lambda: not self.disks()[made.id].get("users"), "the disk is free")

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

    async def test_a_persons_disk_is_attached_by_its_zone_and_name_and_never_deleted(self) -> None:
        self.world.api.add_disk(ZONES[0], "database", {}, "20")
        volumes, vm = await self.volumes(), await self.vm()
        id = f"{ZONES[0]}.database"
        self.assertEqual((await volumes.get(id)).size, 20 * GIB)
        await volumes.attach(vm, id, False)
        self.assertTrue(self.has(vm, id))
        await volumes.detach(vm, id)
        with self.assertRaisesRegex(FailedPrecondition, "by hand"):
            await volumes.delete(id)
        self.assertEqual(await volumes.list(), [])
        del self.world.api.disks[ZONES[0], "database"]

    async def test_what_can_be_no_disk_is_not_asked_for(self) -> None:
        """For a zone that does not exist, Google does not answer that the disk is missing."""
        volumes = await self.volumes()
        begun = len(self.world.requests)
        for id in ("data", "data.one", "europe-west1.data", f"{ZONES[0]}.Data", f"{ZONES[0]}/data"):
            with self.assertRaises(NotFound):
                await volumes.get(id)
            await volumes.delete(id)
        self.assertEqual(self.world.requests[begun:], [])
        with self.assertRaisesRegex(InvalidArgument, "zone"):
            await volumes.delete("europe-west9-z.data")

    async def test_a_disk_of_another_zone_is_refused(self) -> None:
        self.world.api.add_disk(ZONES[1], "far", {})
        volumes, vm = await self.volumes(), await self.vm()
        with self.assertRaisesRegex(FailedPrecondition, f"is in zone {ZONES[1]}, and VM"):
            await volumes.attach(vm, f"{ZONES[1]}.far", False)
        del self.world.api.disks[ZONES[1], "far"]

    async def test_a_vm_with_as_many_disks_as_it_can_have(self) -> None:
        """The smallest machine types have 16, of which one is their own."""
        volumes, vm = await self.volumes(), await self.vm()
        made = await gatherResults([volumes.create(f"data-{number}", GIB) for number in range(16)])
        outcomes = await settled([volumes.attach(vm, each.id, False) for each in made])
        failures = [each for each in outcomes if not isinstance(each, str)]
        self.assertEqual(len(failures), 1, failures)
        self.assertIsInstance(failures[0].value, ResourceExhausted)
        self.assertIn("Limit: 16", str(failures[0].value))

    async def test_one_that_was_attached_since_it_was_looked_at_is_in_another_state(self) -> None:
        """By an earlier daemon's request, whose id this daemon does not know."""
        volumes, vm = await self.volumes(), await self.vm()
        made = await volumes.create("data", GIB)
        settings = config.structure(self.settings, Settings, source="the test")
        disks = GcpDisks(settings, self.cluster)
        call = self.provider._calls.call
        [looked_at] = await call("look", partial(disks._thd_get, ids=[made.id]))
        await volumes.attach(vm, made.id, False)
        again = partial(disks._thd_attach, disk=looked_at, vm_id=vm, read_only=False)
        with self.assertRaises(CloudError) as raised:
            await call("attach", again)
        self.assertIs(raised.exception.kind, ErrorKind.STATE)
        await volumes.detach(vm, made.id)

    async def test_a_quota_that_is_used_up_leaves_nothing(self) -> None:
        volumes = await self.volumes()
        self.world.api.volumes.quota_gib = 12
        made = await volumes.create("data", 10 * GIB)
        for _ in range(2):
            with self.assertRaisesRegex(ResourceExhausted, "SSD_TOTAL_GB"):
                await volumes.create("more", 10 * GIB)
            with self.assertRaisesRegex(ResourceExhausted, "SSD_TOTAL_GB"):
                await volumes.expand(made.id, 20 * GIB)
        self.assertEqual(await volumes.list(), [made])
        self.world.api.volumes.quota_gib = 100
        await volumes.create("more", 10 * GIB)
        self.assertEqual((await volumes.expand(made.id, 20 * GIB)).size, 20 * GIB)

    async def test_two_vms_never_read_one_disk_although_google_would_let_them(self) -> None:
        volumes = await self.volumes()
        made = await volumes.create("data", GIB)
        vms = [await self.vm(), await self.vm()]
        other = await self.started()  # another daemon, whose calls are not ordered with the first one's
        assert isinstance(other, CloudProvider)
        outcomes = await settled(
            [volumes.attach(vms[0], made.id, True), other.volumes.attach(vms[1], made.id, True)]
        )
        self.assertLess(outcomes.count(serial_of(made.id)), 2)
        for vm in vms:
            await volumes.detach(vm, made.id)
        await volumes.attach(vms[0], made.id, True)
        self.assertEqual(self.world.api.instances[split_id(vms[0])]["disks"][1]["mode"], "READ_ONLY")
        await volumes.detach(vms[0], made.id)

    async def test_a_zone_that_is_not_ours_may_be_down(self) -> None:
        """A zone of another region is not even asked; of the region's own, those that have volumes are."""
        volumes = await self.volumes()
        self.settings["retry_seconds"] = 0.3
        await volumes.create("data", GIB)
        zones = {one["path"].split("/")[2] for one in self.world.requests if "/disks" in one.get("path", "")}
        self.assertLessEqual(zones, set(ZONES))
        self.assertFalse([one for one in self.world.requests if "/aggregated/" in one.get("path", "")])

    async def test_no_sweep_takes_a_volume_that_no_vm_has(self) -> None:
        """Only what was created together with a VM of this node is swept."""
        self.settings["sweep_seconds"] = 0.1
        volumes = await self.volumes()
        made = await volumes.create("data", GIB)
        labels = {CLUSTER: self.cluster, NODE: self.node, TOKEN: "0" * 32}
        self.world.api.add_disk(ZONES[0], "rest", labels)
        self.world.api.add_disk(ZONES[0], "going", labels)["status"] = "DELETING"
        await self.until(lambda: (ZONES[0], "rest") not in self.world.api.disks, "the rest is swept", 60.0)
        self.assertEqual(await volumes.list(), [made])
        deleted = [one["name"] for one in self.world.requests if one["Action"] == "delete disk"]
        self.assertNotIn("going", deleted)
        del self.world.api.disks[ZONES[0], "going"]

    async def test_many_who_look_are_few_requests(self) -> None:
        """100 volumes at once: each is created by one request, and checks of all of them share requests."""
        volumes = await self.volumes()
        begun = len(self.world.requests)
        made = await gatherResults([volumes.create(f"data-{number}", GIB) for number in range(100)])
        self.assertEqual(len({each.id for each in made}), 100)
        actions = [one["Action"] for one in self.world.requests[begun:]]
        self.assertEqual(actions.count("create disk"), 100)
        self.assertLess(len(actions), 300, {each: actions.count(each) for each in actions})


class LostAnswerTests(GcpVolumesCase, TestCase):
    """A step takes effect, but its answer is lost."""

    async def life(self) -> None:
        """Take a volume through its life."""
        volumes = await self.volumes()
        vm = await self.vm()
        made = await volumes.create("data", GIB)
        self.assertEqual((await volumes.expand(made.id, 2 * GIB)).size, 2 * GIB)
        await volumes.attach(vm, made.id, False)
        self.assertTrue(self.has(vm, made.id))
        await volumes.detach(vm, made.id)
        self.assertFalse(self.has(vm, made.id))
        await volumes.delete(made.id)
        self.assertEqual(await volumes.list(), [])
        await self.until(lambda: not self.disks(), "the disk is gone")

    async def test_lost_answers_change_nothing(self) -> None:
        for kind in (FaultKind.LOST, FaultKind.ACTED):
            faults = [
                self.world.faults.add(kind, f"{action} disk", times=2)
                for action in ("create", "resize", "attach", "detach", "delete")
            ]
            await self.life()
            self.assertTrue(all(fault.happened for fault in faults), faults)
            self.world.faults.clear()

    async def test_refusals_that_pass_are_waited_for(self) -> None:
        for kind in (FaultKind.ERROR, FaultKind.THROTTLE):
            actions = [f"{action} disk" for action in ("create", "resize", "attach", "detach", "delete")]
            faults = [
                self.world.faults.add(kind, action, times=2)
                for action in (*actions, "get disks", "operation")
            ]
            await self.life()
            self.assertEqual([fault.happened for fault in faults], [2] * 7)
            self.world.faults.clear()

    async def test_operations_that_fail_for_now_are_asked_for_again(self) -> None:
        """Whether Google reports too many requests or an internal failure."""
        for code in ("INTERNAL_ERROR", "RESOURCE_OPERATION_RATE_EXCEEDED", "SOMETHING_NEW"):
            failing = self.world.api.operations.failing
            error = (code, "Try again later.")
            failing.update(
                dict.fromkeys(("insert", "resizeDisk", "attachDisk", "detachDisk", "delete"), error)
            )
            await self.life()
            self.assertEqual(failing, {})
            self.assertFalse(self.provider._calls.is_open)

    async def test_a_request_that_google_comes_to_late_does_nothing(self) -> None:
        """A request to attach is sent twice; the first reaches Google after the disk is detached again."""
        volumes, vm = await self.volumes(), await self.vm()
        made = await volumes.create("data", GIB)
        self.world.faults.add(FaultKind.LOST, "attach disk", times=1)
        await volumes.attach(vm, made.id, False)
        await volumes.detach(vm, made.id)
        attached = [one for one in self.world.requests if one["Action"] == "attach disk"]
        self.assertEqual(len(attached), 2)
        self.assertEqual(len({one["requestId"] for one in attached}), 1)
        await volumes.attach(vm, made.id, False)
        again = [one for one in self.world.requests if one["Action"] == "attach disk"][-1]
        self.assertNotEqual(again["requestId"], attached[0]["requestId"])
        await volumes.detach(vm, made.id)


class GrownTests(GcpVolumesCase, TestCase):
    async def test_one_that_has_grown_since_it_was_looked_at_is_as_large_as_was_asked_for(self) -> None:
        """By the request of a daemon that was killed, for instance."""
        volumes = await self.volumes()
        made = await volumes.create("data", GIB)

        def grow(parameters: dict[str, str]) -> bool:
            self.disks()[made.id]["sizeGb"] = "2"
            return False

        self.world.faults.add(FaultKind.ERROR, "resize disk", only=grow)
        self.assertEqual((await volumes.expand(made.id, 2 * GIB)).size, 2 * GIB)


class KilledTests(GcpVolumesCase, TestCase):
    """The daemon is killed right after a request took effect, and the next one goes on from there."""

    operation_seconds = 0.3

    async def killed_at(self, action: str, step: Step) -> None:
        await super().killed_at(action, self.patient(step, "is not ready"))

    async def test_each_step_is_finished_by_the_next_daemon(self) -> None:
        await self.volumes()
        vm = await self.vm()
        await self.killed_at("create disk", lambda volumes: volumes.create("data", GIB))
        [id] = self.disks()
        await self.killed_at("resize disk", lambda volumes: volumes.expand(id, 2 * GIB))
        self.assertEqual(self.disks()[id]["sizeGb"], "2")
        await self.killed_at("attach disk", lambda volumes: volumes.attach(vm, id, False))
        self.assertEqual(len(self.disks()[id]["users"]), 1)
        self.assertTrue(self.has(vm, id))
        await self.killed_at("detach disk", lambda volumes: volumes.detach(vm, id))
        self.assertFalse(self.has(vm, id))
        await self.killed_at("delete disk", lambda volumes: volumes.delete(id))
        await self.until(lambda: not self.disks(), "the disk is gone")
