"""The images that the machine's Docker has, and how more come in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from vmserver.containers.docker.engine import Engine, EngineError, StreamBody

LOAD_SECONDS = 3600.0  # an emulated machine unpacks slowly; the caller has its own deadline

_log = Logger()


class Images:
    """Docker's images, by the id of their configuration."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._layers: dict[str, tuple[str, ...]] = {}  # image id -> its diff ids; an image never changes
        self._locks: dict[str, DeferredLock] = {}

    async def ids(self) -> list[str]:
        """Ids of all images."""
        found = await self._engine.call("GET", "/images/json")
        return sorted({image["Id"] for image in found})

    async def has(self, image_id: str) -> bool:
        """Whether it is loaded."""
        return await self._inspect(image_id) is not None

    async def missing_layers(self, diff_ids: Sequence[str]) -> int:
        """How many of these, lowest first, are the lowest of some image here: Docker knows layers by
        the chain below them."""
        present = 0
        ids = await self.ids()
        for gone in self._layers.keys() - set(ids):
            del self._layers[gone]
        for image_id in ids:
            layers = self._layers.get(image_id)
            if layers is None:
                found = await self._inspect(image_id)
                if found is None:
                    continue
                layers = self._layers[image_id] = tuple(found["RootFS"].get("Layers") or ())
            common = 0
            for ours, theirs in zip(diff_ids, layers, strict=False):
                if ours != theirs:
                    break
                common += 1
            present = max(present, common)
        return present

    async def load(self, image_id: str, archive: AsyncIterator[bytes]) -> None:
        """See `IContainerProvider.load_image`. Loads of one image are one at a time."""
        lock = self._locks.setdefault(image_id, DeferredLock())
        await lock.acquire()
        try:
            if await self.has(image_id):
                async for _ in archive:
                    pass
                return
            await self._load(image_id, archive)
        finally:
            lock.release()
            if not lock.locked and not lock.waiting:
                self._locks.pop(image_id, None)

    async def _load(self, image_id: str, archive: AsyncIterator[bytes]) -> None:
        before = set(await self.ids())
        body = StreamBody(archive)
        try:
            words = await self._send(body)
        except (EngineError, Unavailable) as error:
            if body.failure is not None:
                body.failure.raiseException()
            await self._drop_all_but(before, image_id, keep=False)
            if isinstance(error, EngineError):
                raise _load_error(image_id, error.message) from error
            raise
        loaded = await self.has(image_id)
        await self._drop_all_but(before, image_id, keep=loaded and not words)
        if words:
            raise _load_error(image_id, words)
        if not loaded:
            raise InvalidArgument(
                f"the archive is not that of image {image_id}: it has another image or none"
            )

    async def _send(self, body: StreamBody) -> str:
        """Upload; the engine's words where it failed while it read."""
        stream = await self._engine.stream("POST", "/images/load", {"quiet": "1"}, body, within=LOAD_SECONDS)
        words = ""
        try:
            async for line in stream.lines():
                try:
                    words = str(json.loads(line).get("error") or words)
                except (ValueError, AttributeError):
                    continue
        finally:
            stream.close()
        return words

    async def _drop_all_but(self, before: set[str], image_id: str, *, keep: bool) -> None:
        """Take out what an archive brought beside what it was to bring, or all of it."""
        try:
            under_way = {*self._locks} - {image_id}
            for stray in set(await self.ids()) - before - under_way - ({image_id} if keep else set()):
                await self.remove(stray)
        except (EngineError, Unavailable, FailedPrecondition) as error:
            _log.error(
                "what a failed load of {image} left could not be removed: {error}",
                image=image_id,
                error=error,
            )

    async def remove(self, image_id: str) -> None:
        """See `IContainerProvider.remove_image`."""
        found = await self._inspect(image_id)
        if found is None:
            return
        # With several names only the last one may go by the id.
        for name in found.get("RepoTags") or []:
            await self._delete(name, image_id)
        await self._delete(image_id, image_id)

    async def _delete(self, name: str, image_id: str) -> None:
        try:
            await self._engine.call("DELETE", f"/images/{name}", {"force": "0"})
        except EngineError as error:
            if error.status == 409:
                raise FailedPrecondition(
                    f"image {image_id} is in use; remove its containers first"
                ) from error
            if error.status != 404:
                raise error.translated(f"removing image {image_id}") from error

    async def _inspect(self, image_id: str) -> Any:
        try:
            return await self._engine.call("GET", f"/images/{image_id}/json")
        except EngineError as error:
            if error.status == 404:
                return None
            raise error.translated(f"looking at image {image_id}") from error


def _load_error(image_id: str, words: str) -> Exception:
    if "no space left on device" in words or "disk quota exceeded" in words:
        return ResourceExhausted(f"loading image {image_id}: the VM's disk is full: {words}")
    return InvalidArgument(f"the archive of image {image_id} can't be loaded: Docker says: {words}")
