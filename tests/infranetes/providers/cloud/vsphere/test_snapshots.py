# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a simulated vCenter's first class disks, and volumes made from them."""

from __future__ import annotations

from functools import partial

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.vsphere.disk_names import DiskNames
from infranetes.providers.volumes import FromSnapshot, IHasSnapshots, ISnapshots, VolumeDisk
from infranetes_common.errors import (
    AlreadyExists,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
)
from tests.contract.snapshots import SnapshotsContract
from tests.harness.durations import slow
from tests.infranetes.providers.cloud.volumes_case import of_snapshots
from tests.infranetes.providers.cloud.vsphere.test_volumes import MIB, VolumesCase
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.first_class_disks import KEEP


def _restore(snapshots: ISnapshots, name: str, source: FromSnapshot) -> Deferred[VolumeDisk]:
    return snapshots.restore(name, 2 * MIB, source)


class SnapshotsCase(VolumesCase):
    """A provider whose snapshots are also inspected in the vCenter."""

    async def snapshotted(self) -> IHasSnapshots:
        return IHasSnapshots(await self.volumes())

    async def next_snapshotted(self) -> IHasSnapshots:
        """Return the volumes of the next daemon."""
        return IHasSnapshots(await self.next_volumes(self.provider.volumes))

    def snapshots(self) -> ISnapshots:
        """Return the snapshots of the current daemon."""
        return IHasSnapshots(self.of(self.provider)).snapshots

    async def write(self, volume_id: str, content: bytes) -> None:
        contents = self.world.disks.snapshots.contents
        contents[volume_id] = content + contents.get(volume_id, b"")[len(content) :]

    async def read(self, volume_id: str, count: int) -> bytes:
        return self.world.disks.snapshots.contents.get(volume_id, b"").ljust(count, b"\0")[:count]

    async def with_snapshot(self) -> tuple[IHasSnapshots, ISnapshots, str, FromSnapshot]:
        """Return volumes, their snapshots, a volume that begins with `first`, and a snapshot of it."""
        volumes = await self.snapshotted()
        volume = (await volumes.create("data", MIB)).id
        await self.write(volume, b"first")
        taken = await volumes.snapshots.create("one", volume)
        return volumes, volumes.snapshots, volume, FromSnapshot(taken.id)


class SnapshotsTests(SnapshotsCase, SnapshotsContract, TestCase):
    """The contract of snapshots."""

    grow_with_snapshots = False

    async def made(self) -> IHasSnapshots:
        return await self.snapshotted()

    async def next_daemon(self, volumes: IHasSnapshots) -> IHasSnapshots:
        return await self.next_snapshotted()


