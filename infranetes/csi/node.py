# SPDX-License-Identifier: Apache-2.0
"""CSI's Node service: publishes volumes to pods, and tells how full they are.

Nothing is attached here, for kubelet has volumes published before the pod's VM is asked for.
"""

from __future__ import annotations

from infranetes.csi import checks
from infranetes.csi.interface import IPodVolumes
from infranetes.csi.publisher import Publisher
from infranetes.providers.volumes import is_volume_id
from infranetes.volumes.published import PublishedVolume
from infranetes_common.errors import InvalidArgument, NotFound, Unimplemented
from infranetes_common.wire import csi
from infranetes_common.wire.csi_rpcs import NodeRpcs
from txgrpc import Call

_RPC = csi.NodeServiceCapability.RPC
_ALWAYS = (_RPC.VOLUME_MOUNT_GROUP, _RPC.SINGLE_NODE_MULTI_WRITER)
_OF_PODS = (_RPC.GET_VOLUME_STATS, _RPC.EXPAND_VOLUME)


class Node(NodeRpcs):
    """CSI's Node service: one method per RPC.

    :param name: the node's. :param pods: answers about volumes in VMs; None: nothing does."""

    def __init__(self, name: str, publisher: Publisher, pods: IPodVolumes | None = None) -> None:
        self._name = name
        self._publisher = publisher
        self._pods = pods

    async def NodeGetCapabilities(
        self, request: csi.NodeGetCapabilitiesRequest, call: Call
    ) -> csi.NodeGetCapabilitiesResponse:
        offered = (*_ALWAYS, *_OF_PODS) if self._pods is not None else _ALWAYS
        found = [csi.NodeServiceCapability(rpc=_RPC(type=each)) for each in offered]
        return csi.NodeGetCapabilitiesResponse(capabilities=found)

    async def NodeGetInfo(self, request: csi.NodeGetInfoRequest, call: Call) -> csi.NodeGetInfoResponse:
        response = csi.NodeGetInfoResponse(node_id=self._name)
        if self._publisher.volumes.topology:
            response.accessible_topology.CopyFrom(csi.Topology(segments=self._publisher.volumes.topology))
        return response

    async def NodePublishVolume(
        self, request: csi.NodePublishVolumeRequest, call: Call
    ) -> csi.NodePublishVolumeResponse:
        volume_id = checks.volume_id(request)
        target = checks.text("target_path", request.target_path, checks.MAX_PATH)
        if not request.HasField("volume_capability"):
            raise InvalidArgument("volume_capability is missing")
        wanted = checks.capability(request.volume_capability)
        read_only = wanted.read_only or request.readonly
        if not is_volume_id(volume_id):
            raise NotFound(f"there is no volume {volume_id[:80]!r}: none can have this id")
        volume = PublishedVolume(volume_id, wanted.filesystem, wanted.mount_flags, read_only, wanted.group)
        await self._publisher.publish(target, volume)
        return csi.NodePublishVolumeResponse()

    async def NodeUnpublishVolume(
        self, request: csi.NodeUnpublishVolumeRequest, call: Call
    ) -> csi.NodeUnpublishVolumeResponse:
        volume_id = checks.volume_id(request)
        target = checks.text("target_path", request.target_path, checks.MAX_PATH)
        await self._publisher.unpublish(target, volume_id)
        return csi.NodeUnpublishVolumeResponse()

    async def NodeGetVolumeStats(
        self, request: csi.NodeGetVolumeStatsRequest, call: Call
    ) -> csi.NodeGetVolumeStatsResponse:
        pods, volume_id = self._with_pods(), checks.volume_id(request)
        path = checks.text("volume_path", request.volume_path, checks.MAX_PATH)
        unit = csi.VolumeUsage
        if (await self._find(volume_id, path)).raw:  # only its pod knows how much is used
            disk = await self._publisher.volumes.get(volume_id)
            return csi.NodeGetVolumeStatsResponse(usage=[csi.VolumeUsage(unit=unit.BYTES, total=disk.size)])
        use = await pods.usage(volume_id)
        usage = [csi.VolumeUsage(unit=unit.BYTES, total=use.total, used=use.used, available=use.available)]
        if use.inodes:
            inodes = csi.VolumeUsage(unit=unit.INODES, total=use.inodes, used=use.inodes_used)
            inodes.available = use.inodes_free
            usage.append(inodes)
        return csi.NodeGetVolumeStatsResponse(usage=usage)

    async def NodeExpandVolume(
        self, request: csi.NodeExpandVolumeRequest, call: Call
    ) -> csi.NodeExpandVolumeResponse:
        pods, volume_id = self._with_pods(), checks.volume_id(request)
        path = checks.text("volume_path", request.volume_path, checks.MAX_PATH)
        if request.HasField("volume_capability"):
            checks.capability(request.volume_capability)
        with self._publisher.in_flight.only(volume_id):
            await self._find(volume_id, path)
            disk = await self._publisher.volumes.get(volume_id)
            await pods.grow(volume_id)
        return csi.NodeExpandVolumeResponse(capacity_bytes=disk.size)

    def _with_pods(self) -> IPodVolumes:
        if self._pods is None:
            raise Unimplemented("this node does not look into its pods' volumes")
        return self._pods

    async def _find(self, volume_id: str, path: str) -> PublishedVolume:
        """Return a volume as it is published at a path. :raise NotFound: it is not published there."""
        found = None
        if path.startswith("/"):
            found = await self._publisher.find(path)
        if found is None or found.volume != volume_id:
            raise NotFound(f"volume {volume_id} is not published at {path[:256]}")
        return found
