# SPDX-License-Identifier: Apache-2.0
"""Raw volumes that kubelet has had published: what stands for them among the node's block devices.

kubelet wants a block device at the path that it names, and holds a loop device on it as a lock until the pod
is gone. The volume itself is a disk of the pod's VM, which does not exist yet. So what is bound at the path
is a read-only loop device of a page or so, which holds the document that says which volume belongs there and
how: nothing can be written to it that would be lost. The file behind it is on a tmpfs that is mounted
nowhere.

The kernel's loop devices and mounts are the only record: they survive the daemon, and end with the node's
boot.

made                                what an interrupted call leaves  what the next call does
an empty file at the path           the file                         publish uses it, unpublish removes it
the loop device, until it is kept   nothing: it ends with the daemon
its mount at the path               a mount of a device without      either one unmounts it
                                    a file, or of somebody else's
the loop device, kept               all of it                        it is published

taken away                          what an interrupted call leaves
the loop device                     a mount, as above: whoever has the device open still keeps its number
its mount                           the file
the file                            nothing

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

from infranetes.volumes.mount_table import MountTable, mount_of
from infranetes.volumes.published import (
    DIRECTORY_MODE,
    PREFIX,
    PublishedVolume,
    check,
    check_same,
    check_target,
    document,
    may_not,
    not_seen,
    volume_of,
)
from infranetes.volumes.tmpfs import Tmpfs, bind, unmount
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.loop_devices import (
    LoopDevice,
    is_loop_device,
    loop_devices_of,
    new_loop_device,
    open_loop_device,
)
from infranetes_common.paths import make_directories, open_path, resolve

FILE = "infranetes-raw-volume.json"
BACKING_FILE = f"/{FILE}"  # the kernel's path of a file whose file system is mounted nowhere
_PAGE = 4096
_MAX_DOCUMENT = 8 * _PAGE
_FILE_MODE = 0o600


@attrs.frozen
class PublishedDevice:
    """A raw volume that is published. :ivar target: the path that kubelet named, without links."""

    volume: PublishedVolume
    target: str


def read(path: str) -> PublishedVolume | None:
    """Read the raw volume that a path of the node leads to, also by a link or a mount; None: there is none.

    :raise FailedPrecondition: it leads to one whose description can't be read."""
    try:
        path = resolve(path)
        if not is_loop_device(os.stat(path)):
            return None
        with open_loop_device(path) as device:
            found = _described_by(device)
        return found.volume if found is not None else None
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise FailedPrecondition(f"{path} can't be looked at: {error.strerror}") from None


def targets(volume_id: str) -> list[str]:
    """The paths at which a raw volume is published. :raise Unavailable: the node's devices can't be read."""
    with _errors(f"volume {volume_id}"):
        found = [(path, each) for path, each in _all() if each.volume.volume == volume_id]
        return [each.target for path, each in found if _is_at(each.target, path)]


def for_pod(uid: str) -> list[PublishedVolume]:
    """Return the raw volumes published for the pod with this UID, by kubelet's paths, ordered by volume id.

    :raise Unavailable: the node's devices can't be read."""
    with _errors(f"pod {uid}"):
        found = [(path, each) for path, each in _all() if os.path.basename(each.target) == uid]
        volumes = [each.volume for path, each in found if _is_at(each.target, path)]
    return sorted(volumes, key=lambda each: each.volume)


def publish(target: str, volume: PublishedVolume, table: MountTable) -> None:
    """Publish a raw volume at a path, which is made. Idempotent.

    :raise InvalidArgument: the path or the volume can't be.
    :raise AlreadyExists: the same volume is published there in another way.
    :raise FailedPrecondition: another volume is, or something else; or the daemon may not make devices or
        mount, or kubelet would not see it."""
    check(volume)
    check_target(target)
    with _errors(target):
        path = os.fsencode(resolve(target))
        if _is_published(target, path, volume, table):
            return
        on = mount_of(table.mounts(), path)
        if on.slave:
            raise not_seen(target)
        _end(lambda one, at: one.volume.volume == volume.volume and not _is_at(one.target, at))
        make_directories(os.path.dirname(path), DIRECTORY_MODE)
        os.close(open_path(path, os.O_CREAT | os.O_WRONLY | os.O_NONBLOCK, _FILE_MODE))
        _make(path, volume)


def unpublish(target: str, table: MountTable) -> None:
    """Remove the raw volume that is published at a path, and the path. Idempotent; anything else there stays.

    :raise InvalidArgument: the path can't be. :raise Unavailable: it can't be taken away."""
    check_target(target)
    with _errors(target):
        path = os.fsencode(resolve(target))
        _end(lambda one, at: one.target == os.fsdecode(path))
        _end_unreadable(path)
        _unmount(path, table)
        with contextlib.suppress(FileNotFoundError):
            if _is_empty_file(os.lstat(path)):
                os.unlink(path)