class LimitTests(SnapshotsCase, TestCase):
    """Limits of a vCenter's snapshots."""

    async def test_a_volume_with_snapshots_says_why_it_stays_as_it_is(self) -> None:
        volumes, snapshots, volume, source = await self.with_snapshot()
        for refused in (volumes.delete(volume), volumes.expand(volume, 2 * MIB)):
            words = await self.refused(FailedPrecondition, refused)
            self.assertIn("delete them first", str(words))
        self.assertEqual(self.world.asked("ExtendDisk_Task"), [])
        self.assertEqual(self.world.asked("DeleteVStorageObject_Task"), [])
        await snapshots.delete(source.id)
        self.assertEqual((await volumes.expand(volume, 2 * MIB)).size, 2 * MIB)
        await volumes.delete(volume)

    async def test_a_volume_has_no_more_than_it_may_have(self) -> None:
        self.settings["snapshots_per_volume"] = 2
        _, snapshots, volume, source = await self.with_snapshot()
        other = await snapshots.create("two", volume)
        for _ in range(2):
            words = await self.refused(ResourceExhausted, snapshots.create("three", volume))
            self.assertIn("snapshots_per_volume", str(words))
        self.assertEqual(len(self.world.disks.snapshots.of(volume)), 2)
        self.assertEqual(await snapshots.create("two", volume), other)
        await snapshots.delete(source.id)
        await snapshots.create("three", volume)

    async def test_a_volume_that_a_vm_has_is_taken_as_it_is(self) -> None:
        volumes = await self.snapshotted()
        machine = await self.machine(volumes)
        volume = (await volumes.create("data", MIB)).id
        await volumes.attach(machine, volume, False)
        taken = await volumes.snapshots.create("one", volume)
        self.assertTrue(self.has(machine, volume))
        await volumes.detach(machine, volume)
        await volumes.attach(machine, volume, False)
        await volumes.detach(machine, volume)
        self.assertEqual([each.id for each in await volumes.snapshots.list()], [taken.id])

    async def test_a_persons_snapshot_is_used_and_never_deleted(self) -> None:
        volumes, snapshots, volume, source = await self.with_snapshot()
        theirs = self.world.disks.snapshots.take(volume, "before the upgrade")
        self.assertEqual([each.id for each in await snapshots.list()], [source.id])
        with self.assertRaisesRegex(FailedPrecondition, "by hand"):
            await snapshots.delete(theirs)
        restored = await snapshots.restore("restored", MIB, FromSnapshot(theirs))
        self.assertEqual(await self.read(restored.id, 5), b"first")
        await snapshots.delete(source.id)
        await self.refused(FailedPrecondition, volumes.delete(volume))

    async def test_clusters_do_not_list_each_others(self) -> None:
        _, _, volume, source = await self.with_snapshot()
        other = await self.started(cluster=f"{self.cluster}-other")
        snapshots = IHasSnapshots(self.of(other)).snapshots
        self.assertEqual(await snapshots.list(), [])
        with self.assertRaisesRegex(FailedPrecondition, "by hand"):
            await snapshots.delete(source.id)
        self.assertNotEqual((await snapshots.create("one", volume)).id, source.id)

    async def test_twins_are_one_snapshot_and_end_with_it(self) -> None:
        """A request that is repeated before the first snapshot is listed makes a second one."""
        _, snapshots, volume, source = await self.with_snapshot()
        self.world.disks.snapshots.take(volume, DiskNames(self.cluster).of("one"))
        self.assertEqual(len(self.world.disks.snapshots.of(volume)), 2)
        self.assertEqual([each.id for each in await snapshots.list()], [source.id])
        self.assertEqual((await snapshots.create("one", volume)).id, source.id)
        await snapshots.delete(source.id)
        self.assertEqual(self.world.disks.snapshots.of(volume), [])

    async def test_one_that_this_daemon_took_costs_no_look_at_other_volumes(self) -> None:
        volumes, snapshots, volume, _ = await self.with_snapshot()
        for number in range(5):
            await volumes.create(f"other-{number}", MIB)
        asked = len(self.world.asked("RetrieveSnapshotInfo"))
        await snapshots.create("one", volume)
        self.assertEqual(len(self.world.asked("RetrieveSnapshotInfo")) - asked, 1)

    async def test_names_are_looked_for_in_all_volumes_once_a_minute(self) -> None:
        """vCenter only lists snapshots volume by volume."""
        volumes = await self.snapshotted()
        made = [(await volumes.create(f"data-{number}", MIB)).id for number in range(6)]
        asked: list[int] = []
        for volume in made[:3]:
            before = len(self.world.asked("RetrieveSnapshotInfo"))
            await volumes.snapshots.create(f"of-{volume}", volume)
            asked.append(len(self.world.asked("RetrieveSnapshotInfo")) - before)
        self.assertGreaterEqual(asked[0], 6)
        self.assertLess(max(asked[1:]), 6)
        self.assertEqual(len(await volumes.snapshots.list()), 3)
        await self.refused(AlreadyExists, volumes.snapshots.create(f"of-{made[0]}", made[5]))

    async def test_one_that_another_node_took_meanwhile_is_found(self) -> None:
        volumes, snapshots, volume, _ = await self.with_snapshot()
        other = (await volumes.create("other", MIB)).id
        await snapshots.create("of-other", other)  # by then all volumes have been searched
        elsewhere = IHasSnapshots(self.of(await self.started(node="node-2"))).snapshots
        await snapshots.delete((await snapshots.create("one", volume)).id)
        third = (await volumes.create("third", MIB)).id
        await snapshots.list()
        taken = await elsewhere.create("by-another", third)
        self.assertEqual((await snapshots.create("by-another", third)).id, taken.id)
        self.assertEqual(len(self.world.disks.snapshots.of(third)), 1)


