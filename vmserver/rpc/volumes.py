# SPDX-License-Identifier: Apache-2.0
"""The calls about volumes: write, list, read, watch, remove and measure them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial

from infranetes_common.concurrency import KeyedLock, run_in_thread, sleep
from infranetes_common.errors import InfranetesError, InvalidArgument, NotFound
from infranetes_common.filesync.apply import Applier
from infranetes_common.filesync.manifest import Bounds, Change, Manifest
from infranetes_common.filesync.scan import CHUNK_BYTES, read, scan, stable_scan
from infranetes_common.filesync.wire import (
    BATCH_BYTES,
    BATCH_CHANGES,
    batch,
    change_from_wire,
    change_to_wire,
    from_wire,
    pages,
    to_wire,
)
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentVolumeRpcs
from txgrpc import Call
from vmserver.stats.written import WrittenLayers
from vmserver.volumes.store import VolumeStore

WATCH_SECONDS = 0.5  # between two scans of the watched volumes
MAX_WATCHED = 1024


class VolumeCalls(AgentVolumeRpcs):
    """Applies what the node writes, and reports what containers write.

    A volume is written or removed by one call at a time.
    """

    def __init__(self, reactor: IReactor, store: VolumeStore) -> None:
        self._reactor = reactor
        self._store = store
        self._locks: KeyedLock[str] = KeyedLock()
        self._measured = WrittenLayers(reactor)
        self._listed: dict[str, Manifest] = {}  # by ListVolume, unless written to since

    async def PutVolume(
        self, requests: AsyncIterator[messages.PutVolumeRequest], call: Call
    ) -> messages.PutVolumeResponse:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidArgument("PutVolume: the first message has to be the header")
        async with self._locks.held(first.header.id):
            await self._put(first.header, requests)
        return messages.PutVolumeResponse()

    async def _put(
        self, header: messages.VolumeHeader, requests: AsyncIterator[messages.PutVolumeRequest]
    ) -> None:
        make = partial(
            self._store.make,
            header.id,
            file=header.file,
            in_memory=header.in_memory,
            size_limit=header.size_limit,
            huge_page_size=header.huge_page_size,
        )
        tree = await run_in_thread(self._reactor, make)
        applier = Applier(tree, _bounds(header.bounds))
        pending: list[Change] = []
        size = 0
        try:
            async for request in requests:
                if request.WhichOneof("part") != "change":
                    raise InvalidArgument("PutVolume: after the header, changes are expected")
                change = change_from_wire(request.change)
                if isinstance(change, bytes):
                    if len(change) > CHUNK_BYTES:
                        raise InvalidArgument(f"PutVolume: data of more than {CHUNK_BYTES} bytes")
                    size += len(change)
                pending.append(change)
                if size >= BATCH_BYTES or len(pending) >= BATCH_CHANGES:
                    taken, pending, size = pending, [], 0
                    await run_in_thread(self._reactor, applier.feed, taken)
            await run_in_thread(self._reactor, applier.feed, pending)
            await run_in_thread(self._reactor, applier.finish)
            applier.check_whole()
        finally:
            self._listed.pop(header.id, None)
            await run_in_thread(self._reactor, applier.abort)

    async def ListVolume(
        self, request: messages.ListVolumeRequest, call: Call
    ) -> AsyncIterator[messages.ListVolumeResponse]:
        tree = await run_in_thread(self._reactor, self._store.tree, request.id)
        manifest = await run_in_thread(self._reactor, stable_scan, tree, _bounds(request.bounds))
        self._listed[request.id] = manifest
        for page in pages(manifest.values()):
            yield messages.ListVolumeResponse(entries=map(to_wire, page))

    async def ReadVolume(
        self, request: messages.ReadVolumeRequest, call: Call
    ) -> AsyncIterator[messages.VolumeChange]:
        tree = await run_in_thread(self._reactor, self._store.tree, request.id)
        changes = read(tree, [from_wire(one) for one in request.entries])
        while taken := await run_in_thread(self._reactor, batch, changes):
            for change in taken:
                yield change_to_wire(change)

    async def WatchVolumes(
        self, request: messages.WatchVolumesRequest, call: Call
    ) -> AsyncIterator[messages.WatchVolumesResponse]:
        if len(request.ids) > MAX_WATCHED:
            raise InvalidArgument(f"ids: more than {MAX_WATCHED} volumes")
        bounds = _bounds(request.bounds)
        reported: dict[str, tuple[Manifest | str, Manifest | None]] = {}
        while True:
            for id in request.ids:
                now = await run_in_thread(self._reactor, self._scan, id, bounds)
                # Compare with what the node has: otherwise a file that appeared and vanished around
                # ListVolume would stay on the node. Compare with the last report as well: a change that the
                # node can't take is reported once.
                listed = self._listed.get(id)
                if now != listed and reported.get(id) != (now, listed):
                    reported[id] = (now, listed)
                    yield messages.WatchVolumesResponse(id=id)
            await sleep(self._reactor, WATCH_SECONDS)

    def _scan(self, id: str, bounds: Bounds) -> Manifest | str:
        try:
            return scan(self._store.tree(id), bounds)
        except (InfranetesError, OSError) as error:
            return str(error)

    async def RemoveVolume(
        self, request: messages.RemoveVolumeRequest, call: Call
    ) -> messages.RemoveVolumeResponse:
        async with self._locks.held(request.id):
            self._listed.pop(request.id, None)
            await run_in_thread(self._reactor, self._store.remove, request.id)
        return messages.RemoveVolumeResponse()

    async def MeasureVolumes(
        self, request: messages.MeasureVolumesRequest, call: Call
    ) -> messages.MeasureVolumesResponse:
        if len(request.ids) > MAX_WATCHED:
            raise InvalidArgument(f"ids: more than {MAX_WATCHED} volumes")
        paths = await run_in_thread(self._reactor, self._directories, list(request.ids))
        found = await self._measured.of(paths)
        return messages.MeasureVolumesResponse(
            volumes=[messages.VolumeUsage(id=id, written=written) for id, written in found.items()]
        )

    def _directories(self, ids: list[str]) -> dict[str, str]:
        found = {}
        for id in ids:
            with contextlib.suppress(NotFound):
                found[id] = str(self._store.path(id))
        return found

    def stop(self) -> None:
        """Stop measuring. Idempotent."""
        self._measured.stop()


def _bounds(sent: messages.VolumeBounds) -> Bounds:
    if not sent.entries or not sent.bytes:
        raise InvalidArgument("bounds: expected a largest number of entries and of bytes")
    return Bounds(sent.entries, sent.bytes)
