"""The Agent service's calls about volumes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool

from infranetes_common import vmserver as messages
from infranetes_common.applier import Applier
from infranetes_common.entries import Bounds, Change, Manifest
from infranetes_common.errors import InfranetesError, InvalidArgument
from infranetes_common.tree import PIECE_BYTES
from infranetes_common.volumes import (
    BATCH_BYTES,
    PAGE,
    batch,
    change_from_wire,
    change_to_wire,
    from_wire,
    to_wire,
)
from vmserver.volumes.store import VolumeStore

WATCH_SECONDS = 0.5  # between two looks at what is watched
MAX_WATCHED = 1024

T = TypeVar("T")


class VolumeCalls:
    """Writing and reading one volume is never done by two at a time."""

    def __init__(self, reactor: Any, store: VolumeStore) -> None:
        self._volume_reactor = reactor
        self._volumes = store
        self._volume_locks: dict[str, DeferredLock] = {}
        self._volumes_listed: dict[str, Manifest] = {}  # what the node was told last, unless it wrote since

    def _in_thread(self, work: Callable[..., T], *args: Any, **named: Any) -> Deferred[T]:
        reactor = self._volume_reactor
        running: Deferred[T] = deferToThreadPool(reactor, reactor.getThreadPool(), work, *args, **named)
        return running

    async def _locked(self, id: str, work: Any) -> Any:
        lock = self._volume_locks.setdefault(id, DeferredLock())
        try:
            await lock.acquire()
        except BaseException:
            work.close()
            raise
        try:
            return await work
        finally:
            lock.release()
            if not lock.locked and not lock.waiting:
                self._volume_locks.pop(id, None)

    async def PutVolume(self, requests: AsyncIterator[Any], call: Any) -> Any:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidArgument("PutVolume: the first message has to be the header")
        await self._locked(first.header.id, self._put(first.header, requests))
        return messages.PutVolumeResponse()

    async def _put(self, header: Any, requests: AsyncIterator[Any]) -> None:
        tree = await self._in_thread(
            self._volumes.make, header.id, file=header.file, in_memory=header.in_memory
        )
        applier = Applier(tree, _bounds(header.bounds))
        waiting: list[Change] = []
        size = 0
        try:
            async for request in requests:
                if request.WhichOneof("part") != "change":
                    raise InvalidArgument("PutVolume: after the header, changes are expected")
                change = change_from_wire(request.change)
                if isinstance(change, bytes):
                    if len(change) > PIECE_BYTES:
                        raise InvalidArgument(f"PutVolume: a piece of more than {PIECE_BYTES} bytes")
                    size += len(change)
                waiting.append(change)
                if size >= BATCH_BYTES or len(waiting) >= PAGE:
                    taken, waiting, size = waiting, [], 0
                    await self._uncut(applier.feed, taken)
            await self._uncut(applier.feed, waiting)
            await self._uncut(applier.finish)
        finally:
            self._volumes_listed.pop(header.id, None)
            await self._uncut(applier.abort)

    async def _uncut(self, work: Callable[..., T], *args: Any) -> T:
        """As `_in_thread`, but a cancelled call waits for its thread, which has a file open."""
        running: Deferred[T] = self._in_thread(work, *args)
        over: Deferred[None] = Deferred()
        outcome: Deferred[T] = Deferred()

        def end(result: Any) -> None:
            outcome.callback(result)
            if not over.called:
                over.callback(None)

        running.addBoth(end)
        try:
            await over
        except BaseException:
            while not outcome.called:
                await deferLater(self._volume_reactor, 0.01, lambda: None)
            outcome.addErrback(lambda _: None)
            raise
        return await outcome

    async def ListVolume(self, request: Any, call: Any) -> AsyncIterator[Any]:
        tree = await self._in_thread(self._volumes.tree, request.id)
        manifest = await self._in_thread(tree.stable, _bounds(request.bounds))
        self._volumes_listed[request.id] = manifest
        found = list(manifest.values())
        for at in range(0, len(found), PAGE):
            yield messages.ListVolumeResponse(entries=map(to_wire, found[at : at + PAGE]))

    async def ReadVolume(self, request: Any, call: Any) -> AsyncIterator[Any]:
        tree = await self._in_thread(self._volumes.tree, request.id)
        changes = tree.read([from_wire(one) for one in request.entries])
        while taken := await self._in_thread(batch, changes):
            for change in taken:
                yield change_to_wire(change)

    async def WatchVolumes(self, request: Any, call: Any) -> AsyncIterator[Any]:
        if len(request.ids) > MAX_WATCHED:
            raise InvalidArgument(f"ids: more than {MAX_WATCHED} volumes")
        bounds = _bounds(request.bounds)
        seen: dict[str, Any] = {}
        while True:
            for id in request.ids:
                now = await self._in_thread(self._look, id, bounds)
                # Compared with what the node has, or a file that came and went around its list would stay
                # there; and with what was said already, or what it can't take would be said for ever.
                told = self._volumes_listed.get(id)
                if now != told and (id not in seen or seen[id] != (now, told)):
                    seen[id] = (now, told)
                    yield messages.WatchVolumesResponse(id=id)
            await deferLater(self._volume_reactor, WATCH_SECONDS, lambda: None)

    def _look(self, id: str, bounds: Bounds) -> Manifest | str:
        try:
            return self._volumes.tree(id).scan(bounds)
        except (InfranetesError, OSError) as error:
            return str(error)

    async def RemoveVolume(self, request: Any, call: Any) -> Any:
        await self._locked(request.id, self._remove(request.id))
        return messages.RemoveVolumeResponse()

    async def _remove(self, id: str) -> None:
        self._volumes_listed.pop(id, None)
        await self._in_thread(self._volumes.remove, id)


def _bounds(sent: Any) -> Bounds:
    if not sent.entries or not sent.bytes:
        raise InvalidArgument("bounds: how much is carried at most is missing")
    return Bounds(sent.entries, sent.bytes)
