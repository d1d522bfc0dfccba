# SPDX-License-Identifier: Apache-2.0
"""Snapshots on a simulated Compute Engine over HTTP, and volumes made from them."""

from __future__ import annotations

from typing import Any, cast

from twisted.trial.unittest import TestCase

from infranetes.csi.checks import InFlight
from infranetes.csi.controller import Controller
from infranetes.providers.cloud.gcp.driver import Driver
from infranetes.providers.cloud.gcp.names import split_id
from infranetes.providers.volumes import (
    ZONE,
    FromSnapshot,
    FromVolume,
)
from infranetes_common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from infranetes_common.wire import csi
from tests.infranetes.csi.case import capability
from tests.infranetes.csi.test_snapshots import of_volume
from tests.infranetes.providers.cloud.gcp.test_volumes import GIB, GcpVolumesCase
from tests.infranetes.providers.cloud.volumes_case import (
    CloudSnapshotsCase,
    CloudSnapshotsContract,
    of_snapshots,
)
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.gce_resources import ZONES
from txgrpc import Call

CALL = cast(Call, None)  # nothing here looks at it


class GcpSnapshotsCase(GcpVolumesCase, CloudSnapshotsCase[Driver]):
    """Snapshots on Compute Engine."""

    def taken(self) -> dict[str, Any]:
        """Return the snapshots, by name."""
        return self.world.api.snapshots.snapshots

    def leftovers(self) -> list[str]:
        self.taken().clear()  # snapshots outlive VMs, as volumes do
        return super().leftovers()

    async def write(self, volume_id: str, content: bytes) -> None:
        contents, disk = self.world.api.volumes.contents, self.world.api.disks[split_id(volume_id)]
        contents[disk["id"]] = content + contents[disk["id"]][len(content) :]

    async def read(self, volume_id: str, count: int) -> bytes:
        disk = self.world.api.disks[split_id(volume_id)]
        return self.world.api.volumes.contents[disk["id"]].ljust(count, b"\0")[:count]


class GcpSnapshotsTests(GcpSnapshotsCase, CloudSnapshotsContract[Driver], TestCase):
    """The contract of snapshots."""

    size = 2 * GIB


class FaultTests(GcpSnapshotsCase, TestCase):
    """Faults between the daemon and Google."""

    async def test_lost_answers_change_nothing(self) -> None:
        for kind in (FaultKind.LOST, FaultKind.ACTED):
            faults = [
                self.world.faults.add(kind, action, times=2)
                for action in ("create snapshot", "delete snapshot")
            ]
            volumes = await self.volumes()
            made = await volumes.create("data", GIB)
            faults.append(self.world.faults.add(kind, "create disk", times=2))
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

    async def test_one_that_is_being_taken_is_not_taken_for_taken(self) -> None:
        """The call succeeds only once the snapshot's content is fixed."""
        self.world.operation_seconds = 0.3
        made = await (await self.volumes()).create("data", GIB)
        snapshots = self.provider.volumes.snapshots
        taken = await snapshots.create("one", made.id)
        [there] = self.taken().values()
        self.assertEqual((taken.ready, there["status"]), (False, "UPLOADING"))
        with self.assertRaisesRegex(Unavailable, "not ready"):
            await snapshots.restore("restored", GIB, FromSnapshot(taken.id))
        self.assertEqual(len(self.disks()), 1)
        await self.until_ready(snapshots, taken)

    async def test_one_that_fails_is_deleted_again(self) -> None:
        made = await (await self.volumes()).create("data", GIB)
        snapshots = self.provider.volumes.snapshots
        taken = await self.until_ready(snapshots, await snapshots.create("one", made.id))
        self.taken()[taken.id]["status"] = "FAILED"
        with self.assertRaisesRegex(FailedPrecondition, "FAILED"):
            await snapshots.restore("restored", GIB, FromSnapshot(taken.id))
        self.assertEqual(await snapshots.list(), [])
        with self.assertRaisesRegex(Unavailable, "FAILED"):
            await snapshots.create("one", made.id)
        again = await self.until_ready(snapshots, await snapshots.create("one", made.id))
        self.assertEqual(await snapshots.list(), [again])

    async def test_a_persons_snapshot_is_used_and_never_deleted(self) -> None:
        made = await (await self.volumes()).create("data", GIB)
        await self.write(made.id, b"theirs")
        snapshots = self.provider.volumes.snapshots
        taken = await self.until_ready(snapshots, await snapshots.create("one", made.id))
        self.taken()[taken.id]["labels"] = {}
        self.assertEqual(await snapshots.list(), [])
        with self.assertRaisesRegex(FailedPrecondition, "by hand"):
            await snapshots.delete(taken.id)
        restored = await snapshots.restore("restored", GIB, FromSnapshot(taken.id))
        self.assertEqual(await self.read(restored.id, 6), b"theirs")

    async def test_a_clone_has_its_sources_type(self) -> None:
        self.settings["volume_type"] = "pd-ssd"
        made = await (await self.volumes()).create("data", GIB)
        self.settings["volume_type"] = "pd-balanced"
        await self.next_volumes(self.provider.volumes)
        clone = await self.provider.volumes.snapshots.restore("clone", GIB, FromVolume(made.id))
        self.assertTrue(self.disks()[clone.id]["type"].endswith("/pd-ssd"))

    async def test_each_step_is_finished_by_the_next_daemon(self) -> None:
        self.world.operation_seconds = 0.3
        made = await (await self.volumes()).create("data", GIB)
        await self.write(made.id, b"first")
        await self.killed_at(
            "create snapshot", of_snapshots(lambda snapshots: snapshots.create("one", made.id))
        )
        [id] = self.taken()
        snapshots = self.provider.volumes.snapshots
        await self.until_ready(snapshots, await snapshots.get(id))
        source = FromSnapshot(id)
        await self.killed_at(
            "create disk", of_snapshots(lambda snapshots: snapshots.restore("restored", GIB, source))
        )
        [restored] = [each for each in self.disks() if each != made.id]
        self.assertEqual(await self.read(restored, 5), b"first")
        await self.killed_at("delete snapshot", of_snapshots(lambda snapshots: snapshots.delete(id)))
        await self.until(lambda: not self.taken(), "the snapshot is gone")


