# SPDX-License-Identifier: Apache-2.0
"""Images as volumes: an image's layers are mounted as one read-only overlay.

Each image has one mount, which all containers share and which stays until the image is removed. It is noexec,
nosuid and nodev. The layers are directories of Docker's storage driver overlay2, each with a file `link` that
has a short name for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from twisted.internet.defer import DeferredLock
from twisted.internet.interfaces import IReactorThreads

from infranetes_common.commands import Command, thd_check
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers.docker.api import ImageInspect
from vmserver.containers.docker.engine import Engine, EngineError
from vmserver.containers.docker.names import LABEL_IMAGES
from vmserver.containers.sub_paths import within
from vmserver.validate import DIGEST

_SECONDS = 30
_MAX_OPTIONS = 4000  # bytes; mount(2) takes one page
_OPTIONS = "ro,noexec,nosuid,nodev"
_DRIVER = "overlay2"
_LINK = re.compile(r"[0-9A-Z]{1,64}")


class ImageVolumes:
    """Mounts images.

    :param base: the directory of the mount points; created when it is first needed."""

    def __init__(self, reactor: IReactorThreads, engine: Engine, base: Path) -> None:
        self._reactor = reactor
        self._engine = engine
        self._base = base
        self._lock = DeferredLock()

    async def paths(self, mounts: Iterable[cri.Mount]) -> dict[int, str]:
        """Mount the images among `mounts`; return their paths in the VM by their index.

        :raise FailedPrecondition: an image is not loaded.
        :raise InvalidArgument: an image has nothing at the sub path.
        """
        found: dict[int, str] = {}
        for index, mount in enumerate(mounts):
            if mount.HasField("image"):
                field = f"config.mounts {mount.container_path[:200]!r}"
                root = await self._mounted(field, mount.image.image)
                found[index] = await run_in_thread(self._reactor, within, root, mount.image_sub_path, field)
        return found

    async def release(self, image_id: str) -> None:
        """Unmount an image that is to be removed. :raise FailedPrecondition: a container uses it."""
        for container in await self._engine.list_containers(LABEL_IMAGES):
            if image_id in container["Labels"][LABEL_IMAGES].split(","):
                raise FailedPrecondition(
                    f"image {image_id} is in use as a volume; remove its containers first"
                )
        async with self._lock:
            await run_in_thread(self._reactor, _thd_unmount, self._at(image_id))

    def _at(self, image_id: str) -> Path:
        return self._base / image_id.removeprefix("sha256:")

    async def _mounted(self, field: str, image_id: str) -> Path:
        if not DIGEST.fullmatch(image_id):
            raise InvalidArgument(f"{field}: {image_id[:80]!r} is not the id of an image")
        try:
            image = await self._engine.inspect_image(image_id)
        except EngineError as error:
            if error.status == 404:
                raise FailedPrecondition(f"{field}: image {image_id} is not loaded; load it first") from error
            raise error.translated(field) from error
        at = self._at(image_id)
        async with self._lock:
            await run_in_thread(self._reactor, _thd_mount, field, _layers(field, image), at)
        return at


def _layers(field: str, image: ImageInspect) -> list[Path]:
    """Return the directories of an image's layers, the uppermost first."""
    driver = image["GraphDriver"]
    if driver["Name"] != _DRIVER:
        raise FailedPrecondition(
            f"{field}: an image as a volume needs Docker's storage driver {_DRIVER}, not {driver['Name']}"
        )
    data = driver["Data"] or {}
    lower = data.get("LowerDir") or ""
    return [Path(path) for path in [data.get("UpperDir", ""), *lower.split(":")] if path]


def _thd_mount(field: str, layers: list[Path], at: Path) -> None:
    if os.path.ismount(at):
        return
    empty = at.parent / "empty"  # an overlay needs at least two layers
    empty.mkdir(mode=0o755, parents=True, exist_ok=True)
    at.mkdir(mode=0o755, exist_ok=True)
    # Names relative to the driver's directory, which are short, so that many layers fit.
    names = [f"l/{_short_name(layer)}" for layer in layers]
    options = f"{_OPTIONS},lowerdir={':'.join([*names, str(empty)])}"
    if len(options) > _MAX_OPTIONS:
        raise FailedPrecondition(f"{field}: an image of {len(layers)} layers can't be mounted as a volume")
    command = ["mount", "-t", "overlay", "-o", options, "infranetes-image", str(at)]
    _run(command, layers[0].parent.parent, f"{field}: its image can't be mounted")


def _run(command: list[str], directory: Path, what: str) -> None:
    try:
        thd_check(Command(command, _SECONDS, directory=str(directory)))
    except InfranetesError as error:
        raise FailedPrecondition(f"{what}: {error}") from None


def _short_name(layer: Path) -> str:
    name = (layer.parent / "link").read_text().strip()
    if not _LINK.fullmatch(name):
        raise FailedPrecondition(f"Docker's layer {layer} has no short name")
    return name


def _thd_unmount(at: Path) -> None:
    if not at.is_dir():
        return
    if os.path.ismount(at):
        _run(["umount", str(at)], Path("/"), f"the image volume at {at} can't be unmounted")
    at.rmdir()
