# SPDX-License-Identifier: Apache-2.0
"""CSI's controller service creates, finds, expands and deletes volumes."""

from __future__ import annotations

import os

from infranetes.providers.qemu.volumes.volumes import QemuVolumes
from infranetes_common.concurrency import start
from infranetes_common.wire import csi
from tests.infranetes.csi.case import MIB, NODE, CsiCase, Pods, capability, raw
from txgrpc import Code

_MODE = csi.VolumeCapability.AccessMode
_RPC = csi.ControllerServiceCapability.RPC
HERE = {"infranetes.io/node": NODE}


def sizes(required: int = 0, limit: int = 0) -> csi.CapacityRange:
    return csi.CapacityRange(required_bytes=required, limit_bytes=limit)


def places(*nodes: str) -> csi.TopologyRequirement:
    return csi.TopologyRequirement(
        requisite=[csi.Topology(segments={"infranetes.io/node": each}) for each in nodes]
    )


class CreateTests(CsiCase):
    async def test_a_volume_is_a_sparse_file_of_root_alone_on_this_node(self) -> None:
        volume = await self.create(capacity_range=sizes(5 * MIB))
        self.assertEqual((volume.volume_id, volume.capacity_bytes), ("data", 5 * MIB))
        self.assertEqual([dict(each.segments) for each in volume.accessible_topology], [HERE])
        found = os.stat(self.root / "volumes" / "data.raw")
        self.assertEqual((found.st_size, found.st_mode & 0o777), (5 * MIB, 0o600))

    async def test_twice_is_once_and_another_size_is_another_volume(self) -> None:
        first = await self.create(capacity_range=sizes(5 * MIB))
        self.assertEqual(await self.create(capacity_range=sizes(4 * MIB, 6 * MIB)), first)
        self.assertEqual(await self.create(), first)
        await self.refused(Code.ALREADY_EXISTS, self.create(capacity_range=sizes(6 * MIB)))
        await self.refused(Code.ALREADY_EXISTS, self.create(capacity_range=sizes(limit=4 * MIB)))

    async def test_sizes_are_whole_units_within_what_is_asked(self) -> None:
        cases = [(0, 0, 1 << 30), (1, 0, MIB), (MIB + 1, 3 * MIB, 2 * MIB), (0, 7 * MIB + 5, 7 * MIB)]
        for index, (least, most, has) in enumerate(cases):
            volume = await self.create(f"size-{index}", capacity_range=sizes(least, most))
            self.assertEqual(volume.capacity_bytes, has)
        for wrong in (sizes(1, MIB - 1), sizes(limit=1), sizes(1 << 62)):
            await self.refused(Code.OUT_OF_RANGE, self.create("wrong", capacity_range=wrong))
        for wrong in (sizes(-1), sizes(0, -1), sizes(2 * MIB, MIB)):
            await self.refused(Code.INVALID_ARGUMENT, self.create("wrong", capacity_range=wrong))

    async def test_more_than_the_disk_has_is_refused(self) -> None:
        free = await self.volumes.free()
        await self.refused(Code.RESOURCE_EXHAUSTED, self.create(capacity_range=sizes(free + (1 << 40))))
        self.assertEqual(os.listdir(self.root / "volumes"), [])

    async def test_names_lead_nowhere(self) -> None:
        for name in ("../../etc/passwd", "/etc/passwd", "a/b", ".", "..", "name-", "x" * 128, "grün"):
            volume = await self.create(name, capacity_range=sizes(MIB))
            self.assertRegex(volume.volume_id, "name-[0-9a-f]{40}|[a-z.-]")
            self.assertEqual((await self.create(name, capacity_range=sizes(MIB))), volume)
        files = os.listdir(self.root / "volumes")
        self.assertEqual(len(files), 8)
        self.assertEqual({each for each in files if not each.startswith("name-")}, set())
        for name in ("", "x" * 129, "a\n", "a\0"):
            await self.refused(Code.INVALID_ARGUMENT, self.create(name))

    async def test_no_name_is_a_flexvolumes(self) -> None:
        await self.refused(Code.INVALID_ARGUMENT, self.create("flex.default.data"))

    async def test_it_can_be_raw(self) -> None:
        request = csi.CreateVolumeRequest(name="data", volume_capabilities=[raw(), capability()])
        self.assertEqual((await self.controller.CreateVolume(request, timeout=60)).volume.volume_id, "data")

    async def test_what_no_volume_can_be_is_refused_by_name(self) -> None:
        async def refused(words: str, **fields: object) -> None:
            request = csi.CreateVolumeRequest(name="wrong", **fields)  # type: ignore[arg-type]
            await self.refused(
                Code.INVALID_ARGUMENT, self.controller.CreateVolume(request, timeout=60), words
            )

        several = [_MODE.MULTI_NODE_MULTI_WRITER, _MODE.MULTI_NODE_READER_ONLY, _MODE.UNKNOWN, 99]
        for mode in several:
            await refused("access_mode", volume_capabilities=[capability(), capability(mode)])
        await refused("volume_capabilities")
        neither = capability()
        neither.ClearField("mount")
        await refused("access_type", volume_capabilities=[neither])
        await refused("access_mode", volume_capabilities=[raw(_MODE.MULTI_NODE_MULTI_WRITER)])
        await refused("vfat", volume_capabilities=[capability(fs_type="vfat")])
        await refused("nobarrier", volume_capabilities=[capability(mount_flags=["nobarrier"])])
        fine = [capability()]
        await refused("tier", volume_capabilities=fine, parameters={"tier": "gold"})
        await refused("mutable_parameters", volume_capabilities=fine, mutable_parameters={"a": "b"})
        source = csi.VolumeContentSource()
        await refused("volume_content_source", volume_capabilities=fine, volume_content_source=source)

    async def test_what_the_sidecars_add_is_no_parameter(self) -> None:
        await self.create(parameters={"csi.storage.k8s.io/pvc/name": "data"}, capacity_range=sizes(MIB))

    async def test_only_where_this_node_is_among_the_places(self) -> None:
        await self.create("here", accessibility_requirements=places("node-2", NODE))
        await self.refused(
            Code.RESOURCE_EXHAUSTED, self.create("there", accessibility_requirements=places("node-2")), NODE
        )

    async def test_of_two_calls_at_once_one_is_refused(self) -> None:
        assert isinstance(self.volumes, QemuVolumes)
        await self.volumes._lock.acquire()  # as if the disk were slow
        first = start(self.create())
        await self.identity.Probe(csi.ProbeRequest(), timeout=60)  # the first has arrived
        await self.refused(Code.ABORTED, self.create())
        self.volumes._lock.release()
        self.assertEqual((await first).volume_id, "data")


