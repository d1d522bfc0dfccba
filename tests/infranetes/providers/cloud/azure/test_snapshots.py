# SPDX-License-Identifier: Apache-2.0
"""Snapshots on a simulated Azure over HTTP, and volumes made from them and from volumes."""

from __future__ import annotations

import re

from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.azure.driver import Driver
from infranetes.providers.cloud.interface import CLUSTER
from infranetes.providers.cloud.volumes.disk_snapshots import SNAPSHOT
from infranetes.providers.volumes import FromSnapshot, FromVolume
from infranetes_common.errors import FailedPrecondition, Unavailable
from tests.infranetes.providers.cloud.azure.volumes_case import GIB, AzureVolumesCase
from tests.infranetes.providers.cloud.volumes_case import (
    CloudSnapshotsCase,
    CloudSnapshotsContract,
    of_snapshots,
)
from tests.support.clouds import azure_permissions
from tests.support.clouds.azure_resources import LOCATION, ZONES
from tests.support.clouds.faults import FaultKind


class AzureSnapshotsCase(AzureVolumesCase, CloudSnapshotsCase[Driver]):
    """Snapshots on Azure."""

    async def write(self, volume_id: str, content: bytes) -> None:
        contents, id = self.azure.contents, self.disks()[volume_id]["id"]
        contents[id] = content + contents[id][len(content) :]

    async def read(self, volume_id: str, count: int) -> bytes:
        return self.azure.contents[self.disks()[volume_id]["id"]].ljust(count, b"\0")[:count]


class AzureSnapshotsTests(AzureSnapshotsCase, CloudSnapshotsContract[Driver], TestCase):
    """The contract of snapshots."""

    size = 2 * GIB


