# SPDX-License-Identifier: Apache-2.0
"""A container's directory and the file systems in it, and the images that are volumes.

An image that is a volume has one mount. All containers share it, and it stays until the image is removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

import attrs
from twisted.internet.defer import DeferredLock

from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from infranetes_common.paths import remove_tree
from infranetes_common.reactors import IReactor
from infranetes_common.user_namespaces import UserNamespace, mapped_ids
from infranetes_common.wire import cri
from vmserver.containers.mount_checks import field
from vmserver.containers.oci.container import OciContainer
from vmserver.containers.oci.index import unwritable
from vmserver.containers.oci.user_namespaces import UserNamespaces, check_passable, wanted_by
from vmserver.containers.sub_paths import within
from vmserver.layers.images import LayerImages
from vmserver.layers.rootfs import mount_rootfs, mount_volume
from vmserver.machine.id_mapped import id_mapped
from vmserver.machine.mounts import unmount
from vmserver.validate import DIGEST

_PASSABLE = 0o711  # so that the users of a user namespace can reach the container's root directory
_MAPPED = "mapped"  # the directory of id-mapped mounts of layers, while a root file system is made of them


@attrs.frozen
class _Mapped:
    """The ids of a user namespace, and its file."""

    users: UserNamespace
    namespace: Path


class FileSystems:
    """Mounts and unmounts the file systems of containers and of images that are volumes.

    :param volumes: the directory for images that are volumes; created when it is first needed.
    :param namespaces: the user namespaces whose ids containers see in their images.
    """

    def __init__(
        self, reactor: IReactor, images: LayerImages, volumes: Path, namespaces: UserNamespaces
    ) -> None:
        self._reactor = reactor
        self._images = images
        self._volumes = volumes
        self._namespaces = namespaces
        self._lock = DeferredLock()

    async def make(self, container: OciContainer) -> None:
        """Make a container's directory and mount its root file system. Idempotent.

        :raise FailedPrecondition: its image, or a layer of it, is not here.
        :raise ResourceExhausted: the disk is full."""
        image = await self._images.get(container.record.state.image_id)
        layers = await self._images.directories(image)
        users = wanted_by(container.record.config)
        mapped = None if users is None else _Mapped(users, await self._namespaces.get(users))
        await run_in_thread(self._reactor, _thd_make, container, layers, mapped)

    async def volumes(self, mounts: Iterable[cri.Mount]) -> dict[int, str]:
        """Mount the images among `mounts`; return their paths in the VM by their index. Idempotent.

        :raise FailedPrecondition: an image is not here.
        :raise InvalidArgument: an image has nothing at the sub path."""
        found: dict[int, str] = {}
        for index, mount in enumerate(mounts):
            if mount.HasField("image"):
                root = await self._volume(mount)
                found[index] = await run_in_thread(
                    self._reactor, within, root, mount.image_sub_path, field(mount)
                )
        return found

    async def _volume(self, wanted: cri.Mount) -> Path:
        name, image_id = field(wanted), wanted.image.image
        users = mapped_ids(wanted.uidMappings, wanted.gidMappings, name)
        if not DIGEST.fullmatch(image_id):
            raise InvalidArgument(f"{name}: {image_id[:80]!r} is not the id of an image")
        layers = await self._images.directories(await self._images.get(image_id))
        at = self._at(image_id, users)
        mapped = None if users is None else _Mapped(users, await self._namespaces.get(users))
        async with self._lock:
            await run_in_thread(self._reactor, _thd_mount_volume, layers, at, mapped)
        return at

    async def release(self, image_id: str) -> None:
        """Unmount an image that is no longer a volume of any container."""
        async with self._lock:
            await run_in_thread(self._reactor, _thd_release, self._volumes, self._at(image_id).name)

    async def unmount(self, container: OciContainer) -> None:
        """Unmount a container's root file system. Idempotent. :raise Unavailable: it can't be unmounted."""
        await run_in_thread(self._reactor, unmount, container.root)

    async def delete(self, directory: Path) -> None:
        """Delete a container's directory, with all that it wrote. Idempotent.

        :raise Unavailable: its root file system can't be unmounted.
        :raise FailedPrecondition: a file can't be deleted."""
        await run_in_thread(self._reactor, _thd_delete, directory)

    def _at(self, image_id: str, users: UserNamespace | None = None) -> Path:
        name = image_id.removeprefix("sha256:")
        if users is not None:
            name += f"-{users.uids.first}-{users.gids.first}"
        return self._volumes / name


def _thd_make(container: OciContainer, layers: list[Path], mapped: _Mapped | None) -> None:
    work = container.directory / "work"
    try:
        mode = 0o700 if mapped is None else _PASSABLE
        container.directory.mkdir(mode=mode, parents=True, exist_ok=True)
        container.directory.chmod(mode)
        for directory in (container.bundle, container.root, container.written, work):
            directory.mkdir(exist_ok=True)
        container.written.chmod(0o755)  # the upper layer's mode is that of the container's root directory
        if mapped is not None:
            check_passable(container.root)
            os.chown(container.written, mapped.users.uids.first, mapped.users.gids.first)
        if not _is_mounted(container):
            with _as_seen(layers, mapped, container.directory / _MAPPED) as seen:
                mount_rootfs(seen, container.written, work, container.root)
    except OSError as error:
        raise unwritable(container.directory, error) from error


def _is_mounted(container: OciContainer) -> bool:
    """Return whether its root is mounted; without layers, a directory of the same file system is."""
    return os.path.ismount(container.root) or os.path.samefile(container.root, container.written)


def _as_seen(
    layers: list[Path], mapped: _Mapped | None, below: Path
) -> contextlib.AbstractContextManager[list[Path]]:
    """Return layers with the ids that a container sees, mounted while the context is open."""
    if mapped is None:
        return contextlib.nullcontext(layers)
    each_once = list(dict.fromkeys(reversed(layers)))  # of equal layers, keep the highest
    return id_mapped(each_once[::-1], mapped.namespace, below)


def _thd_mount_volume(layers: list[Path], at: Path, mapped: _Mapped | None) -> None:
    if os.path.ismount(at):
        return
    try:
        at.mkdir(parents=True, exist_ok=True)
        with _as_seen(layers, mapped, at.with_name(f"{at.name}.{_MAPPED}")) as seen:
            mount_volume(seen, at)
    except OSError as error:
        raise unwritable(at, error) from error


def _thd_release(volumes: Path, name: str) -> None:
    for at in volumes.glob(f"{name}*"):  # one mount for each mapping of ids
        unmount(at)
        at.rmdir()


def _thd_delete(directory: Path) -> None:
    unmount(directory / "bundle" / "rootfs")
    for left in (directory / _MAPPED).glob("*"):
        unmount(left)
    try:
        while directory.exists():
            # Something in it may disappear meanwhile: an old log, which another thread deletes.
            with contextlib.suppress(FileNotFoundError):
                remove_tree(directory)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ResourceExhausted(f"{directory} can't be deleted: {error.strerror}") from error
        raise FailedPrecondition(f"{directory} can't be deleted: {error}") from error