class DeleteTests(CsiCase):
    async def delete(self, volume_id: str) -> None:
        await self.controller.DeleteVolume(csi.DeleteVolumeRequest(volume_id=volume_id), timeout=60)

    async def test_it_is_gone_as_often_as_asked(self) -> None:
        await self.create(capacity_range=sizes(MIB))
        await self.delete("data")
        await self.delete("data")
        self.assertEqual(os.listdir(self.root / "volumes"), [])

    async def test_ids_that_nothing_has_are_no_error_and_lead_nowhere(self) -> None:
        (self.root / "outside.raw").touch()
        for volume_id in ("../outside", "..", "a/../../outside", "none", "NONE", "vol/zone/1"):
            await self.delete(volume_id)
        self.assertTrue((self.root / "outside.raw").exists())
        for volume_id in ("", "x" * 129, "a\n"):
            await self.refused(Code.INVALID_ARGUMENT, self.delete(volume_id))


class ListTests(CsiCase):
    async def test_pages_in_order_whatever_goes_and_comes_between(self) -> None:
        for name in ("c", "a", "e", "b", "d"):
            await self.create(name, capacity_range=sizes(MIB))
        found, token = [], ""
        while True:
            request = csi.ListVolumesRequest(max_entries=2, starting_token=token)
            page = await self.controller.ListVolumes(request, timeout=60)
            found += [each.volume.volume_id for each in page.entries]
            token = page.next_token
            if not token:
                break
            await self.controller.DeleteVolume(csi.DeleteVolumeRequest(volume_id=found[-1]), timeout=60)
        self.assertEqual(found, ["a", "b", "c", "d", "e"])

    async def test_tokens_that_are_not_ours(self) -> None:
        for token in ("invalid", "after:", "after:../x", "7"):
            call = self.controller.ListVolumes(csi.ListVolumesRequest(starting_token=token), timeout=60)
            await self.refused(Code.ABORTED, call)
        await self.refused(
            Code.INVALID_ARGUMENT,
            self.controller.ListVolumes(csi.ListVolumesRequest(max_entries=-1), timeout=60),
        )

    async def test_one_by_its_id(self) -> None:
        volume = await self.create(capacity_range=sizes(MIB))
        found = await self.controller.ControllerGetVolume(
            csi.ControllerGetVolumeRequest(volume_id="data"), timeout=60
        )
        self.assertEqual(found.volume, volume)
        for volume_id in ("none", "../data", "a b"):
            call = self.controller.ControllerGetVolume(
                csi.ControllerGetVolumeRequest(volume_id=volume_id), timeout=60
            )
            await self.refused(Code.NOT_FOUND, call)

    async def test_what_is_free_is_told_for_this_node_and_what_can_be(self) -> None:
        async def capacity(**fields: object) -> int:
            request = csi.GetCapacityRequest(**fields)  # type: ignore[arg-type]
            response: csi.GetCapacityResponse = await self.controller.GetCapacity(request, timeout=60)
            return response.available_capacity

        self.assertGreater(await capacity(), 0)
        self.assertGreater(await capacity(accessible_topology=csi.Topology(segments=HERE)), 0)
        there = csi.Topology(segments={"infranetes.io/node": "node-2"})
        self.assertEqual(await capacity(accessible_topology=there), 0)
        shared = [capability(_MODE.MULTI_NODE_MULTI_WRITER)]
        self.assertEqual(await capacity(volume_capabilities=shared), 0)


