# SPDX-License-Identifier: Apache-2.0
"""CSI's Node service: a path of a pod comes to stand for a volume.

Nothing is attached here, for kubelet has volumes published before the pod's VM is asked for.
"""

from __future__ import annotations

import os

from infranetes.csi import checks
from infranetes.csi.checks import InFlight
from infranetes.csi.interface import IPodVolumes
from infranetes.providers.volumes import IVolumes, is_volume_id
from infranetes.volumes import published
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.published import PublishedVolume
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    Unimplemented,
)
from infranetes_common.reactors import IReactor
from infranetes_common.wire import csi
from txgrpc import Call

_RPC = csi.NodeServiceCapability.RPC
_ALWAYS = (_RPC.VOLUME_MOUNT_GROUP, _RPC.SINGLE_NODE_MULTI_WRITER)
_OF_PODS = (_RPC.GET_VOLUME_STATS, _RPC.EXPAND_VOLUME)


class Node:
    """One method per RPC.

    :param name: the node's. :param table: the node's mounts. :param in_flight: shared with the Controller
    service. :param pods: whom to ask about volumes in VMs; None: nobody."""

    def __init__(
        self,
        reactor: IReactor,
        name: str,
        volumes: IVolumes,
        table: MountTable,
        in_flight: InFlight,
        pods: IPodVolumes | None = None,
    ) -> None:
        self._reactor = reactor
        self._name = name
        self._volumes = volumes
        self._table = table
        self._in_flight = in_flight
        self._pods = pods

    async def NodeGetCapabilities(
        self, request: csi.NodeGetCapabilitiesRequest, call: Call
    ) -> csi.NodeGetCapabilitiesResponse:
        offered = (*_ALWAYS, *_OF_PODS) if self._pods is not None else _ALWAYS
        found = [csi.NodeServiceCapability(rpc=_RPC(type=each)) for each in offered]
        return csi.NodeGetCapabilitiesResponse(capabilities=found)

    async def NodeGetInfo(self, request: csi.NodeGetInfoRequest, call: Call) -> csi.NodeGetInfoResponse:
        response = csi.NodeGetInfoResponse(node_id=self._name)
        if self._volumes.topology:
            response.accessible_topology.CopyFrom(csi.Topology(segments=self._volumes.topology))
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
        published.check(volume)
        with self._in_flight.only(volume_id):
            await self._volumes.get(volume_id)
            await run_in_thread(self._reactor, self._thd_publish, target, volume)
        return csi.NodePublishVolumeResponse()

    async def NodeUnpublishVolume(
        self, request: csi.NodeUnpublishVolumeRequest, call: Call
    ) -> csi.NodeUnpublishVolumeResponse:
        volume_id = checks.volume_id(request)
        target = checks.text("target_path", request.target_path, checks.MAX_PATH)
        with self._in_flight.only(volume_id):
            await run_in_thread(self._reactor, self._thd_unpublish, target, volume_id)
        return csi.NodeUnpublishVolumeResponse()

    async def NodeGetVolumeStats(
        self, request: csi.NodeGetVolumeStatsRequest, call: Call
    ) -> csi.NodeGetVolumeStatsResponse:
        pods, volume_id = self._with_pods(), checks.volume_id(request)
        await self._find(volume_id, checks.text("volume_path", request.volume_path, checks.MAX_PATH))
        use = await pods.usage(volume_id)
        unit = csi.VolumeUsage
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
        with self._in_flight.only(volume_id):
            await self._find(volume_id, path)
            disk = await self._volumes.get(volume_id)
            await pods.grow(volume_id)
        return csi.NodeExpandVolumeResponse(capacity_bytes=disk.size)

    def _with_pods(self) -> IPodVolumes:
        if self._pods is None:
            raise Unimplemented("this node does not look into its pods' volumes")
        return self._pods

    async def _find(self, volume_id: str, path: str) -> None:
        """:raise NotFound: the volume is not published at this path."""
        found = None
        if path.startswith("/"):
            found = await run_in_thread(self._reactor, published.read, path, self._table)
        if found is None or found.volume != volume_id:
            raise NotFound(f"volume {volume_id} is not published at {path[:256]}")

    # ---- In threads

    def _thd_publish(self, target: str, volume: PublishedVolume) -> None:
        here = os.path.realpath(target)
        others = [each for each in published.targets(volume.volume, self._table) if each != here]
        if others:
            raise FailedPrecondition(
                f"volume {volume.volume} is published at {others[0]} already, and a volume is one pod's at a "
                "time: it can be published here once that pod is gone"
            )
        published.publish(target, volume, self._table)

    def _thd_unpublish(self, target: str, volume_id: str) -> None:
        there = None
        if os.path.isabs(target):
            try:
                there = published.read(target, self._table)
            except InfranetesError:
                there = None  # whatever it is, it is to go
        if there is not None and not there.below and there.volume != volume_id:
            raise FailedPrecondition(f"{target}: volume {there.volume} is published there, not {volume_id}")
        published.unpublish(target, self._table)