class TaskTests(SnapshotsCase, TestCase):
    """Faults that vCenter reports only while or after a task runs."""

    async def test_tasks_that_take_long_are_waited_for(self) -> None:
        _, snapshots, volume, source = await self.with_snapshot()
        tasks = ("VStorageObjectCreateSnapshot_Task", "DeleteSnapshot_Task")
        self.world.disks.looks = dict.fromkeys(tasks, 3)
        taken = await snapshots.create("two", volume)
        await snapshots.delete(source.id)
        self.assertEqual(self.world.disks.snapshots.of(volume), [taken.id])
        self.assertEqual([len(self.world.asked(task)) for task in tasks], [2, 1])

    async def test_one_that_cannot_be_taken_now_says_why_and_can_be_later(self) -> None:
        """For example, while the VM that has the volume is being moved to another host."""
        for fault, error in (("InvalidState", Unavailable), ("NoDiskSpace", ResourceExhausted)):
            volumes = await self.snapshotted()
            volume = (await volumes.create("data", MIB)).id
            self.world.disks.refused["VStorageObjectCreateSnapshot_Task"] = fault
            words = await self.refused(error, volumes.snapshots.create(f"{fault} first", volume))
            self.assertIn(fault, str(words))
            self.assertEqual(self.world.disks.snapshots.of(volume), [])
            self.world.disks.refused.clear()
            taken = await volumes.snapshots.create(f"{fault} first", volume)
            self.assertEqual(self.world.disks.snapshots.of(volume), [taken.id])
            await volumes.snapshots.delete(taken.id)
            await volumes.delete(volume)

    async def test_one_that_cannot_be_deleted_now_stays_and_says_why(self) -> None:
        """For example, while a volume is made from it."""
        _, _, volume, source = await self.with_snapshot()
        self.world.disks.refused["DeleteSnapshot_Task"] = "InvalidState"
        hurried = IHasSnapshots(await self.hurried_volumes()).snapshots
        words = await self.refused(Unavailable, hurried.delete(source.id))
        self.assertIn("InvalidState", str(words))
        self.assertEqual([each.id for each in await hurried.list()], [source.id])
        self.world.disks.refused.clear()
        await (await self.next_snapshotted()).snapshots.delete(source.id)
        self.assertEqual(self.world.disks.snapshots.of(volume), [])


class FaultTests(SnapshotsCase, TestCase):
    """Faults between the daemon and vCenter."""

    ACTIONS = (
        "VStorageObjectCreateSnapshot_Task",
        "CreateDiskFromSnapshot_Task",
        "ExtendDisk_Task",
        "SetVStorageObjectControlFlags",
        "RenameVStorageObject",
        "DeleteSnapshot_Task",
    )

    async def life(self, kind: FaultKind) -> None:
        volumes = await self.snapshotted()
        made = await volumes.create("data", MIB)
        await self.write(made.id, b"first")
        faults = [self.world.faults.add(kind, action, times=1) for action in self.ACTIONS]
        taken = await volumes.snapshots.create("one", made.id)
        self.assertEqual(self.world.disks.snapshots.of(made.id), [taken.id])
        restored = await volumes.snapshots.restore("restored", 2 * MIB, FromSnapshot(taken.id))
        self.assertEqual(await self.read(restored.id, 5), b"first")
        self.assertEqual(self.world.disks.ids(), [made.id, restored.id])
        self.assertEqual(await volumes.list(), sorted([made, restored], key=lambda each: each.id))
        await volumes.snapshots.delete(taken.id)
        self.assertEqual(self.world.disks.snapshots.of(made.id), [])
        self.assertEqual([fault.happened for fault in faults], [1] * len(faults))
        for each in (made, restored):
            await volumes.delete(each.id)
        await self.until(lambda: not self.world.disks.ids(), "the disks are gone")

    async def test_the_connection_breaks(self) -> None:
        await self.life(FaultKind.LOST)

    async def test_the_answer_is_an_error(self) -> None:
        await self.life(FaultKind.ACTED)

    async def test_nothing_was_done(self) -> None:
        await self.life(FaultKind.ERROR)

    async def test_a_volume_that_has_its_name_is_not_made_again(self) -> None:
        """Even though the answer was lost, however often it was requested."""
        _, snapshots, _, source = await self.with_snapshot()
        lost = self.world.faults.add(FaultKind.ACTED, "RenameVStorageObject", times=2)
        restored = await snapshots.restore("restored", MIB, source)
        self.assertEqual(lost.happened, 2)
        self.assertEqual(self.world.disks.ids()[1:], [restored.id])

    @slow(7, "a daemon is killed at each of six steps, and another goes on")
    async def test_each_step_is_finished_by_the_next_daemon(self) -> None:
        volumes = await self.snapshotted()
        made = await volumes.create("data", MIB)
        await self.write(made.id, b"first")
        take = of_snapshots(lambda snapshots: snapshots.create("one", made.id))
        await self.killed_at(self.ACTIONS[0], take)
        taken = self.world.disks.snapshots.of(made.id)
        self.assertEqual(len(taken), 1)
        source = FromSnapshot(taken[0])
        for number, action in enumerate(self.ACTIONS[1:5]):
            restore = partial(_restore, name=f"restored-{number}", source=source)
            await self.killed_at(action, of_snapshots(restore))
            self.assertEqual(len(self.world.disks.ids()), number + 2, action)
            restored = self.world.disks.ids()[-1]
            self.assertEqual(await self.read(restored, 5), b"first")
            self.assertIn(KEEP, self.world.disks.flags[restored])
        drop = of_snapshots(lambda snapshots: snapshots.delete(source.id))
        await self.killed_at(self.ACTIONS[5], drop)
        self.assertEqual(self.world.disks.snapshots.of(made.id), [])
