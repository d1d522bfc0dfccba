# SPDX-License-Identifier: Apache-2.0
"""Volumes that kubelet has had published: what stands for them among the node's mounts.

A volume is a disk of the pod's VM, and there is no VM yet when kubelet asks for its volumes. So what is
mounted at the path that kubelet names is a tiny tmpfs with a file that says which volume belongs there and
how. Directories can be made in it, as kubelet does for subPaths, but it is full: a container of another
runtime that mounts it can write nothing that would be lost.

Its source in the mount table is `infranetes:VOLUME`. The node's mount table is the only record of it: it
survives the daemon, ends with the node's boot as every mount does, and a subPath, which kubelet binds, still
shows the same file system with the path in it.

This module is for volumes with a file system. Raw ones are the task of `published_devices`, which uses the
same document.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence

import attrs

from infranetes.providers.volumes import is_volume_id
from infranetes.volumes.mount_table import Mount, MountTable, mount_of
from infranetes.volumes.tmpfs import Tmpfs, unmount
from infranetes_common.errors import (
    AlreadyExists,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    Unavailable,
)
from infranetes_common.paths import make_directories, open_path, resolve
from infranetes_common.volume_disks import FILESYSTEMS

MAX_GROUP = 2**32 - 2  # the largest gid
MAX_FLAGS = 32
MAX_FLAG = 256  # bytes of a mount flag
FILE = "volume.json"
PREFIX = b"infranetes:"
_TYPE = "tmpfs"
_MAX_FILE = 16 * 1024
DIRECTORY_MODE = 0o750
_VOLUME_OF_POD = rb"/volumes/[^/~]+~[^/]+/[^/]+(/mount)?"  # below the pod's directory; CSI's with /mount


@attrs.frozen
class PublishedVolume:
    """A volume as a pod is to have it.

    :ivar volume: its id. :ivar filesystem: "": none, for the pod gets the disk itself (`raw`).
    :ivar mount_flags: options of the mount in the VM, as the cluster's users gave them.
    :ivar read_only: whether the pod may not write to it.
    :ivar group: the id of the group that is to own its files (fsGroup); None: they stay as they are.
    :ivar below: the path in the volume that is meant (subPath); "": all of it. It has no `..`."""

    volume: str
    filesystem: str = "ext4"
    mount_flags: tuple[str, ...] = ()
    read_only: bool = False
    group: int | None = None
    below: str = ""

    @property
    def raw(self) -> bool:
        """Whether containers get the block device itself rather than a file system."""
        return not self.filesystem


def read(host_path: str, table: MountTable) -> PublishedVolume | None:
    """Read the published volume that a path of the node is, or is a part of; None: no volume is.

    :raise FailedPrecondition: a volume is published there, but its description can't be read."""
    try:
        path = resolve(host_path)
        mounts = table.mounts()
        found = mount_of(mounts, os.fsencode(path))
        if not _is_ours(found):
            return None
        inside = found.location(os.fsencode(path)).path
        return attrs.evolve(_read(mounts, found), below=os.fsdecode(inside).strip("/"))
    except OSError as error:
        raise FailedPrecondition(f"{host_path} can't be looked at: {error.strerror}") from None


def targets(volume_id: str, table: MountTable) -> list[str]:
    """Return the paths at which a volume is published.

    :raise Unavailable: the node's mounts can't be read."""
    try:
        mounts = table.mounts()
    except OSError as error:
        raise Unavailable(f"the node's mounts can't be read: {error.strerror}") from None
    source = PREFIX + volume_id.encode()
    found = [one for one in mounts if _is_ours(one) and one.root == b"/" and one.source == source]
    return [os.fsdecode(one.mount_point) for one in found]


