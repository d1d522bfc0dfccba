# SPDX-License-Identifier: Apache-2.0
"""CSI creates, lists and deletes snapshots, and makes volumes from snapshots and from other volumes."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import patch

from twisted.internet.defer import Deferred

from infranetes.csi.snapshots import offered, source_of
from infranetes.providers.volumes import IHasSnapshots, ISnapshots
from infranetes_common.concurrency import start
from infranetes_common.errors import InvalidArgument, Unavailable
from infranetes_common.wire import csi
from tests.infranetes.csi.case import MIB, CsiCase
from txgrpc import Code

_RPC = csi.ControllerServiceCapability.RPC
_SOURCE = csi.VolumeContentSource


def of_snapshot(snapshot_id: str) -> csi.VolumeContentSource:
    return _SOURCE(snapshot=_SOURCE.SnapshotSource(snapshot_id=snapshot_id))


def of_volume(volume_id: str) -> csi.VolumeContentSource:
    return _SOURCE(volume=_SOURCE.VolumeSource(volume_id=volume_id))


def at_least(size: int) -> csi.CapacityRange:
    return csi.CapacityRange(required_bytes=size)


class SnapshotCase(CsiCase):
    """A volume `data` of 4 MiB that begins with `content`."""

    @property
    def snapshots(self) -> ISnapshots:
        return IHasSnapshots(self.volumes).snapshots

    async def setUp(self) -> None:
        await super().setUp()
        await self.create(capacity_range=at_least(4 * MIB))
        with self.file("data").open("r+b") as file:
            file.write(b"content")

    def file(self, volume_id: str) -> Path:
        return self.root / "volumes" / f"{volume_id}.raw"

    async def take(self, name: str = "one", volume: str = "data", **parameters: str) -> csi.Snapshot:
        request = csi.CreateSnapshotRequest(name=name, source_volume_id=volume, parameters=parameters)
        response: csi.CreateSnapshotResponse = await self.controller.CreateSnapshot(request, timeout=60)
        return response.snapshot

    async def drop(self, snapshot_id: str) -> None:
        await self.controller.DeleteSnapshot(csi.DeleteSnapshotRequest(snapshot_id=snapshot_id), timeout=60)

    async def listed(self, **asked: object) -> list[str]:
        request = csi.ListSnapshotsRequest(**asked)  # type: ignore[arg-type]
        response: csi.ListSnapshotsResponse = await self.controller.ListSnapshots(request, timeout=60)
        return [each.snapshot.snapshot_id for each in response.entries]


class SnapshotTests(SnapshotCase):
    async def test_one_is_taken_once_and_told_about(self) -> None:
        before = time.time()
        taken = await self.take()
        self.assertEqual((taken.snapshot_id, taken.source_volume_id), ("one", "data"))
        self.assertEqual((taken.size_bytes, taken.ready_to_use), (4 * MIB, True))
        created = taken.creation_time.seconds + taken.creation_time.nanos / 1e9
        self.assertTrue(before - 0.001 <= created <= time.time(), created)
        self.assertEqual(await self.take(), taken)
        found = await self.controller.GetSnapshot(csi.GetSnapshotRequest(snapshot_id="one"), timeout=60)
        self.assertEqual(found.snapshot, taken)

    async def test_what_cannot_be_taken_is_refused_by_name(self) -> None:
        await self.take()
        await self.create("other", capacity_range=at_least(MIB))
        await self.refused(Code.ALREADY_EXISTS, self.take("one", "other"), "data")
        await self.refused(Code.NOT_FOUND, self.take("two", "none"), "none")
        await self.refused(Code.NOT_FOUND, self.take("two", "../data"), "source_volume_id")
        await self.refused(Code.INVALID_ARGUMENT, self.take(""), "name")
        await self.refused(Code.INVALID_ARGUMENT, self.take("two", ""), "source_volume_id")
        await self.refused(Code.INVALID_ARGUMENT, self.take("two", tier="gold"), "VolumeSnapshotClass")
        await self.take("two", **{"csi.storage.k8s.io/volumesnapshot/name": "two"})

    async def test_it_is_gone_as_often_as_asked(self) -> None:
        await self.take()
        for _ in range(2):
            await self.drop("one")
            self.assertEqual(await self.listed(), [])
        for unknown in ("none", "../data", "a b"):
            await self.drop(unknown)
            call = self.controller.GetSnapshot(csi.GetSnapshotRequest(snapshot_id=unknown), timeout=60)
            await self.refused(Code.NOT_FOUND, call)
        await self.refused(Code.INVALID_ARGUMENT, self.drop(""))

    async def test_they_are_listed_in_pages_by_volume_and_by_id(self) -> None:
        await self.create("other", capacity_range=at_least(MIB))
        for name in ("c", "a", "b"):
            await self.take(name)
        await self.take("d", "other")
        request = csi.ListSnapshotsRequest(max_entries=3)
        first = await self.controller.ListSnapshots(request, timeout=60)
        self.assertEqual([each.snapshot.snapshot_id for each in first.entries], ["a", "b", "c"])
        await self.drop("c")
        self.assertEqual(await self.listed(starting_token=first.next_token), ["d"])
        self.assertEqual(await self.listed(source_volume_id="other"), ["d"])
        self.assertEqual(await self.listed(snapshot_id="a"), ["a"])
        self.assertEqual(await self.listed(snapshot_id="a", source_volume_id="other"), [])
        for nobodys in ("none", "../data"):
            self.assertEqual(await self.listed(snapshot_id=nobodys), [])
            self.assertEqual(await self.listed(source_volume_id=nobodys), [])
        await self.refused(Code.ABORTED, self.listed(starting_token="7"))

    async def test_of_two_calls_at_once_one_is_refused(self) -> None:
        waiting: Deferred[None] = Deferred()
        with patch.object(self.snapshots, "create", lambda name, volume: waiting):
            first = start(self.take())
            await self.identity.Probe(csi.ProbeRequest(), timeout=60)  # the first has arrived
            await self.refused(Code.ABORTED, self.take())
            waiting.errback(Unavailable("the volume was detached meanwhile: try again"))
            await self.refused(Code.UNAVAILABLE, first, "try again")


class SourceTests(SnapshotCase):
    def begins_with(self, volume_id: str) -> bytes:
        with open(self.file(volume_id), "rb") as file:
            return file.read(8)

    async def test_a_volume_begins_with_what_a_snapshot_holds(self) -> None:
        await self.take()
        with open(self.file("data"), "r+b") as file:
            file.write(b"another")
        for _ in range(2):
            made = await self.create(
                "restored", volume_content_source=of_snapshot("one"), capacity_range=at_least(6 * MIB)
            )
            self.assertEqual(made.content_source, of_snapshot("one"))
            self.assertEqual(made.capacity_bytes, 6 * MIB)
        self.assertEqual(self.begins_with("restored"), b"content\0")
        listed = await self.controller.ControllerGetVolume(
            csi.ControllerGetVolumeRequest(volume_id="restored"), timeout=60
        )
        self.assertEqual(listed.volume, made)

    async def test_a_volume_begins_with_what_another_holds(self) -> None:
        made = await self.create("clone", volume_content_source=of_volume("data"))
        self.assertEqual((made.content_source, made.capacity_bytes), (of_volume("data"), 4 * MIB))
        self.assertEqual(self.begins_with("clone"), b"content\0")

    async def test_a_name_is_that_of_one_source(self) -> None:
        await self.take()
        await self.create("restored", volume_content_source=of_snapshot("one"))
        await self.take("two")
        for source in (of_volume("data"), of_snapshot("two")):
            again = self.create("restored", volume_content_source=source)
            await self.refused(Code.ALREADY_EXISTS, again)
        await self.refused(Code.ALREADY_EXISTS, self.create("restored", capacity_range=at_least(4 * MIB)))
        await self.refused(Code.ALREADY_EXISTS, self.create(volume_content_source=of_snapshot("one")))

    async def test_sources_that_are_not_there_and_sizes_that_cannot_be(self) -> None:
        await self.take()
        for source in (of_snapshot("none"), of_volume("none"), of_snapshot("../one"), of_volume("a b")):
            sized = self.create("new", volume_content_source=source, capacity_range=at_least(4 * MIB))
            await self.refused(Code.NOT_FOUND, sized)
            await self.refused(Code.NOT_FOUND, self.create("new", volume_content_source=source))
        for source in (of_snapshot("one"), of_volume("data")):
            small = self.create("new", volume_content_source=source, capacity_range=at_least(MIB))
            await self.refused(Code.OUT_OF_RANGE, small)
            limited = csi.CapacityRange(limit_bytes=MIB)
            tight = self.create("new", volume_content_source=source, capacity_range=limited)
            await self.refused(Code.INVALID_ARGUMENT, tight, "capacity_range")
        for empty in (of_snapshot(""), of_volume("")):
            await self.refused(Code.INVALID_ARGUMENT, self.create("new", volume_content_source=empty))


class CapabilityTests(SnapshotCase):
    def capabilities(self, found: csi.ControllerGetCapabilitiesResponse) -> set[int]:
        return {each.rpc.type for each in found.capabilities}

    async def test_snapshots_and_clones_are_offered_where_the_provider_has_them(self) -> None:
        request = csi.ControllerGetCapabilitiesRequest()
        found = self.capabilities(await self.controller.ControllerGetCapabilities(request, timeout=60))
        snapshots = {_RPC.CREATE_DELETE_SNAPSHOT, _RPC.LIST_SNAPSHOTS, _RPC.GET_SNAPSHOT}
        self.assertLessEqual(snapshots | {_RPC.CLONE_VOLUME}, found)
        self.patch(type(self.snapshots), "clones", False)
        found = self.capabilities(await self.controller.ControllerGetCapabilities(request, timeout=60))
        self.assertLessEqual(snapshots, found)
        self.assertNotIn(_RPC.CLONE_VOLUME, found)
        cloning = self.create("clone", volume_content_source=of_volume("data"))
        await self.refused(Code.INVALID_ARGUMENT, cloning, "no copies of volumes")

    def test_a_provider_without_snapshots_offers_none(self) -> None:
        self.assertEqual(offered(None), ())
        request = csi.CreateVolumeRequest(volume_content_source=of_snapshot("one"))
        with self.assertRaisesRegex(InvalidArgument, "no copies of snapshots"):
            source_of(request, None)
