# SPDX-License-Identifier: Apache-2.0
"""Volumes that a simulated vCenter makes from snapshots, which takes a while."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.vsphere.disk_names import DiskNames
from infranetes.providers.volumes import FromSnapshot, VolumeDisk
from infranetes_common.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from tests.infranetes.providers.cloud.vsphere.test_snapshots import SnapshotsCase
from tests.infranetes.providers.cloud.vsphere.test_volumes import MIB
from tests.support.clouds.first_class_disks import KEEP


class CopyTests(SnapshotsCase, TestCase):
    """Volumes that vCenter makes from snapshots."""

    def disks(self) -> list[str]:
        """Return the names of all disks."""
        return sorted(self.world.disks.snapshots.name(id) for id in self.world.disks.ids())

    async def begun(self, number: int = 1) -> str:
        """Wait until vCenter is making so many disks; return the last one's id."""
        made = self.world.disks.snapshots
        await self.until(lambda: len(made.copying()) == number, "a disk is being made")
        return made.copying()[-1]

    def restoring(self, source: FromSnapshot) -> Deferred[VolumeDisk]:
        """Request the volume `restored` from the current daemon."""
        return self.snapshots().restore("restored", MIB, source)

    async def test_it_is_a_volume_once_it_is_whole(self) -> None:
        volumes, snapshots, volume, source = await self.with_snapshot()
        self.world.disks.snapshots.slow = True
        waiting = snapshots.restore("restored", 2 * MIB, source)
        half = await self.begun()
        self.assertEqual([each.id for each in await volumes.list()], [volume])
        self.world.disks.snapshots.finish(half)
        restored = await waiting
        self.assertEqual((restored.id, restored.size, restored.source), (half, 2 * MIB, source))
        self.assertIn(KEEP, self.world.disks.flags[half])
        self.assertEqual(len(await volumes.list()), 2)
        self.assertEqual(len(self.world.asked("CreateDiskFromSnapshot_Task")), 1)
        self.assertEqual(await snapshots.restore("restored", 2 * MIB, source), restored)

    async def test_one_that_is_being_made_is_no_volume_by_its_id_either(self) -> None:
        volumes, _, _, source = await self.with_snapshot()
        machine = await self.machine(volumes)
        self.world.disks.snapshots.slow = True
        waiting = self.restoring(source)
        half = await self.begun()
        await self.refused(FailedPrecondition, volumes.delete(half))
        attaching = volumes.attach(machine, half, False)
        await self.sleep(0.5)
        self.assertFalse(self.has(machine, half))
        self.world.disks.snapshots.finish(half)
        self.assertEqual((await waiting).id, half)
        await attaching
        self.assertTrue(self.has(machine, half))

    async def test_a_copy_that_takes_longer_than_a_call_is_waited_for_by_the_next(self) -> None:
        self.settings["volume_seconds"] = 3.0
        _, _, _, source = await self.with_snapshot()
        self.world.disks.snapshots.slow = self.world.disks.snapshots.hides_copies = True
        await self.refused(Unavailable, self.restoring(source))
        self.world.disks.snapshots.finish(await self.begun())
        await self.restoring(source)
        self.assertEqual(len(self.world.asked("CreateDiskFromSnapshot_Task")), 1)
        self.assertEqual(len(self.disks()), 2)

    async def test_a_copy_that_is_listed_late_is_not_made_again(self) -> None:
        _, _, _, source = await self.with_snapshot()
        self.world.disks.snapshots.slow = True
        waiting = self.restoring(source)
        half = await self.begun()
        self.world.disks.snapshots.hidden.add(half)
        self.world.disks.snapshots.finish(half)
        asked = len(self.world.asked("ListVStorageObject"))
        await self.until(lambda: len(self.world.asked("ListVStorageObject")) > asked + 3, "it is looked for")
        self.world.disks.snapshots.hidden.clear()
        self.assertEqual((await waiting).id, half)
        self.assertEqual(len(self.world.asked("CreateDiskFromSnapshot_Task")), 1)

    async def gone_while_restoring(self) -> tuple[FromSnapshot, str]:
        """Lose a daemon while vCenter makes a disk. Return the snapshot and the disk."""
        _, _, _, source = await self.with_snapshot()
        self.world.disks.snapshots.slow = True
        waiting = self.restoring(source)
        waiting.addErrback(lambda failure: None)
        half = await self.begun()
        await self.next_snapshotted()
        return source, half

    async def test_the_next_daemon_waits_for_a_copy_that_vcenter_shows(self) -> None:
        source, half = await self.gone_while_restoring()
        waiting = self.restoring(source)
        await self.until(lambda: self.world.asked("RetrieveVStorageObjectState"), "it is looked at")
        self.world.disks.snapshots.finish(half)
        self.assertEqual((await waiting).id, half)
        self.assertEqual(await self.read(half, 5), b"first")
        self.assertEqual(len(self.world.asked("CreateDiskFromSnapshot_Task")), 1)
        self.assertEqual(len(self.disks()), 2)

    async def test_of_two_copies_for_one_volume_the_older_is_the_volume(self) -> None:
        self.world.disks.snapshots.hides_copies = True
        source, half = await self.gone_while_restoring()
        waiting = self.restoring(source)
        second = await self.begun(2)
        self.world.disks.snapshots.ages = {half: 60.0}
        for disk in (half, second):
            self.world.disks.snapshots.finish(disk)
        self.assertEqual((await waiting).id, half)
        await self.until(lambda: len(self.disks()) == 2, "the other one is deleted")

    async def test_a_copy_that_comes_too_late_ends_with_its_volume(self) -> None:
        self.world.disks.snapshots.hides_copies = True
        source, half = await self.gone_while_restoring()
        waiting = self.restoring(source)
        second = await self.begun(2)
        self.world.disks.snapshots.finish(second)
        self.assertEqual((await waiting).id, second)
        self.world.disks.snapshots.finish(half)
        volumes = self.of(self.provider)
        self.assertNotIn(half, [each.id for each in await volumes.list()])
        self.assertEqual((await self.restoring(source)).id, second)
        await volumes.delete(second)
        await self.until(lambda: len(self.disks()) == 1, "all that was to be the volume is gone")

    async def test_what_nobody_has_finished_for_a_day_is_deleted(self) -> None:
        _, snapshots, _, source = await self.with_snapshot()
        names = DiskNames(self.cluster)
        old, new, theirs = (
            self.world.disks.make(name, 1)
            for name in (
                names.copy_of("abandoned", source, whole=False),
                names.copy_of("going", source, whole=False),
                DiskNames("another").copy_of("abandoned", source, whole=False),
            )
        )
        self.world.disks.snapshots.ages = {old: 90_000.0, new: 80_000.0, theirs: 90_000.0}
        await snapshots.restore("restored", MIB, source)
        await self.until(lambda: old not in self.world.disks.ids(), "the old one is deleted")
        self.assertLess({new, theirs}, set(self.world.disks.ids()))

    async def test_a_snapshot_that_is_gone_meanwhile_is_told(self) -> None:
        _, snapshots, _, source = await self.with_snapshot()
        self.world.disks.refused["CreateDiskFromSnapshot_Task"] = "NotFound"
        await self.refused(NotFound, snapshots.restore("restored", MIB, source))

    async def test_a_datastore_that_is_full_is_told_and_the_next_call_tries_again(self) -> None:
        _, snapshots, _, source = await self.with_snapshot()
        self.world.disks.refused["CreateDiskFromSnapshot_Task"] = "NoDiskSpace"
        for _ in range(2):
            await self.refused(ResourceExhausted, snapshots.restore("restored", MIB, source))
        self.world.disks.refused.clear()
        restored = await snapshots.restore("restored", MIB, source)
        self.assertEqual(await self.read(restored.id, 5), b"first")

    async def test_the_datastores_room_is_not_exceeded(self) -> None:
        _, snapshots, _, source = await self.with_snapshot()
        room = self.world.disks.datastore.summary.freeSpace // MIB * MIB
        await self.refused(ResourceExhausted, snapshots.restore("restored", room + MIB, source))
        self.assertEqual(self.world.asked("CreateDiskFromSnapshot_Task"), [])

    async def test_a_copy_that_has_taken_the_room_is_finished(self) -> None:
        """There need not be space for another."""
        source, half = await self.gone_while_restoring()
        self.world.disks.snapshots.finish(half)
        self.world.disks.free = 0
        self.assertEqual((await self.restoring(source)).id, half)
        await self.refused(ResourceExhausted, self.snapshots().restore("other", MIB, source))
