# SPDX-License-Identifier: Apache-2.0
"""The agent's calls for the layers of images."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence

from infranetes.machines.agent import checks
from infranetes.machines.agent.calls import CHUNK_BYTES, AgentCalls, closing
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import vmserver

LIST_SECONDS = 30.0
MOUNT_SECONDS = 60.0  # time for disks to appear, and for 200 mounts in an emulated VM
PUT_SECONDS = 900.0  # time for a layer of several GB over a slow link; what has arrived is kept
ADD_SECONDS = 300.0  # time to read all layers that were loaded before the VM booted

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class LayerClient(AgentCalls):
    """The part of AgentClient for layers.

    All calls raise NotOffered if the VM takes only whole images (`load_image`)."""

    async def layers(self, diff_ids: Sequence[str]) -> list[vmserver.LayerState]:
        request = vmserver.ListLayersRequest(diff_ids=diff_ids)
        answer = await self._call(self._stub.ListLayers(request, timeout=LIST_SECONDS))
        if [layer.diff_id for layer in answer.layers] != list(diff_ids):
            raise InvalidArgument(
                f"the agent was asked about {len(diff_ids)} layers and answered about others"
            )
        for layer in answer.layers:
            if layer.arrived and not _DIGEST.fullmatch(layer.digest):
                raise InvalidArgument(
                    f"the agent reported bytes of {layer.digest[:80]!r}, which is not a digest"
                )
        return list(checks.clamped(answer).layers)

    async def mount_layers(self, disks: Sequence[vmserver.LayerDisk]) -> None:
        request = vmserver.MountLayersRequest(disks=disks)
        await self._call(self._stub.MountLayers(request, timeout=MOUNT_SECONDS))

    async def put_layer(self, header: vmserver.PutLayerHeader, data: AsyncIterator[bytes]) -> None:
        async def requests() -> AsyncIterator[vmserver.PutLayerRequest]:
            yield vmserver.PutLayerRequest(header=header)
            async for piece in data:
                for at in range(0, len(piece), CHUNK_BYTES):
                    yield vmserver.PutLayerRequest(data=piece[at : at + CHUNK_BYTES])

        async with closing(data):
            await self._call(self._stub.PutLayer(requests(), timeout=PUT_SECONDS))

    async def remove_layers(self, diff_ids: Sequence[str]) -> None:
        request = vmserver.RemoveLayersRequest(diff_ids=diff_ids, unneeded=True)
        await self._call(self._stub.RemoveLayers(request, timeout=MOUNT_SECONDS))

    async def add_image(
        self, image_id: str, configuration: bytes, disks: Sequence[vmserver.LayerDisk] = ()
    ) -> None:
        request = vmserver.AddImageRequest(image_id=image_id, configuration=configuration, disks=disks)
        await self._call(self._stub.AddImage(request, timeout=ADD_SECONDS))
