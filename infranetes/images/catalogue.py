"""The node's images where they come from a catalogue: what was found, by name. Nothing of them is kept here.

`catalogue.json` is replaced as a whole, so it is always one that was written in full.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
import cattrs
from twisted.internet.defer import Deferred, DeferredLock
from twisted.logger import Logger

from infranetes.images.index import MIN_PREFIX, Image
from infranetes.images.interface import Found
from infranetes.images.store import FsUsage
from infranetes.threads import in_thread
from infranetes_common.errors import (
    ConfigError,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)

T = TypeVar("T")

_log = Logger()


class CatalogueStore:
    """In the place of an `ImageStore`, over an `IImageCatalogue`. `start` first."""

    def __init__(self, reactor: Any, directory: Path, catalogue: Any) -> None:
        self._reactor = reactor
        self._directory = directory.absolute()
        self._file = self._directory / "catalogue.json"
        self._catalogue = catalogue
        self._found: dict[str, Found] = {}
        self._lock = DeferredLock()  # one change at a time

    @property
    def boots(self) -> bool:
        """Whether the images are whole machines."""
        return bool(self._catalogue.boots)

    async def start(self) -> None:
        """Read what was found before. :raise ConfigError: the directory can't be used."""

        def read() -> dict[str, Found]:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                kept = json.loads(self._file.read_text())
            except FileNotFoundError:
                return {}
            return {one.id: one for one in cattrs.structure(kept, list[Found])}

        try:
            self._found = await in_thread(self._reactor, read)
        except (OSError, ValueError, cattrs.errors.BaseValidationError) as error:
            raise ConfigError(f"state_dir: images can't be kept in {self._directory}: {error}") from None

    async def stop(self) -> None:
        """Nothing goes on by itself."""

    def list(self) -> list[Image]:
        """Every image, sorted by its first name, then id."""
        images = [_image(one) for one in self._found.values()]
        return sorted(images, key=lambda one: ((one.repo_tags + one.repo_digests + (one.id,))[0], one.id))

    def resolve(self, name_or_id: str) -> Image:
        """The image that a reference, an id or the beginning of one id means.

        :raise NotFound: not pulled on this node. :raise InvalidArgument: ambiguous."""
        digits = name_or_id.removeprefix("sha256:")
        name = self._catalogue.canonical(name_or_id)
        found = [
            one
            for one in self._found.values()
            if name_or_id in (one.id, *one.digests)
            or name in one.names
            or f"{name_or_id}:latest" in one.names
            or (len(digits) >= MIN_PREFIX and one.id.removeprefix("sha256:").startswith(digits))
            or name_or_id.endswith("@" + one.id)
        ]
        if len(found) > 1:
            raise InvalidArgument(f"image {name_or_id[:300]!r} may be one of {len(found)}; give more digits")
        if not found:
            raise NotFound(f"image {name_or_id[:300]!r} is not on this node; pull it")
        return _image(found[0])

    async def config(self, image_id: str) -> bytes:
        """What is known of the image, as JSON. :raise NotFound: no image has this id."""
        if image_id not in self._found:
            raise NotFound(f"image {image_id} is not on this node; pull it")
        return json.dumps(cattrs.unstructure(self._found[image_id])).encode()

    async def fs_usage(self) -> FsUsage:
        """Nothing but the file."""
        used = self._file.stat().st_blocks * 512 if self._file.exists() else 0
        return FsUsage(time.time_ns(), str(self._directory), used, 1)

    async def find(self, name: str, annotations: Mapping[str, str]) -> Image:
        """What a pull is here: have the catalogue find the image, and record it.

        :raise InfranetesError: as `IImageCatalogue.find`."""
        found: Found = await self._catalogue.find(name, annotations)
        return await self._changing(lambda: self._add(found))

    async def _add(self, found: Found) -> Image:
        known = self._found.get(found.id)
        if known is not None:  # the same under another name
            found = attrs.evolve(
                found,
                names=tuple(sorted({*known.names, *found.names})),
                digests=tuple(sorted({*known.digests, *found.digests})),
            )
        # A name that another image had is this one's from now on.
        others = {
            id: attrs.evolve(one, names=tuple(each for each in one.names if each not in found.names))
            for id, one in self._found.items()
        }
        await self._save({**others, found.id: found})
        return _image(found)

    async def remove(self, name_or_id: str) -> None:
        """Forget the image under all of its names; the catalogue's own is left alone. Not here: nothing."""

        async def remove() -> None:
            try:
                meant = self.resolve(name_or_id).id
            except NotFound:
                return
            await self._forget(meant)

        await self._changing(remove)

    async def check(self, image_id: str) -> None:
        """Forget the image if the catalogue has it no more, so that who wants it has it found again."""
        found = self._found.get(image_id)
        try:
            if found is None or await self._catalogue.present(found):
                return
        except InfranetesError as error:
            _log.debug("image {image} is kept: {error}", image=image_id, error=error)
            return
        _log.warn("image {image} ({machine}) is no longer there", image=image_id, machine=found.machine)
        await self._changing(lambda: self._forget(image_id))

    async def _forget(self, image_id: str) -> None:
        await self._save({id: one for id, one in self._found.items() if id != image_id})

    async def _changing(self, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """`change` when no other is under way."""
        changed: T = await self._lock.run(lambda: Deferred.fromCoroutine(change()))
        return changed

    async def archive(self, image_id: str, present: int = 0) -> AsyncIterator[bytes]:
        """:raise FailedPrecondition: there is none."""
        raise FailedPrecondition(f"image {image_id} of {self._catalogue.name} can't be loaded into a VM")
        yield b""

    async def _save(self, found: dict[str, Found]) -> None:
        text = json.dumps(cattrs.unstructure(list(found.values())))

        def write() -> None:
            beside = self._file.with_suffix(".new")
            with open(beside, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self._file)

        try:
            await in_thread(self._reactor, write)
        except OSError as error:
            raise ResourceExhausted(f"{self._file} can't be written: {error.strerror}") from None
        self._found = found


def _image(found: Found) -> Image:
    return Image(
        id=found.id,
        repo_tags=found.names,
        repo_digests=found.digests,
        size=found.size or 1,  # kubelet takes 0 for a fault
        diff_ids=(),
        user="",
        pinned=False,
        url=found.url,
        machine=found.machine,
    )
