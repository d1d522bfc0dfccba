# SPDX-License-Identifier: Apache-2.0
"""The agent's calls for volumes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence

from infranetes.machines.agent import limits
from infranetes.machines.agent.calls import AgentCalls
from infranetes.machines.agent.checks import clamped
from infranetes_common.errors import InvalidArgument, ResourceExhausted
from infranetes_common.filesync.manifest import Bounds, Change, Entry, Manifest, Unread
from infranetes_common.filesync.wire import change_from_wire, change_to_wire, from_wire, pages, to_wire
from infranetes_common.wire import vmserver

VOLUME_SECONDS = 120.0
MEASURE_SECONDS = 20.0


class VolumeClient(AgentCalls):
    """The part of AgentClient for volumes. All data from the agent is checked before it is passed on."""

    async def put_volume(
        self,
        id: str,
        *,
        file: bool,
        in_memory: bool,
        bounds: Bounds,
        changes: AsyncIterator[Change],
        size_limit: int = 0,
        huge_page_size: int = 0,
    ) -> None:
        async def requests() -> AsyncIterator[vmserver.PutVolumeRequest]:
            header = vmserver.VolumeHeader(
                id=id,
                file=file,
                in_memory=in_memory,
                bounds=_bounds(bounds),
                size_limit=size_limit,
                huge_page_size=huge_page_size,
            )
            yield vmserver.PutVolumeRequest(header=header)
            async for change in changes:
                yield vmserver.PutVolumeRequest(change=change_to_wire(change))

        await self._call(self._stub.PutVolume(requests(), timeout=VOLUME_SECONDS))

    async def list_volume(self, id: str, bounds: Bounds) -> Manifest:
        manifest: Manifest = {}
        size = path_bytes = 0
        request = vmserver.ListVolumeRequest(id=id, bounds=_bounds(bounds))
        async for page in self._streamed(self._stub.ListVolume(request, timeout=VOLUME_SECONDS)):
            if not page.entries:
                raise InvalidArgument(f"the agent's list of volume {id} does not end")
            for sent in page.entries:
                entry = from_wire(sent)
                if entry.path in manifest:
                    raise InvalidArgument(f"the agent lists {entry.path[:200]!r} in volume {id} twice")
                manifest[entry.path] = entry
                size += entry.size
                path_bytes += len(entry.path) + len(entry.target)
            if len(manifest) > bounds.entries + 1 or size > bounds.bytes:
                raise ResourceExhausted(
                    f"in the VM it has over {bounds.entries} files or over {bounds.bytes} bytes"
                )
            if path_bytes > limits.PATH_BYTES * (bounds.entries + 1):
                raise ResourceExhausted(
                    f"in the VM its paths have over {limits.PATH_BYTES} bytes on average, over "
                    f"{bounds.entries} files"
                )
        return manifest

    async def read_volume(self, id: str, entries: Iterable[Entry]) -> AsyncGenerator[Change, None]:
        asked = list(entries)
        request = vmserver.ReadVolumeRequest(id=id)
        for page in pages(asked):  # their number is up to the agent
            await self._turn()
            request.entries.extend(map(to_wire, page))
        left = iter(asked)
        readable = {entry.path for entry in asked}
        async for sent in self._streamed(self._stub.ReadVolume(request, timeout=VOLUME_SECONDS)):
            change = change_from_wire(sent)
            if isinstance(change, bytes) and not 0 < len(change) <= limits.CHUNK_BYTES:
                raise InvalidArgument(f"the agent sent a piece of {len(change)} bytes of volume {id}")
            if isinstance(change, Unread) and change.path in readable:
                readable.remove(change.path)
            elif not isinstance(change, bytes) and change != next(left, None):
                raise InvalidArgument(f"the agent sent files of volume {id} that it was not asked for")
            yield change

    async def watch_volumes(self, ids: Sequence[str], bounds: Bounds) -> AsyncGenerator[str, None]:
        request = vmserver.WatchVolumesRequest(ids=ids, bounds=_bounds(bounds))
        async for event in self._streamed(self._stub.WatchVolumes(request, timeout=None)):
            yield event.id

    async def remove_volume(self, id: str) -> None:
        await self._call(self._stub.RemoveVolume(vmserver.RemoveVolumeRequest(id=id), timeout=30.0))

    async def measure_volumes(self, ids: Sequence[str]) -> dict[str, int]:
        request = vmserver.MeasureVolumesRequest(ids=ids)
        answer = await self._call(self._stub.MeasureVolumes(request, timeout=MEASURE_SECONDS))
        asked = set(ids)
        return {volume.id: volume.written.bytes for volume in clamped(answer).volumes if volume.id in asked}


def _bounds(bounds: Bounds) -> vmserver.VolumeBounds:
    return vmserver.VolumeBounds(entries=bounds.entries, bytes=bounds.bytes)
