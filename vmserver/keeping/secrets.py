# SPDX-License-Identifier: Apache-2.0
"""Volumes in memory, such as secrets, that are not to be kept: nobody uses their files, and they are emptied.

What a process has read is in its own memory, and what it was given in its environment too: nobody can find
it there. But a file that is open or mapped is found, and is lost to its process if it is emptied. So it is
refused. Source: proc_pid_fdinfo(5), proc_pid_maps(5).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound
from infranetes_common.paths import remove_tree
from vmserver.machine.mounts import mounts
from vmserver.volumes.store import VolumeStore

PROC = Path("/proc")
_ZEROS = bytes(1 << 20)
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_ANNOTATION = 'the annotation infranetes.io/keep-secrets: "true"'
_REMEDY = f"have its process close it in a hook, or keep it with {_ANNOTATION}"

File = tuple[str, int]
"""A file: its device, as MAJOR:MINOR in decimal, and its inode."""


def thd_check(store: VolumeStore, ids: Collection[str], pids: Mapping[str, Collection[int]]) -> None:
    """Check that volumes can be emptied, and that no others hold what can't be brought again.

    :param pids: the processes of each container; none of them runs.
    :raise InvalidArgument: one is not in memory. :raise FailedPrecondition: one is used, or would be kept."""
    shared = set(store.shared_in_memory())
    for id in ids:
        if id not in shared and _exists(store, id):
            raise InvalidArgument(f"volume {id} is not in memory, or has a size limit: it is not emptied")
    for id in sorted(shared - set(ids)):
        raise FailedPrecondition(
            f"volume {id} is in the VM's memory and nobody would bring it again; keep it with {_ANNOTATION}"
        )
    files, directories = _contents(store.path(id) for id in shared)
    device = store.memory_device()
    for container, processes in pids.items():
        for pid in processes:
            for file, name in _used(pid):
                if file in files or (file[0] == device and file not in directories):
                    raise FailedPrecondition(
                        f"container {container} has the file {name[:200]!r} of a secret or another volume in "
                        f"memory open or mapped, which can't be kept: {_REMEDY}"
                    )


def thd_empty(store: VolumeStore, ids: Collection[str]) -> None:
    """Overwrite all files of volumes and remove them. Containers still have the volumes mounted.

    :raise FailedPrecondition: that fails."""
    shared = set(store.shared_in_memory())
    for id in ids:
        if id in shared:
            try:
                _empty(store.path(id))
            except OSError as error:
                raise FailedPrecondition(f"volume {id} can't be emptied: {error.strerror}") from None


def _exists(store: VolumeStore, id: str) -> bool:
    try:
        store.path(id)
    except NotFound:
        return False
    return True


def _empty(top: Path) -> None:
    for path, found in _files(top):
        if stat.S_ISREG(found.st_mode):
            _overwrite(path)
    if top.is_dir():
        for child in list(top.iterdir()):
            remove_tree(child) if child.is_dir() and not child.is_symlink() else child.unlink()


def _overwrite(path: Path) -> None:
    """Replace a file's content by zeros, since the pages of a removed file keep theirs, and make it empty."""
    descriptor = os.open(path, _OPEN)
    try:
        size = os.fstat(descriptor).st_size
        for at in range(0, size, len(_ZEROS)):
            os.pwrite(descriptor, _ZEROS[: size - at], at)
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _contents(tops: Iterable[Path]) -> tuple[set[File], set[File]]:
    """Return the files and the directories of volumes."""
    files: set[File] = set()
    directories: set[File] = set()
    for top in tops:
        files.update(_file(found) for _, found in _files(top))
        for directory, _, _ in os.walk(top):
            directories.add(_file(os.lstat(directory)))
    return files, directories


def _files(top: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield what a volume has that is no directory."""
    if not top.is_dir():
        yield top, top.lstat()
        return
    for directory, _, names in os.walk(top):
        for name in names:
            path = Path(directory, name)
            yield path, path.lstat()


def _file(found: os.stat_result) -> File:
    return f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}", found.st_ino


def _used(pid: int) -> Iterator[tuple[File, str]]:
    """Yield the files that a process has open or mapped, and their names there.

    They are not looked at themselves: a file system may be in a process that is held, and never answer."""
    top = PROC / str(pid)
    try:
        devices = {each.id: each.device for each in mounts(top / "mountinfo")}
        names = os.listdir(top / "fdinfo")
        maps = (top / "maps").read_text(errors="replace")
    except OSError:
        return  # it has ended
    for name in names:
        try:
            facts = dict(
                line.split(":", 1) for line in (top / "fdinfo" / name).read_text().splitlines() if ":" in line
            )
            device = devices.get(int(facts.get("mnt_id", "-1")), "")
            if device:
                yield (device, int(facts.get("ino", "0"))), os.readlink(top / "fd" / name)
        except (OSError, ValueError):
            continue
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[4] != "0":
            major, _, minor = fields[3].partition(":")
            yield (f"{int(major, 16)}:{int(minor, 16)}", int(fields[4])), fields[5]