def for_pod(uid: str, table: MountTable) -> list[PublishedVolume]:
    """Return the volumes published for the pod with this UID, by kubelet's paths, ordered by volume id.

    A volume whose description can't be read is left out.

    :raise Unavailable: the node's mounts can't be read."""
    whole = re.compile(rb".*/pods/" + re.escape(os.fsencode(uid)) + _VOLUME_OF_POD, re.DOTALL)
    try:
        mounts = table.mounts()
    except OSError as error:
        raise Unavailable(f"the node's mounts can't be read: {error.strerror}") from None
    found = {}
    for one in mounts:
        if _is_ours(one) and one.root == b"/" and whole.fullmatch(one.mount_point):
            with contextlib.suppress(FailedPrecondition):
                volume = _read(mounts, one)
                found[volume.volume] = volume
    return [found[id] for id in sorted(found)]


def publish(target: str, volume: PublishedVolume, table: MountTable) -> None:
    """Publish a volume at a path, which is made. Idempotent. It appears at one instant, whole.

    :raise InvalidArgument: the path or the volume can't be.
    :raise AlreadyExists: the same volume is published there in another way.
    :raise FailedPrecondition: another volume is, or the daemon may not mount, or kubelet would not see it."""
    check(volume)
    check_target(target)
    try:
        path = os.fsencode(resolve(target))
        on = mount_of(table.mounts(), path)
        if on.mount_point == path and _is_ours(on):
            check_same(target, read(target, table), volume)
            return
        if on.slave:
            raise not_seen(target)
        make_directories(path, DIRECTORY_MODE)
        content = json.dumps(document(volume)).encode()
        with Tmpfs(PREFIX + volume.volume.encode(), len(content)) as made:
            made.write(FILE, content)
            directory = open_path(path, os.O_PATH | os.O_DIRECTORY)
            try:
                made.mount(directory)
            finally:
                os.close(directory)
    except OSError as error:
        if error.errno == errno.EPERM:
            raise may_not(target, "mount") from None
        raise Unavailable(f"{target} can't be mounted: {error.strerror}") from None


def unpublish(target: str, table: MountTable) -> None:
    """Remove what is published at a path, and the path. Idempotent.

    :raise InvalidArgument: the path can't be.
    :raise FailedPrecondition: something else is there. :raise Unavailable: it can't be unmounted."""
    check_target(target)
    try:
        path = os.fsencode(resolve(target))
        while (on := mount_of(table.mounts(), path)).mount_point == path:
            if not _is_ours(on):
                raise FailedPrecondition(
                    f"{target}: a {on.fs_type} is mounted there that is not one of Infranetes' volumes"
                )
            unmount(path)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(path)
    except NotADirectoryError:
        raise FailedPrecondition(
            f"{target} is no directory: no volume of Infranetes is published there"
        ) from None
    except OSError as error:
        raise Unavailable(f"{target} can't be unpublished: {error.strerror}") from None


def check(volume: PublishedVolume) -> None:
    """Check a volume's description. :raise InvalidArgument: no volume can be like that."""
    if not is_volume_id(volume.volume):
        raise InvalidArgument(f"{volume.volume[:80]!r} can't be a volume's id")
    if volume.raw and (volume.mount_flags or volume.group is not None):
        raise InvalidArgument(
            f"volume {volume.volume}: a block device has no mount options, and no group of its files"
        )
    if not volume.raw and volume.filesystem not in FILESYSTEMS:
        raise InvalidArgument(
            f"volume {volume.volume}: the file system {volume.filesystem[:80]!r} is not offered; known are "
            f"{' and '.join(FILESYSTEMS)}"
        )
    if len(volume.mount_flags) > MAX_FLAGS:
        raise InvalidArgument(f"volume {volume.volume}: over {MAX_FLAGS} mount options")
    for flag in volume.mount_flags:
        if not 0 < len(flag.encode()) <= MAX_FLAG or not flag.isprintable() or "," in flag:
            raise InvalidArgument(f"volume {volume.volume}: {flag[:80]!r} is no mount option")
    if volume.group is not None and not 0 <= volume.group <= MAX_GROUP:
        raise InvalidArgument(f"volume {volume.volume}: {volume.group} is no group's id")


def check_target(target: str) -> None:
    """Check that something can be published at a path. :raise InvalidArgument: nothing can."""
    if not target.startswith("/") or "\0" in target or len(os.fsencode(target)) >= 4096:
        raise InvalidArgument(f"target_path: {target[:256]!r} is no absolute path")
    if not os.path.normpath(target).strip("/"):
        raise InvalidArgument("target_path: nothing is published at the root directory")


