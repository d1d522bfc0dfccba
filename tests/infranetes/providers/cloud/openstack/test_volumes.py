# SPDX-License-Identifier: Apache-2.0
"""Cinder's volumes on a simulated OpenStack over HTTPS, which enforces the manual's access rules."""

from __future__ import annotations

from unittest.mock import patch

from twisted.internet.defer import gatherResults
from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.interface import CLUSTER
from infranetes.providers.cloud.openstack.driver import Driver
from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.cloud.volumes.disks import VOLUME
from infranetes.providers.volumes import ZONE, IVolumes
from infranetes_common.concurrency import settled
from infranetes_common.errors import (
    ConfigError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from tests.contract.volumes import VolumesContract
from tests.harness.durations import slow
from tests.infranetes.providers.cloud.openstack.volumes_case import GIB, OpenStackVolumesCase
from tests.infranetes.providers.cloud.volumes_case import CloudAttachedVolumesContract
from tests.support.clouds.cinder_resources import now
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.nova_resources import ZONES, new_id

STEPS = ("create volumes", "extend", "attach", "detach", "delete volumes")


class OpenStackVolumesTests(OpenStackVolumesCase, VolumesContract, TestCase):
    """The contract of volumes."""


class OpenStackAttachedVolumesTests(OpenStackVolumesCase, CloudAttachedVolumesContract[Driver], TestCase):
    """The contract of attached volumes."""

    has_modes = False
    of_attaching = ("attach", "detach")
    unknown_machine = "01234567-0123-0123-0123-0123456789ab"

    def serial(self, volume: str) -> str:
        return volume[:20]


class SlowListsTests(OpenStackVolumesCase, VolumesContract, TestCase):
    """The contract of volumes, at a Cinder that shows a new volume only after a while."""

    lag_seconds = 0.3


class DiskTests(OpenStackVolumesCase, TestCase):
    """Requests to Cinder."""

    async def test_a_volume_says_whose_it_is_from_the_beginning(self) -> None:
        self.settings |= {"volume_type": "fast", "volume_zone": ZONES[1]}
        volumes = await self.volumes()
        made = await volumes.create("pvc-1 für Ada", 10 * GIB)
        [disk] = self.disks().values()
        self.assertEqual(disk["metadata"], {CLUSTER: self.cluster, VOLUME: "pvc-1 für Ada"})
        self.assertIn("'pvc-1 für Ada'", disk["description"])
        self.assertEqual((disk["size"], disk["volume_type"]), (10, "fast"))
        self.assertEqual(disk["availability_zone"], ZONES[1])
        self.assertEqual((made.zone, dict(volumes.topology)), ("", {}))

    async def test_it_outlives_its_vm_which_knows_it_by_the_beginning_of_its_id(self) -> None:
        volumes = await self.volumes()
        made, vm = await volumes.create("data", GIB), await self.vm()
        self.assertEqual(await volumes.attach(vm, made.id, False), made.id[:20])
        await self.within(self.provider.destroy(vm))
        self.assertEqual(await volumes.list(), [made])
        await self.until(lambda: self.disks()[made.id]["status"] == "available", "the volume is free")

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

    async def test_a_persons_volume_is_attached_by_its_id_and_never_deleted(self) -> None:
        theirs = self.cinder.add(20)
        volumes, vm = await self.volumes(), await self.vm()
        self.assertEqual((await volumes.get(theirs)).size, 20 * GIB)
        await volumes.attach(vm, theirs, False)
        self.assertTrue(self.has(vm, theirs))
        await volumes.detach(vm, theirs)
        with self.assertRaisesRegex(FailedPrecondition, "by hand"):
            await volumes.delete(theirs)
        self.assertEqual(await volumes.list(), [])

    async def test_what_can_be_no_volume_is_not_asked_for(self) -> None:
        volumes = await self.volumes()
        begun = len(self.world.requests)
        for id in ("data", "../servers", f"{new_id()}0", new_id().upper()):
            with self.assertRaises(NotFound):
                await volumes.get(id)
            await volumes.delete(id)
        self.assertEqual(self.world.requests[begun:], [])

    async def test_a_quota_that_is_used_up_leaves_nothing(self) -> None:
        volumes = await self.volumes()
        self.cinder.limits["gigabytes"] = 12
        made = await volumes.create("data", 10 * GIB)
        self.assertEqual(await volumes.free(), 2 * GIB)
        for _ in range(2):
            with self.assertRaisesRegex(ResourceExhausted, "gigabytes quota"):
                await volumes.create("more", 10 * GIB)
            with self.assertRaisesRegex(ResourceExhausted, "gigabytes quota"):
                await volumes.expand(made.id, 20 * GIB)
        self.cinder.limits |= {"gigabytes": 1000, "volumes": 1}
        with self.assertRaisesRegex(ResourceExhausted, "number of volumes"):
            await volumes.create("more", GIB)
        self.assertEqual(await volumes.free(), 0)
        self.assertEqual(await volumes.list(), [made])
        self.assertFalse(self.provider._calls.is_open)

    async def test_a_project_without_limits_has_room(self) -> None:
        self.cinder.limits |= {"gigabytes": -1, "volumes": -1}
        volumes = await self.volumes()
        self.assertEqual(await volumes.free(), ((1 << 31) - 1) << 30)

    async def test_a_type_or_a_zone_that_is_not_there_is_told(self) -> None:
        self.settings["volume_type"] = "gone"
        volumes = await self.volumes()
        with self.assertRaisesRegex(InvalidArgument, "Volume type with name gone .*see volume_type"):
            await volumes.create("data", GIB)
        self.settings |= {"volume_type": "", "volume_zone": "gone"}
        volumes = await self.next_volumes(volumes)
        with self.assertRaisesRegex(InvalidArgument, "Availability zone 'gone' is invalid"):
            await volumes.create("data", GIB)

    async def test_a_vm_with_as_many_disks_as_it_can_have(self) -> None:
        """Nova gives a server 26 by default, of which one is its own."""
        volumes, vm = await self.volumes(), await self.vm()
        made = await gatherResults([volumes.create(f"data-{number}", GIB) for number in range(26)])
        outcomes = await settled([volumes.attach(vm, each.id, False) for each in made])
        failures = [each for each in outcomes if not isinstance(each, str)]
        self.assertEqual(len(failures), 1, failures)
        self.assertIsInstance(failures[0].value, ResourceExhausted)
        self.assertIn("(26)", str(failures[0].value))
        looks = self.asked("look at volumes")
        self.assertLess(len(looks), 26 * 26, "look-ups share calls")

    async def test_a_volume_that_several_servers_could_have_is_attached_to_none(self) -> None:
        self.settings["volume_type"] = "shared"
        volumes, vm = await self.volumes(), await self.vm()
        made = await volumes.create("data", GIB)
        with self.assertRaisesRegex(FailedPrecondition, "without multiattach"):
            await volumes.attach(vm, made.id, False)
        self.assertEqual(self.asked("attach"), [])

    async def test_an_openstack_without_cinder_runs_pods_and_says_that_there_are_no_volumes(self) -> None:
        self.world.services.remove("volumev3")
        volumes = await self.volumes()
        await self.vm()
        with self.assertRaisesRegex(FailedPrecondition, "no service volumev3 or block-storage"):
            await volumes.create("data", GIB)

    async def test_many_volumes_are_found_in_pages(self) -> None:
        self.cinder.page = 2
        volumes = await self.volumes()
        made = [await volumes.create(f"data-{number}", GIB) for number in range(5)]
        self.assertEqual({each.id for each in await volumes.list()}, {each.id for each in made})

    async def test_a_token_that_ends_in_the_middle_of_a_volumes_life_is_renewed(self) -> None:
        volumes, vm = await self.volumes(), await self.vm()
        made = await volumes.create("data", GIB)
        self.world.revoke_tokens()
        attaching = volumes.attach(vm, made.id, False)
        await self.until(lambda: self.asked("attach"), "it is asked for")
        self.world.revoke_tokens()
        await attaching
        self.world.faults.add(FaultKind.ERROR, "token", times=2)
        self.world.revoke_tokens()
        await volumes.detach(vm, made.id)
        self.assertFalse(self.has(vm, made.id))


class ZoneTests(OpenStackVolumesCase, TestCase):
    """An OpenStack whose Nova attaches volumes to servers of their own zone only."""

    def setUp(self) -> object:
        result = super().setUp()
        self.cinder.cross_zone = False
        self.settings["cross_zone_volumes"] = False
        return result

    async def test_a_volume_is_said_to_be_in_its_zone_in_which_its_vm_is_launched(self) -> None:
        self.settings["volume_zone"] = ZONES[1]
        volumes = await self.volumes()
        made = await volumes.create("data", GIB)
        self.assertEqual((made.zone, dict(volumes.topology)), (ZONES[1], {ZONE: ZONES[1]}))
        vm = (await self.running(self.provider, self.spec(zone=made.zone))).id
        await volumes.attach(vm, made.id, False)
        self.assertTrue(self.has(vm, made.id))
        await volumes.detach(vm, made.id)

    async def test_volumes_are_made_in_the_first_zone_of_vms_if_no_other_is_configured(self) -> None:
        made = await (await self.volumes()).create("data", GIB)
        self.assertEqual((made.zone, self.disks()[made.id]["availability_zone"]), (ZONES[0], ZONES[0]))

    async def test_one_in_another_zone_than_the_vm_is_refused(self) -> None:
        far = self.cinder.add(zone=ZONES[1])
        volumes, vm = await self.volumes(), await self.vm()
        with self.assertRaisesRegex(FailedPrecondition, "not in the same availability_zone"):
            await volumes.attach(vm, far, False)

    async def test_without_zones_of_vms_the_vm_is_launched_in_the_volumes(self) -> None:
        self.settings |= {"zones": [], "volume_zone": ZONES[1]}
        volumes = await self.volumes()
        made = await volumes.create("data", GIB)
        await self.running(self.provider, self.spec(zone=made.zone))
        self.assertEqual(self.world.bodies[0]["server"]["availability_zone"], ZONES[1])

    async def test_a_configuration_that_leaves_volumes_without_a_zone_is_refused(self) -> None:
        with (
            patch.dict(self.settings, zones=[]),
            self.assertRaisesRegex(ConfigError, "give volume_zone or zones"),
        ):
            self.make_provider()


class FailureTests(OpenStackVolumesCase, TestCase):
    """What OpenStack begins, and does not finish."""

    async def test_a_volume_that_no_backend_makes_is_deleted_again_and_the_reason_told(self) -> None:
        volumes = await self.volumes()
        words = "schedule allocate volume: Could not find any available weighted backend."
        self.cinder.failing["create"] = "error", words
        with self.assertRaisesRegex(ResourceExhausted, "available weighted backend"):
            await volumes.create("data", GIB)
        await self.until(lambda: not self.disks(), "nothing is left")
        made = await volumes.create("data", GIB)
        self.assertEqual(await volumes.list(), [made])

    async def test_one_that_did_not_grow_is_there_and_is_not_used_until_somebody_mends_it(self) -> None:
        volumes, vm = await self.volumes(), await self.vm()
        made = await volumes.create("data", GIB)
        self.cinder.failing["extend"] = "error_extending", ""
        for _ in range(2):
            with self.assertRaisesRegex(FailedPrecondition, "error_extending: an operator"):
                await volumes.expand(made.id, 2 * GIB)
            with self.assertRaisesRegex(FailedPrecondition, "error_extending: an operator"):
                await volumes.attach(vm, made.id, False)
            self.assertEqual(await volumes.create("data", GIB), made)
        self.assertEqual(await volumes.list(), [made])
        self.disks()[made.id]["status"] = "available"
        self.assertEqual((await volumes.expand(made.id, 2 * GIB)).size, 2 * GIB)

    async def test_one_whose_growth_cinder_takes_back_says_why(self) -> None:
        volumes = await self.volumes()
        made = await volumes.create("data", GIB)

        def take_back(parameters: dict[str, str]) -> bool:
            self.cinder.failing["extend"] = "available", "extend volume: Volume's backend has no room"
            return False

        self.world.faults.add(FaultKind.ERROR, "extend", only=take_back)
        with self.assertRaisesRegex(Unavailable, "has no room"):
            await volumes.expand(made.id, 2 * GIB)
        self.assertEqual((await volumes.get(made.id)).size, GIB)

    async def test_a_host_that_fails_to_attach_it_once_is_asked_again(self) -> None:
        volumes, vm = await self.volumes(), await self.vm()
        made = await volumes.create("data", GIB)
        self.cinder.failing["attach"] = "available", ""
        await volumes.attach(vm, made.id, False)
        self.assertTrue(self.has(vm, made.id))
        self.assertEqual(len(self.asked("attach")), 2)
        self.cinder.failing["detach"] = "in-use", ""
        await volumes.detach(vm, made.id)
        self.assertFalse(self.has(vm, made.id))
        self.assertEqual(len(self.asked("detach")), 2)

    async def test_one_that_hangs_on_the_way_is_waited_for_until_a_deadline(self) -> None:
        volumes, vm = await self.hurried(), await self.vm()
        made, other = await volumes.create("data", GIB), await volumes.create("other", GIB)
        self.cinder.later = lambda step: None
        with self.assertRaisesRegex(Unavailable, "try again later"):
            await volumes.attach(vm, made.id, False)
        with self.assertRaisesRegex(Unavailable, "not finished"):
            await volumes.expand(other.id, 2 * GIB)
        with self.assertRaisesRegex(FailedPrecondition, vm):
            await volumes.delete(made.id)
        self.cinder.attachments.clear()

    async def test_while_a_vm_is_being_given_one_it_is_refused_to_others(self) -> None:
        volumes, vm, other = await self.volumes(), await self.vm(), await self.vm()
        made = await volumes.create("data", GIB)
        self.world.volume_seconds = 0.4
        attaching = volumes.attach(vm, made.id, False)
        await self.until(lambda: self.disks()[made.id]["status"] == "reserved", "it is reserved")
        provider = await self.started()
        assert isinstance(provider, CloudProvider)
        with self.assertRaisesRegex(FailedPrecondition, vm):
            await provider.volumes.attach(other, made.id, False)
        await attaching
        await volumes.detach(vm, made.id)

    async def test_one_that_a_vm_is_still_being_given_is_taken_from_it(self) -> None:
        """As when a pod is stopped while it starts, and the daemon was killed in between."""
        volumes, vm = await self.volumes(), await self.vm()
        made = await volumes.create("data", GIB)
        self.world.volume_seconds = 0.8  # for a slow machine to see it meanwhile
        attaching = volumes.attach(vm, made.id, False)
        await self.until(lambda: self.disks()[made.id]["status"] == "reserved", "it is reserved")
        provider = await self.started()
        assert isinstance(provider, CloudProvider)
        await provider.volumes.detach(vm, made.id)
        self.assertEqual(self.cinder.attachments, {})
        attaching.addErrback(lambda failure: None)
        attaching.cancel()
        await self.within(self.provider.stop())

    async def test_one_that_cinder_can_not_delete_is_left_to_a_person(self) -> None:
        volumes = await self.volumes()
        made = await volumes.create("data", GIB)
        self.cinder.failing["delete"] = "error_deleting", ""
        for _ in range(2):
            with self.assertRaisesRegex(FailedPrecondition, "an operator has to delete it"):
                await volumes.delete(made.id)
        self.assertEqual(await volumes.list(), [])

    async def test_one_that_is_busy_when_it_is_to_be_deleted_is_deleted_by_another_request(self) -> None:
        volumes = await self.volumes()
        made = await volumes.create("data", GIB)
        self.cinder.failing["delete"] = "available", ""
        await volumes.delete(made.id)
        self.assertEqual((self.disks(), len(self.asked("delete volumes"))), ({}, 2))

    async def test_one_that_is_backed_up_meanwhile_is_waited_for(self) -> None:
        volumes, vm = await self.volumes(), await self.vm()
        made = await volumes.create("data", GIB)
        self.disks()[made.id]["status"] = "backing-up"
        attaching = volumes.attach(vm, made.id, False)
        await self.until_asked(3, "look at volumes")
        self.assertEqual(self.asked("attach"), [])
        self.disks()[made.id]["status"] = "available"
        await attaching
        await volumes.detach(vm, made.id)

    async def hurried(self) -> IVolumes:
        """Return the volumes of a daemon with a short deadline, for what can't succeed."""
        self.settings["volume_seconds"] = 0.5
        return await self.volumes()


class LostAnswerTests(OpenStackVolumesCase, TestCase):
    """A step takes effect, but its answer is lost."""

    async def life(self) -> None:
        """Take a volume through its life."""
        volumes = await self.volumes()
        vm = await self.vm()
        made = await volumes.create("data", GIB)
        self.assertEqual(list(self.disks()), [made.id])
        self.assertEqual((await volumes.expand(made.id, 2 * GIB)).size, 2 * GIB)
        await volumes.attach(vm, made.id, False)
        self.assertTrue(self.has(vm, made.id))
        await volumes.detach(vm, made.id)
        self.assertFalse(self.has(vm, made.id))
        await volumes.delete(made.id)
        self.assertEqual(await volumes.list(), [])
        self.assertEqual(self.disks(), {})
        await self.within(self.provider.stop())

    async def test_lost_answers_change_nothing(self) -> None:
        for kind in (FaultKind.LOST, FaultKind.ACTED):
            faults = [self.world.faults.add(kind, action, times=2) for action in STEPS]
            await self.life()
            self.assertTrue(all(fault.happened for fault in faults), faults)
            self.world.faults.clear()

    @slow(5, "each of a volume's two lives meets fourteen refusals, and statuses that last")
    async def test_refusals_that_pass_are_waited_for(self) -> None:
        self.world.volume_seconds = 0.2  # so that attachments are looked at
        for kind in (FaultKind.ERROR, FaultKind.THROTTLE):
            actions = (*STEPS, "look at volumes", "look at attachments")
            faults = [self.world.faults.add(kind, action, times=2) for action in actions]
            await self.life()
            self.assertEqual([fault.happened for fault in faults], [2] * len(actions))
            self.world.faults.clear()

    async def test_old_lists_change_nothing(self) -> None:
        stale = self.world.faults.add(FaultKind.STALE, "look at volumes", share=0.3)
        await self.life()
        self.assertGreater(stale.happened, 0)

    async def test_a_volume_that_was_made_twice_is_one_and_is_deleted_as_one(self) -> None:
        """Cinder neither knows tokens nor shows the first one by the time at which it is asked again."""
        self.world.lag_seconds = 0.3
        self.world.faults.add(FaultKind.LOST, "create volumes", times=1)
        volumes = await self.volumes()
        await volumes.create("data", GIB)
        self.assertEqual(len(self.disks()), 2)
        await self.sleep(0.4)
        volumes = await self.next_volumes(volumes)
        made = await volumes.create("data", GIB)
        self.assertEqual(made.id, next(iter(self.disks())))
        self.assertEqual(await volumes.list(), [made])
        await volumes.delete(made.id)
        self.assertEqual(self.disks(), {})

    async def test_a_name_that_is_used_again_later_is_asked_for_once(self) -> None:
        """Though the first volume of the name was not seen for a while either."""
        self.world.lag_seconds = 0.3
        volumes = await self.volumes()
        for name in ("one", "two"):
            await volumes.delete((await volumes.create(name, GIB)).id)
        await self.sleep(1.2)  # longer than Cinder may be slow
        for name in ("one", "two"):
            await volumes.create(name, GIB)
        self.assertEqual((len(self.asked("create volumes")), len(self.disks())), (4, 2))

    async def test_two_daemons_that_make_one_at_once_make_the_same(self) -> None:
        volumes = await self.volumes()
        other = await self.started()
        assert isinstance(other, CloudProvider)
        both = [each.create("data", GIB) for each in (volumes, other.volumes)]
        made = [await each for each in both]
        self.assertEqual(made[0], made[1])
        self.assertEqual(await volumes.list(), [made[0]])

    async def test_of_two_of_one_name_the_older_is_taken(self) -> None:
        """Whoever looked before the other was made has taken it."""
        volumes = await self.volumes()
        made = await volumes.create("data", GIB)
        twin = "0" * 8 + made.id[8:]
        self.cinder.volumes[twin] = self.cinder.volumes[made.id] | {"id": twin, "created_at": now()}
        volumes = await self.next_volumes(volumes)
        self.assertEqual(await volumes.create("data", GIB), made)
        self.assertEqual(await volumes.list(), [made])

    async def test_the_twin_of_a_volume_that_a_vm_has_is_left_alone(self) -> None:
        self.world.lag_seconds = 0.3
        self.world.faults.add(FaultKind.LOST, "create volumes", times=1)
        volumes, vm = await self.volumes(), await self.vm()
        made = await volumes.create("data", GIB)
        [twin] = self.disks().keys() - {made.id}
        await self.sleep(0.4)
        await volumes.attach(vm, twin, False)
        await volumes.delete(made.id)
        self.assertEqual(list(self.disks()), [twin])
        await volumes.detach(vm, twin)


@slow(6, "a volume goes through each step of its life twice, and each takes 0.3 s")
class KilledTests(OpenStackVolumesCase, TestCase):
    """The daemon is killed right after a request took effect, and the next one goes on from there."""

    volume_seconds = 0.3

    async def test_each_step_is_finished_by_the_next_daemon(self) -> None:
        await self.volumes()
        vm = await self.vm()
        await self.killed_at("create volumes", lambda volumes: volumes.create("data", GIB))
        [id] = self.disks()
        await self.killed_at("extend", lambda volumes: volumes.expand(id, 2 * GIB))
        self.assertEqual(self.disks()[id]["size"], 2)
        await self.killed_at("attach", lambda volumes: volumes.attach(vm, id, False))
        self.assertEqual(self.cinder.holders(id), [vm])
        self.assertEqual(len(self.cinder.attachments), 1)
        await self.killed_at("detach", lambda volumes: volumes.detach(vm, id))
        self.assertEqual(self.cinder.attachments, {})
        await self.killed_at("delete volumes", lambda volumes: volumes.delete(id))
        await self.until(lambda: not self.disks(), "the volume is gone")
