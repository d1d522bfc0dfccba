# SPDX-License-Identifier: Apache-2.0
"""The parts of volumes that containers mount: a whole volume, or a part that other containers may change.

An engine mounts a path some time after the path was checked, and follows its links. A container that can
write to the volume could add a link meanwhile, and so show the VM's own files to another container. So this
module opens a part component by component, without following links, and binds it where no container reaches.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from infranetes_common.filesync.manifest import check_path
from infranetes_common.filesync.tree import DIRECTORY_FLAGS
from infranetes_common.filesync.wire import PREFIX
from infranetes_common.paths import open_path, resolve
from vmserver.machine.mounts import Flag, mount, mounts_below, unmount
from vmserver.volumes.store import VolumeStore

_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class VolumeParts:
    """The parts of volumes that containers mount. Every method blocks: call it in a thread.

    :param directory: where they are bound, as `CONTAINER/INDEX`; made when it is first needed.
    :param mount: whether to bind them; otherwise a part is only where its volume is.
    """

    def __init__(self, store: VolumeStore, directory: Path, *, mount: bool) -> None:
        self._store = store
        self._directory = directory
        self._mount = mount

    def place(self, container: str, index: int, host_path: str, *, bind: bool = True) -> str:
        """Return the path in this VM of a mount's `host_path`, which may name a volume or a part of one.

        A part that is not there is made, as a directory like the volume's own. Idempotent.

        :param bind: false: a part need not be bound, since the container is the VM.
        :raise InvalidArgument: there is no such volume, or a link leads out of it.
        :raise FailedPrecondition: the part can't be had.
        """
        if not host_path.startswith(PREFIX):
            return host_path
        id, _, below = host_path.removeprefix(PREFIX).partition("/")
        try:
            top = Path(os.path.realpath(self._store.path(id)))
        except NotFound as error:
            raise InvalidArgument(f"config.mounts: {error}; the node has to send it first") from None
        if not below:
            return str(top)
        words = f"config.mounts: subPath {below[:200]!r} of volume {id}"
        path = _inside(top, below, words)
        try:
            descriptor = _open(top, path)
        except NotADirectoryError:
            raise FailedPrecondition(f"{words}: a file of the volume is on the way") from None
        except OSError as error:
            raise FailedPrecondition(f"{words} can't be opened: {error.strerror}") from None
        try:
            if not (self._mount and bind):
                return os.path.join(top, path)
            return str(self._bound(descriptor, self._directory / container / str(index)))
        finally:
            os.close(descriptor)

    def rename(self, container: str, new: str) -> None:
        """Let a container have another id: its parts stay mounted. Idempotent.

        :raise FailedPrecondition: that fails."""
        try:
            (self._directory / container).rename(self._directory / new)
        except FileNotFoundError:
            pass  # it has none, or was renamed already
        except OSError as error:
            raise FailedPrecondition(
                f"the parts of volumes of container {container} can't be renamed: {error.strerror}"
            ) from None

    def release(self, container: str) -> None:
        """Unbind what a container had mounted. Idempotent. :raise Unavailable: something stays."""
        top = self._directory / container
        if not top.is_dir():
            return
        for each in mounts_below(top):
            unmount(each.point)
        for place in list(top.iterdir()):
            place.rmdir() if place.is_dir() else place.unlink()
        top.rmdir()

    def _bound(self, descriptor: int, at: Path) -> Path:
        if os.path.lexists(at) and any(one.point == str(at) for one in mounts_below(at.parent)):
            return at
        at.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            at.mkdir(mode=0o700, exist_ok=True)
        else:
            at.touch(mode=0o600)
        mount(f"/proc/self/fd/{descriptor}", str(at), "", Flag.BIND)
        return at


def _inside(top: Path, below: str, words: str) -> str:
    """Return a path in the volume without links. :raise InvalidArgument: one leads out of it."""
    check_path(os.fsencode(below))
    try:
        found = resolve(f"{top}/{below}", [str(top)])
    except InvalidArgument:
        raise InvalidArgument(f"{words} leads out of it by a link") from None
    except OSError as error:
        raise InvalidArgument(f"{words} can't be followed: {error.strerror}") from None
    return os.path.relpath(found, top)


def _open(top: Path, path: str) -> int:
    """Open the file or directory at a path in a directory; missing directories are made."""
    current = open_path(os.fsencode(top), DIRECTORY_FLAGS)
    own = os.fstat(current)
    for part in [] if path == "." else path.split("/"):
        try:
            inner = _step(current, part, own)
        finally:
            os.close(current)
        current = inner
    return current


def _step(directory: int, name: str, like: os.stat_result) -> int:
    try:
        inner = os.open(name, _LOOK, dir_fd=directory)
    except FileNotFoundError:
        os.mkdir(name, 0o700, dir_fd=directory)
        inner = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
        os.fchown(inner, like.st_uid, like.st_gid)  # before fchmod, since it clears the set-id bits
        os.fchmod(inner, stat.S_IMODE(like.st_mode))
    if stat.S_ISLNK(os.fstat(inner).st_mode):
        os.close(inner)
        raise Unavailable(f"{name!r} in a volume became a link while it was looked at; try again")
    return inner
