"""The agent's calls about volumes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from infranetes_common import vmserver
from infranetes_common.entries import Bounds, Change, Entry, Manifest
from infranetes_common.errors import InfranetesError, InvalidArgument, ResourceExhausted
from infranetes_common.volumes import change_from_wire, change_to_wire, from_wire, to_wire
from txgrpc import GrpcError

VOLUME_SECONDS = 120.0


class VolumeClient:
    """A part of AgentClient. What comes from the agent is checked before it is handed on."""

    _stub: Any

    async def _call(self, call: Any) -> Any:
        raise NotImplementedError

    def _as_error(self, error: GrpcError) -> InfranetesError:
        raise NotImplementedError

    async def put_volume(
        self, id: str, *, file: bool, in_memory: bool, bounds: Bounds, changes: AsyncIterator[Change]
    ) -> None:
        """Make the volume where it is not there, and apply `changes` in their order."""

        async def requests() -> AsyncIterator[Any]:
            header = vmserver.VolumeHeader(id=id, file=file, in_memory=in_memory, bounds=_bounds(bounds))
            yield vmserver.PutVolumeRequest(header=header)
            async for change in changes:
                yield vmserver.PutVolumeRequest(change=change_to_wire(change))

        await self._call(self._stub.PutVolume(requests(), timeout=VOLUME_SECONDS))

    async def list_volume(self, id: str, bounds: Bounds) -> Manifest:
        """All that is in it. :raise NotFound: no such volume. :raise ResourceExhausted: over `bounds`."""
        found: Manifest = {}
        size = 0
        request = vmserver.ListVolumeRequest(id=id, bounds=_bounds(bounds))
        async for page in self._streamed(self._stub.ListVolume(request, timeout=VOLUME_SECONDS)):
            for sent in page.entries:
                entry = from_wire(sent)
                found[entry.path] = entry
                size += entry.size
            if len(found) > bounds.entries + 1 or size > bounds.bytes:
                raise ResourceExhausted(
                    f"in the VM it has over {bounds.entries} files or over {bounds.bytes} bytes"
                )
        return found

    async def read_volume(self, id: str, entries: Iterable[Entry]) -> AsyncIterator[Change]:
        """These entries with their content. :raise InvalidArgument: something that was not asked for."""
        wanted = list(entries)
        request = vmserver.ReadVolumeRequest(id=id, entries=map(to_wire, wanted))
        left = iter(wanted)
        async for sent in self._streamed(self._stub.ReadVolume(request, timeout=VOLUME_SECONDS)):
            change = change_from_wire(sent)
            if not isinstance(change, bytes) and change != next(left, None):
                raise InvalidArgument(f"the agent sent what was not asked for of volume {id}")
            yield change

    async def watch_volumes(self, ids: Sequence[str], bounds: Bounds) -> AsyncIterator[str]:
        """Ids: each once, then each time when something in it has changed. `aclose()` ends the call."""
        request = vmserver.WatchVolumesRequest(ids=ids, bounds=_bounds(bounds))
        async for event in self._streamed(self._stub.WatchVolumes(request, timeout=None)):
            yield event.id

    async def remove_volume(self, id: str) -> None:
        """Unknown: nothing to do."""
        await self._call(self._stub.RemoveVolume(vmserver.RemoveVolumeRequest(id=id), timeout=30.0))

    async def _streamed(self, stream: Any) -> AsyncIterator[Any]:
        try:
            async for message in stream:
                yield message
        except GrpcError as error:
            raise self._as_error(error) from None
        finally:
            stream.cancel()


def _bounds(bounds: Bounds) -> Any:
    return vmserver.VolumeBounds(entries=bounds.entries, bytes=bounds.bytes)
