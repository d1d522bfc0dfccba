# SPDX-License-Identifier: Apache-2.0
"""A container's directory and the file systems in it, and the images that are volumes.

An image that is a volume has one mount. All containers share it, and it stays until the image is removed.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from twisted.internet.defer import DeferredLock

from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from vmserver.containers.mount_checks import field
from vmserver.containers.oci.container import OciContainer
from vmserver.containers.oci.index import unwritable
from vmserver.containers.sub_paths import within
from vmserver.layers.images import LayerImages
from vmserver.layers.rootfs import mount_rootfs, mount_volume
from vmserver.mounts import unmount
from vmserver.validate import DIGEST


class FileSystems:
    """Mounts and unmounts them.

    :param volumes: the directory of the images that are volumes; created when it is first needed.
    """

    def __init__(self, reactor: IReactor, images: LayerImages, volumes: Path) -> None:
        self._reactor = reactor
        self._images = images
        self._volumes = volumes
        self._lock = DeferredLock()

    async def make(self, container: OciContainer) -> None:
        """Make a container's directory and mount its root file system. Idempotent.

        :raise FailedPrecondition: its image, or a layer of it, is not here.
        :raise ResourceExhausted: the disk is full."""
        image = await self._images.get(container.record.state.image_id)
        layers = await self._images.directories(image)
        await run_in_thread(self._reactor, _thd_make, container, layers)

    async def volumes(self, mounts: Iterable[cri.Mount]) -> dict[int, str]:
        """Mount the images among `mounts`; return their paths in the VM by their index. Idempotent.

        :raise FailedPrecondition: an image is not here.
        :raise InvalidArgument: an image has nothing at the sub path."""
        found: dict[int, str] = {}
        for index, mount in enumerate(mounts):
            if mount.HasField("image"):
                root = await self._volume(field(mount), mount.image.image)
                found[index] = await run_in_thread(
                    self._reactor, within, root, mount.image_sub_path, field(mount)
                )
        return found

    async def _volume(self, name: str, image_id: str) -> Path:
        if not DIGEST.fullmatch(image_id):
            raise InvalidArgument(f"{name}: {image_id[:80]!r} is not the id of an image")
        layers = await self._images.directories(await self._images.get(image_id))
        at = self._at(image_id)
        async with self._lock:
            await run_in_thread(self._reactor, _thd_mount_volume, layers, at)
        return at

    async def release(self, image_id: str) -> None:
        """Unmount an image that is no volume of a container any more."""
        async with self._lock:
            await run_in_thread(self._reactor, _thd_release, self._at(image_id))

    async def unmount(self, container: OciContainer) -> None:
        """Unmount a container's root file system. Idempotent. :raise Unavailable: it can't be unmounted."""
        await run_in_thread(self._reactor, unmount, container.root)

    async def delete(self, directory: Path) -> None:
        """Delete a container's directory, with all that it wrote. Idempotent.

        :raise Unavailable: its root file system can't be unmounted.
        :raise FailedPrecondition: a file can't be deleted."""
        await run_in_thread(self._reactor, _thd_delete, directory)

    def _at(self, image_id: str) -> Path:
        return self._volumes / image_id.removeprefix("sha256:")


def _thd_make(container: OciContainer, layers: list[Path]) -> None:
    work = container.directory / "work"
    try:
        container.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in (container.bundle, container.root, container.written, work):
            directory.mkdir(exist_ok=True)
        container.written.chmod(0o755)  # the mode of the container's root directory
        if not os.path.ismount(container.root):
            mount_rootfs(layers, container.written, work, container.root)
    except OSError as error:
        raise unwritable(container.directory, error) from error


def _thd_mount_volume(layers: list[Path], at: Path) -> None:
    if os.path.ismount(at):
        return
    try:
        at.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(at, error) from error
    mount_volume(layers, at)


def _thd_release(at: Path) -> None:
    if at.is_dir():
        unmount(at)
        at.rmdir()


def _thd_delete(directory: Path) -> None:
    unmount(directory / "bundle" / "rootfs")
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ResourceExhausted(f"{directory} can't be deleted: {error.strerror}") from error
        raise FailedPrecondition(f"{directory} can't be deleted: {error}") from error