def any_published() -> bool:
    """Return whether this node has any published raw volume. :raise OSError: its devices can't be read."""
    return bool(loop_devices_of(BACKING_FILE))


def _is_published(target: str, path: bytes, volume: PublishedVolume, table: MountTable) -> bool:
    """Return whether a volume is published at a path. Remove the rest of one that was published in part.

    :raise AlreadyExists: :raise FailedPrecondition: see `check_same`."""
    if mount_of(table.mounts(), path).mount_point != path:
        return False
    try:
        about = os.stat(path)
        if is_loop_device(about):
            with open_loop_device(os.fsdecode(path)) as device:
                there = _described_by(device)
                if there is not None and there.target == os.fsdecode(path):
                    check_same(target, there.volume, volume)
                    device.keep()
                    return True
    except FileNotFoundError:
        pass  # it was the device of an earlier daemon, and is gone
    _unmount(path, table)
    if mount_of(table.mounts(), path).mount_point == path:
        raise FailedPrecondition(f"{target}: something is mounted there that is no raw volume")
    return False


def _make(path: bytes, volume: PublishedVolume) -> None:
    content = json.dumps({**document(volume), "target": os.fsdecode(path)}).encode()
    content = content.ljust(-(-len(content) // _PAGE) * _PAGE, b"\0")
    with contextlib.ExitStack() as opened:
        place = open_path(path, os.O_PATH)
        opened.callback(os.close, place)
        if not _is_empty_file(os.fstat(place)):
            raise FailedPrecondition(f"{os.fsdecode(path)}: there is something already, which stays")
        files = opened.enter_context(Tmpfs(PREFIX + volume.volume.encode(), len(content)))
        files.write(FILE, content)
        backing = files.open(FILE)
        opened.callback(os.close, backing)
        device = opened.enter_context(new_loop_device(backing))
        bind(device.descriptor, place)
        device.keep()


def _described_by(device: LoopDevice) -> PublishedDevice | None:
    """Read the volume's description from a loop device; None: the device is not ours.

    :raise FailedPrecondition: the description can't be understood."""
    if device.backing_file() != BACKING_FILE:
        return None
    try:
        found = json.loads(device.read(_MAX_DOCUMENT).rstrip(b"\0"))
        volume, target = volume_of(found), found["target"]
        check(volume)
        if not volume.raw or not isinstance(target, str):
            raise ValueError("it describes no raw volume")
        return PublishedDevice(volume, target)
    except (ValueError, KeyError, TypeError, InfranetesError) as error:
        raise FailedPrecondition(
            f"{device.path} stands for a raw volume, but does not say which: {error}"[:500]
        ) from None


def _all() -> Iterator[tuple[str, PublishedDevice]]:
    """Return all of the node's published raw volumes, by the paths of their loop devices."""
    for path in loop_devices_of(BACKING_FILE):
        with contextlib.suppress(FileNotFoundError, FailedPrecondition), open_loop_device(path) as device:
            if (found := _described_by(device)) is not None:
                yield path, found


def _end(which: Callable[[PublishedDevice, str], bool]) -> None:
    """End the loop devices of the volumes that `which` selects, given each volume and its device's path."""
    for path in [path for path, one in _all() if which(one, path)]:
        with contextlib.suppress(FileNotFoundError), open_loop_device(path) as device:
            found = _described_by(device)  # while open, the device can't be ended and reused
            if found is not None and which(found, path):
                device.end()


def _end_unreadable(path: bytes) -> None:
    """End the loop device at a path if it is ours, but its description can't be read."""
    with contextlib.suppress(FileNotFoundError):
        if is_loop_device(os.stat(path)):
            with open_loop_device(os.fsdecode(path)) as device:
                try:
                    _described_by(device)
                except FailedPrecondition:
                    device.end()


def _unmount(path: bytes, table: MountTable) -> None:
    """Unmount the loop devices that are bound at a path: ours, or what has become of one."""
    while mount_of(table.mounts(), path).mount_point == path and is_loop_device(os.stat(path)):
        unmount(path)


def _is_at(target: str, device: str) -> bool:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = os.stat(target)
        return is_loop_device(found) and found.st_rdev == os.stat(device).st_rdev
    return False


def _is_empty_file(about: os.stat_result) -> bool:
    return stat.S_ISREG(about.st_mode) and not about.st_size


@contextmanager
def _errors(target: str) -> Iterator[None]:
    """Have the system's errors say what to do. :param target: what they are about."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            raise may_not(target, "mount, or make loop devices") from None
        if error.errno == errno.ENOENT and str(error.filename).startswith("/dev/"):
            raise FailedPrecondition(
                f"{target}: this node has no {error.filename}, by which kubelet sees a raw volume: load the "
                "kernel's module `loop`"
            ) from None
        if error.errno == errno.EISDIR:
            raise FailedPrecondition(f"{target} is a directory: no raw volume is published there") from None
        raise Unavailable(f"{target}: what stands for a raw volume: {error.strerror}") from None
