# SPDX-License-Identifier: Apache-2.0
"""CSI's Controller service: volumes are made and destroyed."""

from __future__ import annotations

from collections.abc import Mapping

from infranetes.csi import checks
from infranetes.csi.checks import InFlight
from infranetes.csi.pages import page
from infranetes.csi.snapshots import offered, shown_source, source_of
from infranetes.providers.tenant_volumes import PARAMETER, IOfTenants, check_source
from infranetes.providers.volumes import (
    FLEX_PREFIX,
    ZONE,
    FromSnapshot,
    FromVolume,
    ISnapshots,
    IVolumes,
    VolumeDisk,
    VolumeSource,
    is_volume_id,
)
from infranetes_common.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unimplemented,
)
from infranetes_common.wire import csi
from infranetes_common.wire.csi_rpcs import ControllerVolumeRpcs
from txgrpc import Call, Code, GrpcError

DEFAULT_SIZE = 1 << 30  # the size of a volume if none is requested
_RPC = csi.ControllerServiceCapability.RPC
_OFFERED = (
    _RPC.CREATE_DELETE_VOLUME,
    _RPC.LIST_VOLUMES,
    _RPC.GET_CAPACITY,
    _RPC.EXPAND_VOLUME,
    _RPC.GET_VOLUME,
    _RPC.SINGLE_NODE_MULTI_WRITER,
)