class SnapshotTests(AzureSnapshotsCase, TestCase):
    """Requests to Azure."""

    async def test_a_snapshot_says_whose_it_is_from_the_beginning_even_of_a_volume_that_a_vm_has(
        self,
    ) -> None:
        volumes, vm = await self.volumes(), await self.vm()
        made = await volumes.create("data", GIB)
        await volumes.attach(vm, made.id, False)
        taken = await self.provider.volumes.snapshots.create("snapshot für Ada", made.id)
        snapshot = self.taken()[taken.id]
        self.assertEqual(snapshot["tags"], {CLUSTER: self.cluster, SNAPSHOT: "snapshot für Ada"})
        self.assertEqual((snapshot["location"], snapshot["properties"]["incremental"]), (LOCATION, True))
        clone = await self.provider.volumes.snapshots.restore("clone", GIB, FromVolume(made.id))
        self.assertTrue(self.has(vm, made.id))
        self.assertFalse(self.has(vm, clone.id))
        await volumes.detach(vm, made.id)

    async def test_the_roles_permit_nothing_of_disks_and_snapshots_that_is_not_needed(self) -> None:
        volumes, vm = await self.volumes(), await self.vm()
        snapshots = self.provider.volumes.snapshots
        made = await volumes.create("data", GIB)
        await volumes.attach(vm, made.id, False)
        taken = await self.until_ready(snapshots, await snapshots.create("one", made.id))
        await snapshots.restore("restored", GIB, FromSnapshot(taken.id))
        await snapshots.delete(taken.id)
        await volumes.detach(vm, made.id)
        await volumes.delete(made.id)
        roles = azure_permissions.granted("group") | azure_permissions.granted("subscription")
        granted = {each for each in roles if re.search("disk|snapshot", each, re.IGNORECASE)}
        self.assertEqual(granted - self.world.needed, set())
        self.assertEqual(len(granted), 10)

    async def test_a_clone_is_of_the_type_and_in_the_zone_of_its_source_and_a_restored_volume_as_any(
        self,
    ) -> None:
        self.settings |= {"volume_type": "Premium_LRS", "zones": ["2", "1"]}
        made = await (await self.volumes()).create("data", GIB)
        self.settings |= {"volume_type": "StandardSSD_LRS", "zones": ["1", "2"]}
        await self.next_volumes(self.provider.volumes)
        snapshots = self.provider.volumes.snapshots
        taken = await self.until_ready(snapshots, await snapshots.create("one", made.id))
        for source, kind, zone in (
            (FromVolume(made.id), "Premium_LRS", ZONES[1]),
            (FromSnapshot(taken.id), "StandardSSD_LRS", ZONES[0]),
        ):
            copy = await snapshots.restore(f"of {source}", GIB, source)
            self.assertEqual((self.disks()[copy.id]["sku"]["name"], copy.zone), (kind, zone))

    async def test_one_whose_content_is_still_copied_is_taken_and_not_ready(self) -> None:
        """As Azure does with those of its newest types of disks."""
        made = await (await self.volumes()).create("data", GIB)
        snapshots = self.provider.volumes.snapshots
        taken = await self.until_ready(snapshots, await snapshots.create("one", made.id))
        properties = self.taken()[taken.id]["properties"]
        for percent in (0.0, 99.5):
            properties["completionPercent"] = percent
            self.assertFalse((await snapshots.create("one", made.id)).ready)
            self.assertEqual([one.ready for one in await snapshots.list()], [False])
            with self.assertRaisesRegex(Unavailable, "not ready"):
                await snapshots.restore("restored", GIB, FromSnapshot(taken.id))
        properties["completionPercent"] = 100.0
        self.assertTrue((await snapshots.get(taken.id)).ready)

    async def test_one_that_is_being_taken_is_not_taken_for_taken(self) -> None:
        """What is written meanwhile may be in it."""
        self.world.operation_seconds = 0.3
        made = await (await self.volumes()).create("data", GIB)
        await self.write(made.id, b"first")
        snapshots = self.provider.volumes.snapshots
        waiting = snapshots.create("one", made.id)
        await self.until(lambda: bool(self.taken()), "it is being taken")
        self.assertEqual(await snapshots.list(), [])
        await self.write(made.id, b"while")
        taken = await waiting
        await self.write(made.id, b"later")
        restored = await snapshots.restore("restored", GIB, FromSnapshot(taken.id))
        self.assertEqual(await self.read(restored.id, 5), b"while")

    async def test_one_that_fails_is_deleted_again(self) -> None:
        made = await (await self.volumes()).create("data", GIB)
        snapshots = self.provider.volumes.snapshots
        taken = await self.until_ready(snapshots, await snapshots.create("one", made.id))
        self.taken()[taken.id]["properties"]["provisioningState"] = "Failed"
        with self.assertRaisesRegex(FailedPrecondition, "Failed"):
            await snapshots.restore("restored", GIB, FromSnapshot(taken.id))
        self.assertEqual(await snapshots.list(), [])
        with self.assertRaisesRegex(Unavailable, "Failed"):
            await snapshots.create("one", made.id)
        again = await self.until_ready(snapshots, await snapshots.create("one", made.id))
        self.assertEqual(await snapshots.list(), [again])

    async def test_one_that_azure_can_not_take_is_deleted_and_taken_by_the_next_call(self) -> None:
        made = await (await self.volumes()).create("data", GIB)
        self.azure.failing["create snapshots"] = ("InternalServerError", "Try again later.")
        snapshots = self.provider.volumes.snapshots
        with self.assertRaisesRegex(Unavailable, "try again"):
            await snapshots.create("one", made.id)
        await self.until(lambda: not self.taken(), "it is deleted")
        taken = await snapshots.create("one", made.id)
        self.assertEqual(await snapshots.list(), [taken])

    async def test_a_persons_snapshot_is_used_and_never_deleted(self) -> None:
        made = await (await self.volumes()).create("data", GIB)
        await self.write(made.id, b"theirs")
        snapshots = self.provider.volumes.snapshots
        taken = await self.until_ready(snapshots, await snapshots.create("one", made.id))
        self.taken()[taken.id]["tags"] = {}
        self.assertEqual(await snapshots.list(), [])
        with self.assertRaisesRegex(FailedPrecondition, "by hand"):
            await snapshots.delete(taken.id)
        restored = await snapshots.restore("restored", GIB, FromSnapshot(taken.id))
        self.assertEqual(await self.read(restored.id, 6), b"theirs")

    async def test_lost_answers_change_nothing(self) -> None:
        for kind in (FaultKind.LOST, FaultKind.ACTED):
            actions = ("create snapshots", "delete snapshots")
            faults = [self.world.faults.add(kind, action, times=2) for action in actions]
            volumes = await self.volumes()
            made = await volumes.create("data", GIB)
            faults.append(self.world.faults.add(kind, "create disks", times=2))
            snapshots = self.provider.volumes.snapshots
            taken = await self.until_ready(snapshots, await snapshots.create("one", made.id))
            restored = await snapshots.restore("restored", GIB, FromSnapshot(taken.id))
            self.assertEqual(len(self.disks()), 2)
            await snapshots.delete(taken.id)
            await self.until(lambda: not self.taken(), "the snapshot is gone")
            self.assertTrue(all(fault.happened for fault in faults), faults)
            self.world.faults.clear()
            for each in (made, restored):
                await volumes.delete(each.id)
            await self.until(lambda: not self.disks(), "the disks are gone")
            await self.provider.stop()

    async def test_each_step_is_finished_by_the_next_daemon(self) -> None:
        self.world.operation_seconds = 0.3
        made = await (await self.volumes()).create("data", GIB)
        await self.write(made.id, b"first")
        await self.killed_at(
            "create snapshots", of_snapshots(lambda snapshots: snapshots.create("one", made.id))
        )
        [id] = self.taken()
        source = FromSnapshot(id)
        await self.killed_at(
            "create disks", of_snapshots(lambda snapshots: snapshots.restore("restored", GIB, source))
        )
        [restored] = [each for each in self.disks() if each != made.id]
        self.assertEqual(await self.read(restored, 5), b"first")
        await self.killed_at("delete snapshots", of_snapshots(lambda snapshots: snapshots.delete(id)))
        await self.until(lambda: not self.taken(), "the snapshot is gone")
