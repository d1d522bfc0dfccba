# SPDX-License-Identifier: Apache-2.0
"""The images of the VM's Docker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import cast

from twisted.logger import Logger

from infranetes_common.concurrency import KeyedLock
from infranetes_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from vmserver.containers.docker.api import ImageInspect, LoadProgress
from vmserver.containers.docker.bodies import StreamBody
from vmserver.containers.docker.engine import Engine, EngineError
from vmserver.containers.docker.names import LABEL_INIT

LOAD_SECONDS = 3600.0  # an emulated VM unpacks slowly; the caller has its own deadline

_log = Logger()


class Images:
    """Docker's images, identified by the digest of their configuration."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._layers: dict[str, tuple[str, ...]] = {}  # diff ids by image id; an image never changes
        self._loading: KeyedLock[str] = KeyedLock()

    async def ids(self) -> list[str]:
        """Return the ids of all images, sorted; without that of the pod's init."""
        images = await self._engine.list_images()
        return sorted({image["Id"] for image in images if LABEL_INIT not in (image.get("Labels") or ())})

    async def has(self, image_id: str) -> bool:
        """Return whether an image is loaded."""
        return await self._inspect(image_id) is not None

    async def missing_layers(self, diff_ids: Sequence[str]) -> int:
        """Return how many of these layers, counted from the lowest, are the lowest layers of some image.

        Other layers don't count: Docker identifies a layer together with all that are below it."""
        present = 0
        ids = await self.ids()
        for removed in self._layers.keys() - set(ids):
            del self._layers[removed]
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
        """See `IContainerProvider.load_image`. Loads of the same image run one after the other."""
        async with self._loading.held(image_id):
            if await self.has(image_id):
                async for _ in archive:
                    pass
                return
            await self._load(image_id, archive)

    async def _load(self, image_id: str, archive: AsyncIterator[bytes]) -> None:
        before = set(await self.ids())
        body = StreamBody(archive)
        try:
            failure = await self._upload(body)
        except (EngineError, Unavailable) as error:
            if body.failure is not None:
                body.failure.raiseException()
            await self._remove_strays(before, image_id, keep=False)
            if isinstance(error, EngineError):
                raise _load_error(image_id, error.message) from error
            raise
        loaded = await self.has(image_id)
        await self._remove_strays(before, image_id, keep=loaded and not failure)
        if failure:
            raise _load_error(image_id, failure)
        if not loaded:
            raise InvalidArgument(
                f"the archive is not that of image {image_id}: it has another image or none"
            )

    async def _upload(self, body: StreamBody) -> str:
        """Send the archive; return the engine's error message if loading fails after the upload began."""
        stream = await self._engine.stream("POST", "/images/load", {"quiet": "1"}, body, within=LOAD_SECONDS)
        failure = ""
        try:
            async for line in stream.lines():
                try:
                    failure = str(cast(LoadProgress, json.loads(line)).get("error") or failure)
                except (ValueError, AttributeError):
                    continue
        finally:
            stream.close()
        return failure

    async def _remove_strays(self, before: set[str], image_id: str, *, keep: bool) -> None:
        """Remove the images that a load has added, except `image_id` if it is to be kept."""
        try:
            loading = set(self._loading.busy()) - {image_id}
            for stray in set(await self.ids()) - before - loading - ({image_id} if keep else set()):
                await self.remove(stray)
        except (EngineError, Unavailable, FailedPrecondition) as error:
            _log.error(
                "what a failed load of {image} left can't be removed: {error}",
                image=image_id,
                error=error,
            )

    async def remove(self, image_id: str) -> None:
        """See `IContainerProvider.remove_image`."""
        found = await self._inspect(image_id)
        if found is None:
            return
        # Docker refuses to remove an image with several names by its id, so remove the names first.
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

    async def _inspect(self, image_id: str) -> ImageInspect | None:
        try:
            return await self._engine.inspect_image(image_id)
        except EngineError as error:
            if error.status == 404:
                return None
            raise error.translated(f"inspecting image {image_id}") from error


def _load_error(image_id: str, message: str) -> Exception:
    if "no space left on device" in message or "disk quota exceeded" in message:
        return ResourceExhausted(f"loading image {image_id}: the VM's disk is full: {message}")
    return InvalidArgument(f"the archive of image {image_id} can't be loaded: Docker says: {message}")