def check_same(target: str, published: PublishedVolume | None, volume: PublishedVolume) -> None:
    """Check that what is published at a path is what is to be.

    :raise AlreadyExists: it is in another way. :raise FailedPrecondition: it is another volume."""
    if published == attrs.evolve(volume, below=""):
        return
    if published is not None and published.volume == volume.volume:
        raise AlreadyExists(f"{target}: volume {volume.volume} is published there in another way already")
    other = published.volume if published is not None else "?"
    raise FailedPrecondition(f"{target}: volume {other} is published there, not {volume.volume}")


def _is_ours(mount: Mount) -> bool:
    """Return whether a mount is ours. An NFS server may have any name, so the type counts, too."""
    return mount.fs_type == _TYPE and mount.source.startswith(PREFIX)


def _read(mounts: Sequence[Mount], mount: Mount) -> PublishedVolume:
    """Read the volume's description from the file in a file system of ours. A bind mount of a part does not
    show this file, so it is read where the whole file system is mounted."""
    name = mount.source.removeprefix(PREFIX).decode(errors="replace")
    trouble = "it is mounted nowhere as a whole"
    for one in mounts:
        if one.device != mount.device or one.root != b"/":
            continue
        try:
            content = _content(one)
            if content is None:
                continue  # hidden by another mount
            volume = volume_of(json.loads(content))
            check(volume)
            if volume.volume == name:
                return volume
            trouble = f"its file names volume {volume.volume}"
        except OSError as error:
            trouble = str(error.strerror)
        except (ValueError, KeyError, TypeError, InfranetesError) as error:
            trouble = str(error)
    raise FailedPrecondition(f"volume {name} is published, but {FILE} can't be read: {trouble}"[:500])


def _content(mount: Mount) -> bytes | None:
    path = mount.mount_point.rstrip(b"/") + b"/" + FILE.encode()
    descriptor = open_path(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}" != mount.device:
            return None
        if not stat.S_ISREG(found.st_mode):
            raise FailedPrecondition("it is no file")
        return file.read(_MAX_FILE)


def not_seen(target: str) -> FailedPrecondition:
    """Return the error for a path where the daemon mounted a volume and kubelet does not see the mount."""
    return FailedPrecondition(
        f"{target}: kubelet does not see what the daemon mounts, which has mounts of its own; give it the "
        "node's by the drop-in systemd-csi.conf (docs/persistent-volumes.md) and restart it"
    )


def may_not(target: str, what: str) -> FailedPrecondition:
    """Return the error for something that the daemon lacks the right to do."""
    return FailedPrecondition(
        f"{target}: the daemon may not {what}: it needs CAP_SYS_ADMIN and the node's loop devices, which its "
        "unit does not give; give them by the drop-in systemd-csi.conf (docs/persistent-volumes.md) and "
        "restart it"
    )


def document(volume: PublishedVolume) -> Mapping[str, object]:
    """Return the volume's description, which `volume_of` reads."""
    return {
        "volume": volume.volume,
        "filesystem": volume.filesystem,
        "mount_flags": list(volume.mount_flags),
        "read_only": volume.read_only,
        "group": volume.group,
    }


def volume_of(document: Mapping[str, object]) -> PublishedVolume:
    """Return the volume that a document tells of, unchecked.

    :raise ValueError: :raise KeyError: :raise TypeError: it is not such a document."""
    volume, filesystem, flags = document["volume"], document["filesystem"], document["mount_flags"]
    read_only, group = document["read_only"], document["group"]
    if not isinstance(volume, str) or not isinstance(filesystem, str) or not isinstance(read_only, bool):
        raise ValueError("a value has another type")
    if not isinstance(flags, list) or not all(isinstance(flag, str) for flag in flags):
        raise ValueError("mount_flags is no list of texts")
    if group is not None and (not isinstance(group, int) or isinstance(group, bool)):
        raise ValueError("group is no number")
    return PublishedVolume(volume, filesystem, tuple(flags), read_only, group)
