# SPDX-License-Identifier: Apache-2.0
"""The node's images if they come from a catalogue: what was found is recorded, in `catalogue.json`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import cattrs
from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes.images import usage
from infranetes.images.index import MIN_PREFIX, Image
from infranetes.images.interface import CatalogueImage, IImageCatalogue, IKeepsImages
from infranetes.images.layer_disk import LayerDisk
from infranetes.images.usage import FsUsage
from infranetes_common.concurrency import replace_file, run_in_thread
from infranetes_common.errors import (
    ConfigError,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from infranetes_common.reactors import IReactor

_log = Logger()


class CatalogueStore:
    """Takes the place of `ImageStore`, with the images of a catalogue. Call `start` first."""

    def __init__(self, reactor: IReactor, directory: Path, catalogue: IImageCatalogue) -> None:
        self._reactor = reactor
        self._directory = directory.absolute()
        self._file = self._directory / "catalogue.json"
        self._catalogue = catalogue
        self._images: dict[str, CatalogueImage] = {}  # by id
        self._lock = DeferredLock()  # one change at a time
        self._held: Counter[str] = Counter()  # by id: how many launches need it
        self._keeper = catalogue if IKeepsImages.providedBy(catalogue) else None

    @property
    def name(self) -> str:
        """The catalogue's name."""
        return self._catalogue.name

    @property
    def catalogue(self) -> IImageCatalogue:
        """The catalogue."""
        return self._catalogue

    @property
    def machine_images(self) -> bool:
        """Whether the images are whole machines."""
        return self._catalogue.machine_images

    async def start(self) -> None:
        """Read what was found before.

        :raise ConfigError: the directory can't be used.
        """

        def read() -> dict[str, CatalogueImage]:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                recorded = json.loads(self._file.read_text())
            except FileNotFoundError:
                return {}
            return {image.id: image for image in cattrs.structure(recorded, list[CatalogueImage])}

        try:
            self._images = await run_in_thread(self._reactor, read)
        except (OSError, ValueError, cattrs.errors.BaseValidationError) as error:
            raise ConfigError(f"state_dir: images can't be kept in {self._directory}: {error}") from None
        if self._keeper is not None:
            await self._keeper.start()
            await self._sweep()

    async def stop(self) -> None:
        """End pulls that are under way. Idempotent."""
        if self._keeper is not None:
            await self._keeper.stop()

    def list(self) -> list[Image]:
        """Return every image, sorted by its first name, then id."""
        images = [_image(each) for each in self._images.values()]
        return sorted(images, key=lambda one: ((one.repo_tags + one.repo_digests + (one.id,))[0], one.id))

    def owns(self, name_or_id: str) -> bool:
        """Return whether a name has the catalogue's domain, or an id or digest is a pulled image's.

        A name of the catalogue's without its domain may belong to another store beside this one.
        """
        if name_or_id.startswith(f"{self._catalogue.name}.infranetes.io/"):
            return True
        digits = name_or_id.rpartition("@")[2].removeprefix("sha256:")
        return len(digits) >= MIN_PREFIX and any(
            id.removeprefix("sha256:").startswith(digits) for id in self._images
        )

    def resolve(self, name_or_id: str) -> Image:
        """Return the image that a reference, an id or the beginning of an id means.

        :raise NotFound: it was not pulled on this node.
        :raise InvalidArgument: the name is ambiguous.
        """
        digits = name_or_id.removeprefix("sha256:")
        name = self._catalogue.canonical(name_or_id)
        found = [
            image
            for image in self._images.values()
            if name_or_id in (image.id, *image.digests)
            or name in image.names
            or f"{name_or_id}:latest" in image.names
            or (len(digits) >= MIN_PREFIX and image.id.removeprefix("sha256:").startswith(digits))
            or name_or_id.endswith("@" + image.id)
        ]
        if len(found) > 1:
            raise InvalidArgument(f"image {name_or_id[:300]!r} may be one of {len(found)}; give more digits")
        if not found:
            raise NotFound(f"image {name_or_id[:300]!r} is not on this node; pull it")
        return _image(found[0])

    async def find(self, name_or_id: str) -> Image:
        """Return `resolve`'s answer: what the catalogue has now is asked by `pull` and `check`."""
        return self.resolve(name_or_id)

    def cached(self, image_id: str) -> Image | None:
        """Return the image with this id; None: it was not pulled."""
        found = self._images.get(image_id)
        return None if found is None else _image(found)

    async def config(self, image_id: str) -> bytes:
        """Return what is recorded of the image, as JSON.

        :raise NotFound: no image has this id.
        """
        if image_id not in self._images:
            raise NotFound(f"image {image_id} is not on this node; pull it")
        return json.dumps(cattrs.unstructure(self._images[image_id])).encode()

    async def fs_usage(self) -> FsUsage:
        """Return the size of `catalogue.json`, and of what the catalogue keeps."""
        if self._keeper is not None:
            return await run_in_thread(self._reactor, usage.of, self._directory)
        used = self._file.stat().st_blocks * 512 if self._file.exists() else 0
        return FsUsage(time.time_ns(), str(self._directory), used, 1)

    async def pull(self, name: str, annotations: Mapping[str, str]) -> Image:
        """Have the catalogue find an image, and record it.

        :raise InfranetesError: as `IImageCatalogue.find`.
        """
        found = await self._catalogue.find(name, annotations)
        async with self._lock:
            return await self._add(found)

    async def _add(self, found: CatalogueImage) -> Image:
        known = self._images.get(found.id)
        if known is not None:  # the same image under another name
            found = attrs.evolve(
                found,
                names=tuple(sorted({*known.names, *found.names})),
                digests=tuple(sorted({*known.digests, *found.digests})),
            )
        # A name that belonged to another image belongs to this one from now on.
        others = {
            id: attrs.evolve(image, names=tuple(name for name in image.names if name not in found.names))
            for id, image in self._images.items()
        }
        await self._save({**others, found.id: found})
        await self._sweep()
        return _image(found)

    async def remove(self, name_or_id: str) -> None:
        """Forget the image and all of its names; the catalogue itself is not changed. Idempotent."""
        async with self._lock:
            try:
                image = self.resolve(name_or_id)
            except NotFound:
                return
            await self._forget(image.id)

    async def check(self, image_id: str) -> None:
        """Forget the image if the catalogue no longer has it, so that it is looked for again."""
        image = self._images.get(image_id)
        try:
            if image is None or await self._catalogue.present(image):
                return
        except InfranetesError as error:
            _log.debug(
                "image {image} stays on record, as the catalogue could not be asked: {error}",
                image=image_id,
                error=error,
            )
            return
        _log.warn("image {image} ({machine}) is no longer there", image=image_id, machine=image.machine)
        async with self._lock:
            await self._forget(image_id)

    async def _forget(self, image_id: str) -> None:
        await self._save({id: image for id, image in self._images.items() if id != image_id})
        await self._sweep()

    async def _sweep(self) -> None:
        """Have the catalogue remove what nothing needs."""
        if self._keeper is not None:
            self._held = +self._held
            await self._keeper.keep({*self._images, *self._held})

    async def archive(self, image_id: str, present: int = 0) -> AsyncGenerator[bytes, None]:
        """Fail: there is nothing to load into a VM.

        :raise FailedPrecondition: always.
        """
        raise FailedPrecondition(f"image {image_id} of {self._catalogue.name} can't be loaded into a VM")
        yield b""

    @asynccontextmanager
    async def held(self, image_id: str) -> AsyncIterator[None]:
        """Keep what the node has of the image until the end of the block, also if it is removed meanwhile."""
        self._held[image_id] += 1
        try:
            yield
        finally:
            self._held[image_id] -= 1
            if image_id not in self._images:
                await self._sweep()

    async def disks(self, image_id: str) -> Sequence[LayerDisk]:
        """Fail: there are no layers.

        :raise FailedPrecondition: always.
        """
        raise FailedPrecondition(f"image {image_id} of {self._catalogue.name} has no layers to show to a VM")

    async def _save(self, images: dict[str, CatalogueImage]) -> None:
        text = json.dumps(cattrs.unstructure([*images.values()]))
        try:
            await run_in_thread(self._reactor, replace_file, self._file, text)
        except OSError as error:
            raise ResourceExhausted(f"{self._file} can't be written: {error.strerror}") from None
        self._images = images


def _image(found: CatalogueImage) -> Image:
    return Image(
        id=found.id,
        repo_tags=found.names,
        repo_digests=found.digests,
        size=found.size or 1,  # kubelet refuses 0
        diff_ids=(),
        user="",
        pinned=False,
        url=found.url,
        machine=found.machine,
    )
