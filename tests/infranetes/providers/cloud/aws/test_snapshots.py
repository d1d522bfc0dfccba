# SPDX-License-Identifier: Apache-2.0
"""EBS snapshots on a simulated EC2, which enforces the manual's IAM policy, and volumes from snapshots."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.aws.driver import Driver
from infranetes.providers.cloud.interface import CLUSTER
from infranetes.providers.cloud.volumes.disk_snapshots import SNAPSHOT
from infranetes.providers.volumes import FromSnapshot
from infranetes_common.errors import FailedPrecondition, Unavailable
from tests.infranetes.providers.cloud.aws.test_volumes import GIB, AwsVolumesCase
from tests.infranetes.providers.cloud.volumes_case import (
    CloudSnapshotsCase,
    CloudSnapshotsContract,
    of_snapshots,
)
from tests.support.clouds.faults import FaultKind


class AwsSnapshotsCase(AwsVolumesCase, CloudSnapshotsCase[Driver]):
    """Snapshots on EC2."""

    def taken(self) -> dict[str, Any]:
        """Return the cluster's snapshots, as EC2 describes them, by their ids."""
        ours = [{"Name": f"tag:{CLUSTER}", "Values": [self.cluster]}]
        found = self.world.ec2.describe_snapshots(Filters=ours)["Snapshots"]
        return {one["SnapshotId"]: one for one in found}

    def leftovers(self) -> list[str]:
        for id in self.taken():  # snapshots outlive VMs, as volumes do
            self.world.ec2.delete_snapshot(SnapshotId=id)
        return super().leftovers()

    async def write(self, volume_id: str, content: bytes) -> None:
        contents = self.world.snapshots.contents
        contents[volume_id] = content + contents.get(volume_id, b"")[len(content) :]

    async def read(self, volume_id: str, count: int) -> bytes:
        return self.world.snapshots.contents.get(volume_id, b"").ljust(count, b"\0")[:count]


class AwsSnapshotsTests(AwsSnapshotsCase, CloudSnapshotsContract[Driver], TestCase):
    """The contract of snapshots."""

    size = 2 * GIB

    def setUp(self) -> object:
        result = super().setUp()
        self.world.volumes.six_hours = False
        return result