class Controller(ControllerVolumeRpcs):
    """CSI's Controller service: one method per RPC.

    :param volumes: the provider's. :param in_flight: shared with the Node service.
    :param grows: whether file systems are made larger with their volumes.
    :param snapshots: the provider's, if it has any."""

    def __init__(
        self, volumes: IVolumes, in_flight: InFlight, grows: bool, snapshots: ISnapshots | None = None
    ) -> None:
        self._volumes = volumes
        self._in_flight = in_flight
        self._grows = grows
        self._snapshots = snapshots

    async def ControllerGetCapabilities(
        self, request: csi.ControllerGetCapabilitiesRequest, call: Call
    ) -> csi.ControllerGetCapabilitiesResponse:
        found = [
            csi.ControllerServiceCapability(rpc=_RPC(type=each))
            for each in (*_OFFERED, *offered(self._snapshots))
            if self._grows or each != _RPC.EXPAND_VOLUME
        ]
        return csi.ControllerGetCapabilitiesResponse(capabilities=found)

    async def CreateVolume(self, request: csi.CreateVolumeRequest, call: Call) -> csi.CreateVolumeResponse:
        name = checks.text("name", request.name, checks.MAX_ID)
        if name.startswith(FLEX_PREFIX):
            raise InvalidArgument(f"name: what begins with {FLEX_PREFIX} is a FlexVolume's name")
        checks.capabilities(request.volume_capabilities)
        volumes = self._among(request.parameters)
        if request.mutable_parameters:
            raise InvalidArgument("mutable_parameters: volumes have none")
        source = source_of(request, self._snapshots)
        if source is not None:
            check_source(volumes, source)
        await self._check_place(request.accessibility_requirements, source)
        wanted = checks.size(request.capacity_range, DEFAULT_SIZE, self._volumes.unit)
        with self._in_flight.only(name):
            disk = await self._made(volumes, name, wanted, source, request.capacity_range)
        if disk.source != source:
            raise AlreadyExists(f"volume {disk.id} exists already, and was made from another source")
        if not checks.in_range(request.capacity_range, disk.size):
            raise AlreadyExists(f"volume {disk.id} exists already, and has {disk.size} bytes")
        return csi.CreateVolumeResponse(volume=self._shown(disk))

    async def DeleteVolume(self, request: csi.DeleteVolumeRequest, call: Call) -> csi.DeleteVolumeResponse:
        volume_id = checks.volume_id(request)
        if is_volume_id(volume_id):
            with self._in_flight.only(volume_id):
                await self._volumes.delete(volume_id)
        return csi.DeleteVolumeResponse()

    async def ControllerExpandVolume(
        self, request: csi.ControllerExpandVolumeRequest, call: Call
    ) -> csi.ControllerExpandVolumeResponse:
        volume_id = checks.volume_id(request)
        if not self._grows:
            raise Unimplemented("this node does not make file systems larger")
        if not request.HasField("capacity_range"):
            raise InvalidArgument("capacity_range is missing")
        if request.HasField("volume_capability"):
            checks.capability(request.volume_capability)
        wanted = checks.size(request.capacity_range, self._volumes.unit, self._volumes.unit)
        with self._in_flight.only(volume_id):
            disk = await self._volumes.expand(self._known(volume_id), wanted)
        if not checks.in_range(request.capacity_range, disk.size):
            raise GrpcError(
                Code.OUT_OF_RANGE, f"volume {volume_id} has {disk.size} bytes, and none is made smaller"
            )
        return csi.ControllerExpandVolumeResponse(capacity_bytes=disk.size, node_expansion_required=True)

    async def ValidateVolumeCapabilities(
        self, request: csi.ValidateVolumeCapabilitiesRequest, call: Call
    ) -> csi.ValidateVolumeCapabilitiesResponse:
        volume_id = checks.volume_id(request)
        if not request.volume_capabilities:
            raise InvalidArgument("volume_capabilities are missing")
        await self._volumes.get(self._known(volume_id))
        response = csi.ValidateVolumeCapabilitiesResponse()
        try:
            checks.capabilities(request.volume_capabilities)
            self._among(request.parameters)
        except InvalidArgument as error:
            response.message = str(error)
            return response
        response.confirmed.volume_capabilities.extend(request.volume_capabilities)
        for key, value in request.volume_context.items():
            response.confirmed.volume_context[key] = value
        for key, value in request.parameters.items():
            response.confirmed.parameters[key] = value
        return response

    async def ListVolumes(self, request: csi.ListVolumesRequest, call: Call) -> csi.ListVolumesResponse:
        disks = await self._volumes.list()
        shown, token = page(disks, request.max_entries, request.starting_token)
        entries = [csi.ListVolumesResponse.Entry(volume=self._shown(each)) for each in shown]
        return csi.ListVolumesResponse(entries=entries, next_token=token)

    async def ControllerGetVolume(
        self, request: csi.ControllerGetVolumeRequest, call: Call
    ) -> csi.ControllerGetVolumeResponse:
        disk = await self._volumes.get(self._known(checks.volume_id(request)))
        status = csi.ControllerGetVolumeResponse.VolumeStatus()
        return csi.ControllerGetVolumeResponse(volume=self._shown(disk), status=status)

    async def GetCapacity(self, request: csi.GetCapacityRequest, call: Call) -> csi.GetCapacityResponse:
        volumes = self._among(request.parameters)
        if request.volume_capabilities:
            try:
                checks.capabilities(request.volume_capabilities)
            except InvalidArgument:
                return csi.GetCapacityResponse()  # there is no room for volumes that can't exist
        segments = request.accessible_topology.segments
        if segments and dict(segments) != dict(self._volumes.topology):
            return csi.GetCapacityResponse()
        free = await volumes.free()
        return csi.GetCapacityResponse(
            available_capacity=free,
            maximum_volume_size=csi.Int64Value(value=free),
            minimum_volume_size=csi.Int64Value(value=self._volumes.unit),
        )

    def _among(self, parameters: Mapping[str, str]) -> IVolumes:
        """Return the volumes among which one with these parameters of a StorageClass is made: its tenant's.

        :raise InvalidArgument: a parameter does nothing, or the tenant is not the claim's."""
        if not IOfTenants.providedBy(self._volumes):
            checks.parameters(parameters)
            return self._volumes
        checks.parameters({name: value for name, value in parameters.items() if name != PARAMETER})
        return self._volumes.of(parameters)

    async def _made(
        self, volumes: IVolumes, name: str, size: int, source: VolumeSource | None, asked: csi.CapacityRange
    ) -> VolumeDisk:
        if source is None:
            return await volumes.create(name, size)
        assert self._snapshots is not None
        if not asked.required_bytes:  # the volume is then as large as its source
            known = self._snapshots if isinstance(source, FromSnapshot) else self._volumes
            least = csi.CapacityRange(
                required_bytes=(await known.get(source.id)).size, limit_bytes=asked.limit_bytes
            )
            size = checks.size(least, size, self._volumes.unit)
        return await self._snapshots.restore(name, size, source)

    def _known(self, volume_id: str) -> str:
        if not is_volume_id(volume_id):
            raise NotFound(f"there is no volume {volume_id[:80]!r}: none can have this id")
        return volume_id

    async def _check_place(self, wanted: csi.TopologyRequirement, source: VolumeSource | None) -> None:
        place, what = dict(self._volumes.topology), "volumes are made here"
        if not place or not wanted.requisite:
            return
        if isinstance(source, FromVolume):
            try:
                place = self._topology(await self._volumes.get(source.id))
            except NotFound:
                return  # an earlier call may have made the clone all the same
            what = f"clones of volume {source.id} are made"
        if not any(dict(each.segments) == place for each in wanted.requisite):
            where = ", ".join(f"{key}={value}" for key, value in place.items())
            raise ResourceExhausted(
                f"accessibility_requirements: {what} only where nodes have the labels {where}"
            )

    def _topology(self, disk: VolumeDisk) -> dict[str, str]:
        """Return the topology of a volume, which may be in another zone than new volumes."""
        return {ZONE: disk.zone} if disk.zone else dict(self._volumes.topology)

    def _shown(self, disk: VolumeDisk) -> csi.Volume:
        volume = csi.Volume(volume_id=disk.id, capacity_bytes=disk.size)
        if disk.source is not None:
            volume.content_source.CopyFrom(shown_source(disk.source))
        if topology := self._topology(disk):
            volume.accessible_topology.add(segments=topology)
        return volume
