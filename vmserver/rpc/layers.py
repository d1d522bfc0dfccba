# SPDX-License-Identifier: Apache-2.0
"""The calls about image layers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from infranetes_common.errors import InvalidArgument, Unimplemented
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentLayerRpcs
from txgrpc import Call
from vmserver import validate
from vmserver.containers.interface import ITakesLayers
from vmserver.containers.provider_choice import ProviderChoice
from vmserver.layers.arrival import BroughtLayer
from vmserver.layers.store import LayerOnDisk
from vmserver.rpc.uploads import data_of

MAX_SIZE = 2**40  # bytes of a layer
AHEAD_BYTES = 4 * 1024 * 1024  # bytes of a layer held in memory while earlier ones are hashed and written
MAX_TARGET, MAX_LUN = 255, 16383  # the limits of virtio-scsi


class LayerCalls(AgentLayerRpcs):
    """Validates requests and passes them to the provider's layer store, if it has one."""

    def __init__(self, choice: ProviderChoice) -> None:
        self._choice = choice

    async def ListLayers(
        self, request: messages.ListLayersRequest, call: Call
    ) -> messages.ListLayersResponse:
        found = await self._taker().layers.arrived(validate.diff_ids(request.diff_ids))
        return messages.ListLayersResponse(
            layers=[
                messages.LayerState(
                    diff_id=one.diff_id, mounted=one.whole, arrived=one.size, digest=one.digest
                )
                for one in found
            ]
        )

    async def MountLayers(
        self, request: messages.MountLayersRequest, call: Call
    ) -> messages.MountLayersResponse:
        await self._taker().layers.mount_disks(_disks(request.disks))
        return messages.MountLayersResponse()

    async def PutLayer(
        self, requests: AsyncIterator[messages.PutLayerRequest], call: Call
    ) -> messages.PutLayerResponse:
        layers = self._taker().layers
        call.receive_ahead(AHEAD_BYTES)
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidArgument("PutLayer: the first message has to be the header")
        header = first.header
        validate.diff_ids([header.diff_id])
        validate.digest("digest", header.digest)
        size = validate.size("size", header.size, MAX_SIZE, least=1)
        offset = validate.size("offset", header.offset, size)
        data = data_of(requests, "PutLayer")
        try:
            await layers.put(BroughtLayer(header.diff_id, size, header.digest, offset), data)
        finally:
            await data.aclose()
        return messages.PutLayerResponse()

    async def RemoveLayers(
        self, request: messages.RemoveLayersRequest, call: Call
    ) -> messages.RemoveLayersResponse:
        await self._taker().layers.remove(validate.diff_ids(request.diff_ids), unneeded=request.unneeded)
        return messages.RemoveLayersResponse()

    async def AddImage(self, request: messages.AddImageRequest, call: Call) -> messages.AddImageResponse:
        taker, image_id = self._taker(), validate.image_id(request.image_id)
        if request.disks:
            await taker.layers.mount_disks(_disks(request.disks))
        await taker.add_image(image_id, request.configuration)
        return messages.AddImageResponse()

    def _taker(self) -> ITakesLayers:
        provider = self._choice.provider
        if not ITakesLayers.providedBy(provider):
            raise Unimplemented(
                f"the {provider.name} provider of this VM takes whole images, by LoadImage: images made of "
                "layers need a VM with the oci provider"
            )
        return provider


def _disks(disks: Sequence[messages.LayerDisk]) -> list[LayerOnDisk]:
    validate.diff_ids([disk.diff_id for disk in disks])
    for disk in disks:
        if disk.target > MAX_TARGET or disk.lun > MAX_LUN:
            raise InvalidArgument(
                f"disks: target {disk.target}, LUN {disk.lun}: expected at most {MAX_TARGET} and {MAX_LUN}"
            )
    return [LayerOnDisk(disk.diff_id, disk.target, disk.lun) for disk in disks]
