# SPDX-License-Identifier: Apache-2.0
"""The place of volumes in the VM: `BASE/ID/directory` or `BASE/ID/file`, on the disk or in memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from infranetes_common.filesync.tree import Tree
from infranetes_common.paths import remove_tree
from vmserver.machine.huge_pages import check_size, huge_page_sizes
from vmserver.machine.mounts import NO_FLAGS, Flag, mount, mounts_below, unmount
from vmserver.validate import CONTAINER_ID

_FILE, _DIRECTORY = "file", "directory"


class VolumeStore:
    """Volumes by their ids. Every method blocks: call it in a thread.

    :param disk: the base of volumes that may be on a disk.
    :param memory: the base of those that may not, such as secrets; a tmpfs is mounted there unless `mount`
        is false.
    :param attached: the base of those that are disks of their own, which are only looked up here.
    """

    def __init__(self, disk: Path, memory: Path, attached: Path | None = None, *, mount: bool) -> None:
        self._disk = disk
        self.attached = attached
        self._memory = memory
        self._mount = mount

    def path(self, id: str) -> Path:
        """Return the path that a container mounts. :raise NotFound: there is no such volume."""
        for base in (self._memory, self._disk):
            for name in (_FILE, _DIRECTORY):
                path = base / _checked(id) / name
                if path.exists():
                    return path
        path = (self.attached or self._disk) / id / _DIRECTORY
        if os.path.ismount(path):
            return path
        raise NotFound(f"volume {id} is not in this VM")

    def tree(self, id: str) -> Tree:
        """Return a volume's files. :raise NotFound: there is no such volume."""
        return _tree(self.path(id))

    def make(
        self, id: str, *, file: bool, in_memory: bool, size_limit: int = 0, huge_page_size: int = 0
    ) -> Tree:
        """Make a volume, empty unless it is there already.

        :param size_limit: bytes that a directory in memory takes, on a tmpfs of its own; 0: as many
            as the memory of all volumes does.
        :param huge_page_size: the files of a directory in memory are huge pages of so many bytes; 0: they are
            not.
        :raise InvalidArgument: only a directory in memory has a size limit, or is of huge pages.
        :raise FailedPrecondition: it is there as the other kind, or can't be made.
        """
        if (size_limit or huge_page_size) and (file or not in_memory):
            raise InvalidArgument(f"volume {id}: only a directory in memory has a size limit or huge pages")
        if huge_page_size:
            check_size(huge_page_size, huge_page_sizes() if self._mount else [])
        try:
            path = self.path(id)
        except NotFound:
            base = self._memory if in_memory else self._disk
            try:
                self._prepare(base, in_memory)
                (base / id).mkdir(mode=0o700, exist_ok=True)
                path = base / id / (_FILE if file else _DIRECTORY)
                if file:
                    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
                else:
                    path.mkdir(mode=0o700)
            except OSError as error:
                raise FailedPrecondition(f"volume {id} can't be made in the VM: {error}") from None
        if (path.name == _FILE) is not file:
            raise FailedPrecondition(f"volume {id} is a {path.name} already")
        if (size_limit or huge_page_size) and self._mount and not os.path.ismount(path):
            kind = "hugetlbfs" if huge_page_size else "tmpfs"
            sizes = {"size": size_limit, "pagesize": huge_page_size}
            options = ["mode=0700", *(f"{name}={size}" for name, size in sizes.items() if size)]
            # Without flags, as kubelet mounts it: containers see the flags of this mount.
            mount(kind, str(path), kind, NO_FLAGS, ",".join(options))
        return _tree(path)

    def shared_in_memory(self) -> list[str]:
        """Return the volumes in memory that have no file system of their own: those without a size limit."""
        if not self._memory.is_dir():
            return []
        tops = [each for each in sorted(self._memory.iterdir()) if CONTAINER_ID.fullmatch(each.name)]
        own = {each.point for each in mounts_below(self._memory)}
        return [each.name for each in tops if str(each / _DIRECTORY) not in own]

    def memory_device(self) -> str:
        """Return the device of the file system that they share, as MAJOR:MINOR; "": they have none."""
        if not os.path.ismount(self._memory):
            return ""
        device = os.stat(self._memory).st_dev
        return f"{os.major(device)}:{os.minor(device)}"

    def rename(self, id: str, new_id: str) -> None:
        """Give a volume another id; containers still have it mounted. Idempotent.

        :raise NotFound: it is neither there nor renamed already.
        :raise FailedPrecondition: there is another one with the new id."""
        for base in (self._memory, self._disk):
            top, new = base / _checked(id), base / _checked(new_id)
            if not top.is_dir():
                continue
            if new.exists():
                raise FailedPrecondition(f"there is a volume {new_id} already, so {id} can't be it")
            try:
                top.rename(new)
            except OSError as error:
                raise FailedPrecondition(f"volume {id} can't be renamed: {error.strerror}") from None
            return
        self.path(new_id)

    def remove(self, id: str) -> None:
        """Remove a volume, if it is there. What containers have mounted in it is unmounted, not removed.

        :raise FailedPrecondition: something can't be unmounted.
        """
        for base in (self._memory, self._disk):
            top = base / _checked(id)
            for inner in reversed(mounts_below(top)):
                with contextlib.suppress(Unavailable):
                    unmount(inner.point)
            left = mounts_below(top)
            if left:
                raise FailedPrecondition(f"volume {id} still has a file system mounted at {left[0].point}")
            with contextlib.suppress(OSError):
                remove_tree(top)

    def _prepare(self, base: Path, in_memory: bool) -> None:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        if in_memory and self._mount and not os.path.ismount(base):
            # A tmpfs of its own, since /run is mounted noexec and a secret may be a program.
            mount("tmpfs", str(base), "tmpfs", Flag.NO_SETID | Flag.NO_DEVICES, "mode=0700")


def _tree(path: Path) -> Tree:
    """Return the volume's own files, without file systems mounted in it: these may be too large to send."""
    return Tree(path, file=path.name == _FILE, setid=True, crossing=False)


def _checked(id: str) -> str:
    if not CONTAINER_ID.fullmatch(id):
        raise InvalidArgument(f"volume id {id[:80]!r}: expected 1 to 64 of 0-9, a-z and -")
    return id