class ValidateTests(CsiCase):
    async def validate(
        self, *wanted: csi.VolumeCapability, volume_id: str = "data"
    ) -> csi.ValidateVolumeCapabilitiesResponse:
        request = csi.ValidateVolumeCapabilitiesRequest(volume_id=volume_id, volume_capabilities=wanted)
        found: csi.ValidateVolumeCapabilitiesResponse
        found = await self.controller.ValidateVolumeCapabilities(request, timeout=60)
        return found

    async def test_what_can_be_is_confirmed_and_what_cannot_is_explained(self) -> None:
        await self.create(capacity_range=sizes(MIB))
        fine = [capability(mode) for mode in (_MODE.SINGLE_NODE_SINGLE_WRITER, _MODE.SINGLE_NODE_READER_ONLY)]
        self.assertEqual(list((await self.validate(*fine)).confirmed.volume_capabilities), fine)
        other = await self.validate(capability(_MODE.MULTI_NODE_MULTI_WRITER))
        self.assertFalse(other.HasField("confirmed"))
        self.assertIn("MULTI_NODE_MULTI_WRITER", other.message)
        await self.refused(Code.INVALID_ARGUMENT, self.validate())
        await self.refused(Code.NOT_FOUND, self.validate(capability(), volume_id="none"))


class ExpandTests(CsiCase):
    def setUp(self) -> object:  # type: ignore[override]
        self.pods = Pods()
        return super().setUp()

    async def expand(self, least: int, most: int = 0, volume_id: str = "data") -> int:
        request = csi.ControllerExpandVolumeRequest(volume_id=volume_id, capacity_range=sizes(least, most))
        response: csi.ControllerExpandVolumeResponse
        response = await self.controller.ControllerExpandVolume(request, timeout=60)
        self.assertTrue(response.node_expansion_required)
        return response.capacity_bytes

    async def test_it_becomes_larger_never_smaller_and_keeps_what_it_holds(self) -> None:
        await self.create(capacity_range=sizes(2 * MIB))
        file = self.root / "volumes" / "data.raw"
        with open(file, "r+b") as opened:
            opened.write(b"content")
        self.assertEqual(await self.expand(3 * MIB + 1), 4 * MIB)
        self.assertEqual(await self.expand(3 * MIB), 4 * MIB)
        self.assertEqual(file.stat().st_size, 4 * MIB)
        self.assertEqual(file.read_bytes()[:7], b"content")
        await self.refused(Code.OUT_OF_RANGE, self.expand(MIB, 2 * MIB))
        await self.refused(Code.OUT_OF_RANGE, self.expand(1 << 62))
        await self.refused(Code.NOT_FOUND, self.expand(MIB, volume_id="none"))
        request = csi.ControllerExpandVolumeRequest(volume_id="data")
        await self.refused(Code.INVALID_ARGUMENT, self.controller.ControllerExpandVolume(request, timeout=60))


class CapabilityTests(CsiCase):
    async def test_what_nobody_does_in_the_vms_is_not_offered(self) -> None:
        found = await self.controller.ControllerGetCapabilities(
            csi.ControllerGetCapabilitiesRequest(), timeout=60
        )
        offered = {each.rpc.type for each in found.capabilities}
        self.assertIn(_RPC.CREATE_DELETE_VOLUME, offered)
        self.assertNotIn(_RPC.EXPAND_VOLUME, offered)
        request = csi.ControllerExpandVolumeRequest(volume_id="data", capacity_range=sizes(MIB))
        await self.refused(Code.UNIMPLEMENTED, self.controller.ControllerExpandVolume(request, timeout=60))
