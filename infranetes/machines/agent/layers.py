# SPDX-License-Identifier: Apache-2.0
"""The agent's calls about the layers of images."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence

from infranetes.machines.agent import checks
from infranetes.machines.agent.calls import CHUNK_BYTES, AgentCalls, closing
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import vmserver

LIST_SECONDS = 30.0
MOUNT_SECONDS = 60.0  # some seconds for disks to appear, and 127 mounts in an emulated VM
PUT_SECONDS = 900.0  # a layer of several GB through a slow link; what has arrived stays
ADD_SECONDS = 300.0  # layers that were brought before a boot of the VM are read whole

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class LayerClient(AgentCalls):
    """A part of AgentClient. UNIMPLEMENTED, as `Unimplemented`: its VM takes whole images (`load_image`)."""

    async def layers(self, diff_ids: Sequence[str]) -> list[vmserver.LayerState]:
        """Ask how much of each layer the VM has; return one state for each, in the same order.

        :raise InvalidArgument: the agent answers something else.
        """
        request = vmserver.ListLayersRequest(diff_ids=diff_ids)
        answer = await self._call(self._stub.ListLayers(request, timeout=LIST_SECONDS))
        if [one.diff_id for one in answer.layers] != list(diff_ids):
            raise InvalidArgument(f"the agent was asked for {len(diff_ids)} layers and speaks of others")
        for one in answer.layers:
            if one.arrived and not _DIGEST.fullmatch(one.digest):
                raise InvalidArgument(f"the agent has bytes of {one.digest[:80]!r}, which is no digest")
        return list(checks.clamped(answer).layers)

    async def mount_layers(self, disks: Sequence[vmserver.LayerDisk]) -> None:
        """Mount layers that the hypervisor shows.

        :raise Unavailable: a disk does not appear in the VM. :raise FailedPrecondition: one holds no layer.
        """
        request = vmserver.MountLayersRequest(disks=disks)
        await self._call(self._stub.MountLayers(request, timeout=MOUNT_SECONDS))

    async def put_layer(self, header: vmserver.PutLayerHeader, data: AsyncIterator[bytes]) -> None:
        """Bring a layer into the VM. `data` begins at the header's offset, and is closed in the end.

        :raise OutOfRange: the VM has less than the offset: ask `layers`, and begin there or at 0.
        :raise DataLoss: what arrived is not what the header says; the VM has deleted it.
        :raise ResourceExhausted: the VM's disk is too full, and what had arrived is deleted.
        :raise Unavailable: the connection is lost, and what has arrived stays; or a newer call took over.
        """

        async def requests() -> AsyncIterator[vmserver.PutLayerRequest]:
            yield vmserver.PutLayerRequest(header=header)
            async for piece in data:
                for at in range(0, len(piece), CHUNK_BYTES):
                    yield vmserver.PutLayerRequest(data=piece[at : at + CHUNK_BYTES])

        async with closing(data):
            await self._call(self._stub.PutLayer(requests(), timeout=PUT_SECONDS))

    async def remove_layers(self, diff_ids: Sequence[str]) -> None:
        """Have the VM let go of these layers and of all others that it has, but for what its images need."""
        request = vmserver.RemoveLayersRequest(diff_ids=diff_ids, unneeded=True)
        await self._call(self._stub.RemoveLayers(request, timeout=MOUNT_SECONDS))

    async def add_image(
        self, image_id: str, configuration: bytes, disks: Sequence[vmserver.LayerDisk] = ()
    ) -> None:
        """Make an image from layers that the VM has, and from `disks`, which are mounted first.

        :raise Unavailable: a disk does not appear in the VM. :raise FailedPrecondition: it lacks a layer, or
            a disk holds none. :raise DataLoss: one was damaged, and is deleted.
        """
        request = vmserver.AddImageRequest(image_id=image_id, configuration=configuration, disks=disks)
        await self._call(self._stub.AddImage(request, timeout=ADD_SECONDS))
