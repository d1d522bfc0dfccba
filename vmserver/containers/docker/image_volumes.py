"""Images that containers mount as volumes: an image's layers, put together as one read-only file system.

One mount for each image, which all containers share and which stays until the image is removed. It is
noexec, nosuid and nodev, and has nothing below that could be written. Source of the layers' layout:
Docker's storage driver overlay2, whose directories have a file `link` with a short name of theirs.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.threads import deferToThreadPool

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from vmserver.containers.docker.engine import Engine, EngineError
from vmserver.validate import DIGEST

LABEL_IMAGES = "io.infranetes.images"  # ids of the images that a container mounts, with commas

_SECONDS = 30
_MAX_OPTIONS = 4000  # bytes: mount(2) takes a page
_MAX_LINKS = 40
_OPTIONS = "ro,noexec,nosuid,nodev"
_DRIVER = "overlay2"
_LINK = re.compile(r"[0-9A-Z]{1,64}")

T = TypeVar("T")


class ImageVolumes:
    """:param base: where they are mounted; made when first needed."""

    def __init__(self, reactor: Any, engine: Engine, base: Path) -> None:
        self._reactor = reactor
        self._engine = engine
        self._base = base
        self._lock = DeferredLock()

    async def paths(self, mounts: Iterable[Any]) -> dict[int, str]:
        """Where each mount of an image is in the machine, by its place among `mounts`.

        :raise FailedPrecondition: its image is not loaded. :raise InvalidArgument: nothing at its sub path.
        """
        found: dict[int, str] = {}
        for index, mount in enumerate(mounts):
            if mount.HasField("image"):
                field = f"config.mounts {mount.container_path[:200]!r}"
                root = await self._mounted(field, mount.image.image)
                found[index] = await self._thread(within, root, mount.image_sub_path, field)
        return found

    async def release(self, image_id: str) -> None:
        """Its layers are to be removed. :raise FailedPrecondition: a container uses it."""
        query = {"all": "1", "filters": {"label": [LABEL_IMAGES]}}
        for container in await self._engine.call("GET", "/containers/json", query):
            if image_id in container["Labels"][LABEL_IMAGES].split(","):
                raise FailedPrecondition(
                    f"image {image_id} is in use as a volume; remove its containers first"
                )
        await self._alone(_unmount, self._at(image_id))

    def _at(self, image_id: str) -> Path:
        return self._base / image_id.removeprefix("sha256:")

    async def _mounted(self, field: str, image_id: str) -> Path:
        if not DIGEST.fullmatch(image_id):
            raise InvalidArgument(f"{field}: image {image_id[:80]!r} is no image's id")
        try:
            image = await self._engine.call("GET", f"/images/{image_id}/json")
        except EngineError as error:
            if error.status == 404:
                raise FailedPrecondition(f"{field}: image {image_id} is not loaded; load it first") from error
            raise error.translated(field) from error
        await self._alone(_mount, field, _layers(field, image), self._at(image_id))
        return self._at(image_id)

    async def _alone(self, work: Callable[..., T], *args: Any) -> T:
        await self._lock.acquire()
        try:
            return await self._thread(work, *args)
        finally:
            self._lock.release()

    def _thread(self, work: Callable[..., T], *args: Any) -> Deferred[T]:
        running: Deferred[T] = deferToThreadPool(self._reactor, self._reactor.getThreadPool(), work, *args)
        return running


def _layers(field: str, image: Any) -> list[Path]:
    """The directories of its layers, the uppermost first."""
    driver = image["GraphDriver"]
    if driver["Name"] != _DRIVER:
        raise FailedPrecondition(
            f"{field}: an image as a volume needs Docker's storage driver {_DRIVER}, not {driver['Name']}"
        )
    lower = driver["Data"].get("LowerDir") or ""
    return [Path(path) for path in [driver["Data"]["UpperDir"], *lower.split(":")] if path]


def _mount(field: str, layers: list[Path], at: Path) -> None:
    if os.path.ismount(at):
        return
    empty = at.parent / "empty"  # the file system wants two layers at least
    empty.mkdir(mode=0o755, parents=True, exist_ok=True)
    at.mkdir(mode=0o755, exist_ok=True)
    # Relative to the driver's directory, or many layers would not fit.
    names = [f"l/{_short_name(layer)}" for layer in layers]
    options = f"{_OPTIONS},lowerdir={':'.join([*names, str(empty)])}"
    if len(options) > _MAX_OPTIONS:
        raise FailedPrecondition(f"{field}: an image of {len(layers)} layers can't be mounted as a volume")
    command = ["mount", "-t", "overlay", "-o", options, "infranetes-image", str(at)]
    _run(command, layers[0].parent.parent, f"{field}: its image can't be mounted")


def _run(command: list[str], directory: Path, what: str) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, timeout=_SECONDS)  # noqa: S603
    if done.returncode:
        raise FailedPrecondition(f"{what}: {done.stderr.decode(errors='replace').strip()}")


def _short_name(layer: Path) -> str:
    name = (layer.parent / "link").read_text().strip()
    if not _LINK.fullmatch(name):
        raise FailedPrecondition(f"Docker's layer {layer} has no short name")
    return name


def _unmount(at: Path) -> None:
    if not at.is_dir():
        return
    if os.path.ismount(at):
        _run(["umount", str(at)], Path("/"), f"the volume of an image at {at} can't be unmounted")
    at.rmdir()


def within(root: Path, sub_path: str, field: str) -> str:
    """The file or directory at `sub_path` in `root`, whose links lead nowhere else.

    :raise InvalidArgument: nothing is there.
    """
    parts = [part for part in reversed(sub_path.split("/")) if part not in ("", ".")]
    at: list[str] = []
    links = 0
    while parts:
        part = parts.pop()
        if part == "..":
            at = at[:-1]
            continue
        path = root.joinpath(*at, part)
        try:
            found = path.lstat()
        except OSError as error:
            raise InvalidArgument(f"{field}: the image has no {sub_path[:200]!r}") from error
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _MAX_LINKS:
                raise InvalidArgument(f"{field}: {sub_path[:200]!r} in the image has too many links")
            target = os.readlink(path)
            at = [] if target.startswith("/") else at
            parts += [each for each in reversed(target.split("/")) if each not in ("", ".")]
        elif stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and not parts):
            at.append(part)
        else:
            raise InvalidArgument(f"{field}: {sub_path[:200]!r} in the image is no file or directory")
    return str(root.joinpath(*at))
