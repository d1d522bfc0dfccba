# SPDX-License-Identifier: Apache-2.0
"""Cinder's snapshots on a simulated OpenStack over HTTPS, and volumes made from them and from volumes."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.interface import CLUSTER
from infranetes.providers.cloud.openstack.driver import Driver
from infranetes.providers.cloud.volumes.disk_snapshots import SNAPSHOT
from infranetes.providers.volumes import FromSnapshot, FromVolume
from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from tests.infranetes.providers.cloud.openstack.volumes_case import GIB, OpenStackVolumesCase
from tests.infranetes.providers.cloud.volumes_case import (
    CloudSnapshotsCase,
    CloudSnapshotsContract,
    of_snapshots,
)
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.nova_resources import ZONES


class OpenStackSnapshotsCase(OpenStackVolumesCase, CloudSnapshotsCase[Driver]):
    """Snapshots at Cinder."""

    def taken(self) -> dict[str, Any]:
        """Return the snapshots, by their ids."""
        return self.cinder.snapshots

    async def write(self, volume_id: str, content: bytes) -> None:
        contents = self.cinder.contents
        contents[volume_id] = content + contents[volume_id][len(content) :]

    async def read(self, volume_id: str, count: int) -> bytes:
        return self.cinder.contents[volume_id].ljust(count, b"\0")[:count]


class OpenStackSnapshotsTests(OpenStackSnapshotsCase, CloudSnapshotsContract[Driver], TestCase):
    """The contract of snapshots."""

    size = 2 * GIB


class SlowListsTests(OpenStackSnapshotsCase, CloudSnapshotsContract[Driver], TestCase):
    """The contract of snapshots, at a Cinder that shows new ones only after a while."""

    size = 2 * GIB
    lag_seconds = 0.2


class SnapshotTests(OpenStackSnapshotsCase, TestCase):
    """Requests to Cinder."""

    async def test_a_snapshot_says_whose_it_is_from_the_beginning_even_of_a_volume_that_a_vm_has(
        self,
    ) -> None:
        volumes, vm = await self.volumes(), await self.vm()
        made = await volumes.create("data", GIB)
        await volumes.attach(vm, made.id, False)
        taken = await self.provider.volumes.snapshots.create("snapshot für Ada", made.id)
        self.assertEqual(
            self.taken()[taken.id]["metadata"], {CLUSTER: self.cluster, SNAPSHOT: "snapshot für Ada"}
        )
        clone = await self.provider.volumes.snapshots.restore("clone", GIB, FromVolume(made.id))
        self.assertTrue(self.has(vm, made.id))
        self.assertFalse(self.has(vm, clone.id))
        await volumes.detach(vm, made.id)

    async def test_a_copy_is_of_the_type_and_in_the_zone_of_its_source(self) -> None:
        self.settings |= {"volume_type": "fast", "volume_zone": ZONES[0]}
        made = await (await self.volumes()).create("data", GIB)
        self.settings |= {"volume_type": "__DEFAULT__", "volume_zone": ZONES[1]}
        await self.next_volumes(self.provider.volumes)
        snapshots = self.provider.volumes.snapshots
        taken = await snapshots.create("one", made.id)
        for source in (FromVolume(made.id), FromSnapshot(taken.id)):
            made = await snapshots.restore(f"of {source}", GIB, source)
            copy = self.disks()[made.id]
            self.assertEqual((copy["volume_type"], copy["availability_zone"]), ("fast", ZONES[0]))

    async def test_where_zones_are_apart_no_copy_of_a_snapshot_is_made_in_another_one_unnoticed(self) -> None:
        self.settings |= {"cross_zone_volumes": False, "volume_zone": ZONES[1]}
        made = await (await self.volumes()).create("data", GIB)
        self.settings["volume_zone"] = ZONES[0]
        await self.next_volumes(self.provider.volumes)
        snapshots = self.provider.volumes.snapshots
        taken = await snapshots.create("one", made.id)
        with self.assertRaisesRegex(InvalidArgument, "same availability zone"):
            await snapshots.restore("copy", GIB, FromSnapshot(taken.id))
        clone = await snapshots.restore("clone", GIB, FromVolume(made.id))
        self.assertEqual(clone.zone, ZONES[1])

    async def test_a_volume_with_snapshots_is_not_deleted_and_says_how_many_there_are(self) -> None:
        volumes = await self.volumes()
        made = await volumes.create("data", GIB)
        taken = await self.provider.volumes.snapshots.create("one", made.id)
        with self.assertRaisesRegex(FailedPrecondition, "1 snapshots: delete these first"):
            await volumes.delete(made.id)
        await self.provider.volumes.snapshots.delete(taken.id)
        await volumes.delete(made.id)
        self.assertEqual(self.disks(), {})

    async def test_a_quota_of_snapshots(self) -> None:
        made = await (await self.volumes()).create("data", GIB)
        self.cinder.limits["snapshots"] = 0
        with self.assertRaisesRegex(ResourceExhausted, "number of snapshots"):
            await self.provider.volumes.snapshots.create("one", made.id)

    async def test_a_persons_snapshot_is_used_and_never_deleted(self) -> None:
        made = await (await self.volumes()).create("data", GIB)
        await self.write(made.id, b"theirs")
        snapshots = self.provider.volumes.snapshots
        taken = await snapshots.create("one", made.id)
        self.taken()[taken.id]["metadata"] = {}
        self.assertEqual(await snapshots.list(), [])
        with self.assertRaisesRegex(FailedPrecondition, "by hand"):
            await snapshots.delete(taken.id)
        restored = await snapshots.restore("restored", GIB, FromSnapshot(taken.id))
        self.assertEqual(await self.read(restored.id, 6), b"theirs")


class FailureTests(OpenStackSnapshotsCase, TestCase):
    """What OpenStack begins, and does not finish."""

    async def test_one_that_fails_is_deleted_again(self) -> None:
        made = await (await self.volumes()).create("data", GIB)
        snapshots = self.provider.volumes.snapshots
        self.cinder.failing["take"] = "error", ""
        with self.assertRaisesRegex(Unavailable, "its status is error"):
            await snapshots.create("one", made.id)
        taken = await snapshots.create("one", made.id)
        self.assertEqual(await snapshots.list(), [taken])
        self.assertEqual(list(self.taken()), [taken.id])

    async def test_one_that_its_backend_does_not_delete_says_why(self) -> None:
        """Ceph keeps a snapshot of which volumes were made, and Cinder then shows it as before."""
        made = await (await self.volumes()).create("data", GIB)
        snapshots = self.provider.volumes.snapshots
        taken = await snapshots.create("one", made.id)
        self.settings["volume_seconds"] = 0.5
        await self.next_volumes(self.provider.volumes)
        snapshots = self.provider.volumes.snapshots

        def keep(parameters: dict[str, str]) -> bool:
            self.cinder.failing["delete snapshot"] = "available", ""
            return False

        self.world.faults.add(FaultKind.ERROR, "delete snapshots", only=keep)
        with self.assertRaisesRegex(Unavailable, "perhaps volumes that were made from it"):
            await snapshots.delete(taken.id)
        await self.until(lambda: self.taken()[taken.id]["status"] == "available", "it is kept")
        self.assertEqual(await snapshots.list(), [taken])
        self.world.faults.clear()
        self.cinder.failing.clear()
        await snapshots.delete(taken.id)
        self.assertEqual(self.taken(), {})

    async def test_one_that_cinder_can_not_delete_is_left_to_a_person(self) -> None:
        made = await (await self.volumes()).create("data", GIB)
        snapshots = self.provider.volumes.snapshots
        taken = await snapshots.create("one", made.id)
        self.cinder.failing["delete snapshot"] = "error_deleting", ""
        for _ in range(2):
            with self.assertRaisesRegex(FailedPrecondition, "an operator has to delete it"):
                await snapshots.delete(taken.id)

    async def test_lost_answers_change_nothing(self) -> None:
        for kind in (FaultKind.LOST, FaultKind.ACTED):
            faults = [
                self.world.faults.add(kind, action, times=2)
                for action in ("create snapshots", "delete snapshots")
            ]
            volumes = await self.volumes()
            made = await volumes.create("data", GIB)
            faults.append(self.world.faults.add(kind, "create volumes", times=2))
            snapshots = self.provider.volumes.snapshots
            taken = await snapshots.create("one", made.id)
            restored = await snapshots.restore("restored", GIB, FromSnapshot(taken.id))
            self.assertEqual((len(self.disks()), len(self.taken())), (2, 1))
            await snapshots.delete(taken.id)
            self.assertEqual(self.taken(), {})
            self.assertTrue(all(fault.happened for fault in faults), faults)
            self.world.faults.clear()
            for each in (made, restored):
                await volumes.delete(each.id)
            await self.provider.stop()

    async def test_one_that_was_taken_twice_is_one_and_is_deleted_as_one(self) -> None:
        self.world.lag_seconds = 0.3
        made = await (await self.volumes()).create("data", GIB)
        self.world.faults.add(FaultKind.LOST, "create snapshots", times=1)
        snapshots = self.provider.volumes.snapshots
        taken = await snapshots.create("one", made.id)
        self.assertEqual(len(self.taken()), 2)
        await self.sleep(0.4)
        self.assertEqual(len(await snapshots.list()), 1)
        await snapshots.delete(taken.id)
        self.assertEqual(self.taken(), {})

    async def test_each_step_is_finished_by_the_next_daemon(self) -> None:
        self.world.volume_seconds = 0.3
        made = await (await self.volumes()).create("data", GIB)
        await self.write(made.id, b"first")
        await self.killed_at(
            "create snapshots", of_snapshots(lambda snapshots: snapshots.create("one", made.id))
        )
        [id] = self.taken()
        source = FromSnapshot(id)
        await self.killed_at(
            "create volumes", of_snapshots(lambda snapshots: snapshots.restore("restored", GIB, source))
        )
        [restored] = [each for each in self.disks() if each != made.id]
        self.assertEqual(await self.read(restored, 5), b"first")
        await self.killed_at("delete snapshots", of_snapshots(lambda snapshots: snapshots.delete(id)))
        await self.until(lambda: not self.taken(), "the snapshot is gone")