class ZoneTests(GcpSnapshotsCase, TestCase):
    """CSI's answers about volumes in another zone than the one in which the daemon creates volumes."""

    async def make_far(self) -> None:
        """Create a volume in the second zone, then start a daemon that creates volumes in the first."""
        self.settings["zones"] = list(reversed(ZONES))
        self.far = await (await self.volumes()).create("far", GIB)
        self.settings["zones"] = list(ZONES)
        self.controller = await self.next_controller()

    async def next_controller(self) -> Controller:
        """Return the Controller service of the next daemon."""
        await self.within(self.provider.stop())
        volumes = await self.volumes()
        return Controller(volumes, InFlight(), False, self.provider.volumes.snapshots)

    async def cloned(self, *zones: str) -> csi.Volume:
        """Clone `far` for a pod that is to run in one of these zones."""
        places = [csi.Topology(segments={ZONE: zone}) for zone in zones]
        request = csi.CreateVolumeRequest(
            name="clone",
            capacity_range=csi.CapacityRange(required_bytes=GIB),
            volume_capabilities=[capability()],
            volume_content_source=of_volume(self.far.id),
            accessibility_requirements=csi.TopologyRequirement(requisite=places),
        )
        return (await self.controller.CreateVolume(request, CALL)).volume

    def zones_of(self, volume: csi.Volume) -> list[dict[str, str]]:
        return [dict(each.segments) for each in volume.accessible_topology]

    async def test_a_clone_is_said_to_be_where_its_source_is(self) -> None:
        await self.make_far()
        far = [{ZONE: ZONES[1]}]
        made = await self.cloned(*ZONES)
        self.assertEqual((split_id(made.volume_id)[0], self.zones_of(made)), (ZONES[1], far))
        self.assertEqual(self.zones_of(await self.cloned()), far)
        listed = await self.controller.ListVolumes(csi.ListVolumesRequest(), CALL)
        self.assertEqual([self.zones_of(each.volume) for each in listed.entries], [far, far])
        self.controller = await self.next_controller()
        await self.provider.volumes.delete(self.far.id)
        self.assertEqual(await self.cloned(ZONES[1]), made)  # though nothing records the zone any more

    async def test_a_clone_is_made_only_for_pods_that_can_be_where_its_source_is(self) -> None:
        await self.make_far()
        with self.assertRaisesRegex(ResourceExhausted, ZONES[1]):
            await self.cloned(ZONES[0])
        self.assertEqual(list(self.disks()), [self.far.id])
        self.assertEqual(self.zones_of(await self.cloned(ZONES[1])), [{ZONE: ZONES[1]}])