class RequestTests(AwsSnapshotsCase, TestCase):
    """Requests to EC2, and their effects."""

    async def test_a_snapshot_says_whose_it_is_from_the_beginning(self) -> None:
        snapshots = await self.snapshots()
        made = await self.provider.volumes.create("data", GIB)
        taken = await snapshots.create("one für Ada", made.id)
        [there] = self.taken().values()
        tags = {tag["Key"]: tag["Value"] for tag in there["Tags"]}
        self.assertEqual(tags, {CLUSTER: self.cluster, SNAPSHOT: "one für Ada"})
        self.assertEqual(self.asked("CreateTags"), [])
        self.assertEqual(await snapshots.create("one für Ada", made.id), await snapshots.get(taken.id))
        self.assertEqual(len(self.asked("CreateSnapshot")), 1)

    async def test_one_that_is_pending_is_taken_and_not_ready(self) -> None:
        self.world.snapshots.seconds = 5.0
        snapshots = await self.snapshots()
        made = await self.provider.volumes.create("data", GIB)
        taken = await snapshots.create("one", made.id)
        self.assertFalse(taken.ready)
        with self.assertRaisesRegex(Unavailable, "not ready"):
            await snapshots.restore("restored", GIB, FromSnapshot(taken.id))
        self.assertEqual(len(self.disks()), 1)

    async def test_one_that_failed_is_deleted_and_taken_again(self) -> None:
        snapshots = await self.snapshots()
        made = await self.provider.volumes.create("data", GIB)
        taken = await self.until_ready(snapshots, await snapshots.create("one", made.id))
        self.world.snapshots.states[taken.id] = "error"
        self.assertEqual(await snapshots.list(), [])
        with self.assertRaisesRegex(Unavailable, "error"):
            await snapshots.create("one", made.id)
        again = await snapshots.create("one", made.id)
        self.assertEqual(list(self.taken()), [again.id])

    async def test_twins_are_one_snapshot_and_end_with_it(self) -> None:
        """EC2 may create a second one if a request is repeated before the first is listed."""
        snapshots = await self.snapshots()
        made = await self.provider.volumes.create("data", GIB)
        taken = await self.until_ready(snapshots, await snapshots.create("one", made.id))
        tags = [{"Key": key, "Value": value} for key, value in ((CLUSTER, self.cluster), (SNAPSHOT, "one"))]
        self.world.ec2.create_snapshot(
            VolumeId=made.id, TagSpecifications=[{"ResourceType": "snapshot", "Tags": tags}]
        )
        self.assertEqual(len(self.taken()), 2)
        self.assertEqual(len(await snapshots.list()), 1)
        self.assertEqual(await snapshots.create("one", made.id), (await snapshots.list())[0])
        await snapshots.delete((await snapshots.list())[0].id)
        self.assertEqual(self.taken(), {})
        self.assertEqual((await snapshots.list(), taken.volume), ([], made.id))

    async def test_others_snapshots_are_used_once_they_are_tagged_and_never_deleted(self) -> None:
        snapshots = await self.snapshots()
        made = await self.provider.volumes.create("data", GIB)
        theirs = self.world.ec2.create_snapshot(VolumeId=made.id)["SnapshotId"]
        self.world.snapshots.contents[theirs] = b"theirs"
        with self.assertRaisesRegex(FailedPrecondition, "CreateVolume is not allowed for snapshot"):
            await snapshots.restore("restored", GIB, FromSnapshot(theirs))
        self.world.ec2.create_tags(Resources=[theirs], Tags=[{"Key": CLUSTER, "Value": self.cluster}])
        restored = await snapshots.restore("restored", GIB, FromSnapshot(theirs))
        self.assertEqual(await self.read(restored.id, 6), b"theirs")
        self.assertEqual(await snapshots.list(), [])
        with self.assertRaisesRegex(FailedPrecondition, "by hand"):
            await snapshots.delete(theirs)


class FaultTests(AwsSnapshotsCase, TestCase):
    """Faults between the daemon and EC2."""

    async def test_lost_answers_change_nothing(self) -> None:
        for kind in (FaultKind.LOST, FaultKind.ACTED):
            snapshots = await self.snapshots()
            made = await self.provider.volumes.create("data", GIB)
            actions = ("CreateSnapshot", "CreateVolume", "DeleteSnapshot")
            faults = [self.world.faults.add(kind, action, times=2) for action in actions]
            taken = await self.until_ready(snapshots, await snapshots.create("one", made.id))
            self.assertEqual(list(self.taken()), [taken.id])
            restored = await snapshots.restore("restored", GIB, FromSnapshot(taken.id))
            self.assertEqual(sorted(self.disks()), sorted((made.id, restored.id)))
            await snapshots.delete(taken.id)
            self.assertEqual(self.taken(), {})
            self.assertTrue(all(fault.happened for fault in faults), faults)
            self.world.faults.clear()
            for each in (made, restored):
                await self.provider.volumes.delete(each.id)
            await self.within(self.provider.stop())

    async def test_each_step_is_finished_by_the_next_daemon(self) -> None:
        self.world.snapshots.seconds = 0.3
        await self.snapshots()
        made = await self.provider.volumes.create("data", GIB)
        await self.write(made.id, b"first")
        await self.killed_at(
            "CreateSnapshot", of_snapshots(lambda snapshots: snapshots.create("one", made.id))
        )
        [id] = self.taken()
        snapshots = await self.snapshots()
        await self.until_ready(snapshots, await snapshots.get(id))
        source = FromSnapshot(id)
        await self.killed_at(
            "CreateVolume", of_snapshots(lambda snapshots: snapshots.restore("restored", GIB, source))
        )
        [restored] = [each for each in self.disks() if each != made.id]
        self.assertEqual(await self.read(restored, 5), b"first")
        await self.killed_at("DeleteSnapshot", of_snapshots(lambda snapshots: snapshots.delete(id)))
        self.assertEqual(self.taken(), {})
