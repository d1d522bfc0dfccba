# SPDX-License-Identifier: Apache-2.0
"""Opening paths without following a link in any component.

`O_NOFOLLOW` only covers a path's last component: a user who can write to a directory above it may put a link
there, and a process that runs as root then writes to the link's target. openat2(2) would also do, but
systemd's filters and older kernels refuse it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator

from infranetes_common.errors import InvalidArgument

MAX_LINKS = 40  # in one path; Linux has the same limit
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
_TREE = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def parent(path: bytes) -> Iterator[tuple[int, bytes]]:
    """Open the directory that an absolute path is in; also yield the name it has there (b"." for the root).

    :raise OSError: a component is missing, is not a directory, or is a link.
    """
    *above, name = [part for part in path.split(b"/") if part] or [b"."]
    current = os.open("/", _STEP)
    try:
        for part in above:
            inner = _step(current, part)
            os.close(current)
            current = inner
        yield current, name
    finally:
        os.close(current)


def open_path(path: bytes, flags: int, mode: int = 0o600) -> int:
    """Open a path like `os.open`.

    :raise OSError: as `parent`; also if `path` itself is a link.
    """
    with parent(path) as (directory, name):
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=directory)


def make_directories(path: bytes, mode: int = 0o755) -> None:
    """Make the directories of a path that are missing, like `os.makedirs`.

    :raise OSError: as `parent`.
    """
    current = os.open("/", _STEP)
    try:
        for part in filter(None, path.split(b"/")):
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, mode, dir_fd=current)
            inner = _step(current, part)
            os.close(current)
            current = inner
    finally:
        os.close(current)


def _step(directory: int, name: bytes) -> int:
    if name == b"..":
        raise OSError(errno.EINVAL, "'..' in a path that must have none")
    try:
        return os.open(name, _STEP, dir_fd=directory)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, f"{os.fsdecode(name)!r} on the way is a link") from None
        raise


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Delete a directory with all that is in it, however deep: `shutil.rmtree` calls itself for each level.

    No link is followed. What disappears meanwhile is no error.

    :raise OSError: something can't be deleted, or a directory was moved elsewhere meanwhile."""
    at = os.open(path, _TREE)
    way: list[tuple[str, tuple[int, int]]] = []  # from the top: each directory's name, and what its parent is
    try:
        while True:
            if (deeper := _emptied(at)) is not None:
                below = os.open(deeper, _TREE, dir_fd=at)
                way.append((deeper, _identity(at)))
            elif way:
                below = os.open("..", _TREE, dir_fd=at)
            else:
                break
            os.close(at)
            at = below
            if deeper is None:
                name, parent = way.pop()
                if _identity(at) != parent:
                    raise OSError(errno.EAGAIN, "a directory was moved while it was being deleted")
                os.rmdir(name, dir_fd=at)
    finally:
        os.close(at)
    os.rmdir(path)


def _emptied(directory: int) -> str | None:
    """Delete what is in a directory, up to the first directory that is not empty. Return its name."""
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=directory)
                    continue
                try:
                    os.rmdir(entry.name, dir_fd=directory)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                    return entry.name
    return None


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def resolve(path: str, confined: Collection[str] = ()) -> str:
    """Follow the links in an absolute path. Missing components stay as they are.

    Opening the result with `open_path` opens what was found here, or fails.

    :param confined: directories in which others may write. A link inside one of them may only lead to a place
        inside the same one.
    :raise InvalidArgument: a link leads out; the message names it.
    :raise OSError: there are too many links, or one can't be read.
    """
    todo = [part for part in reversed(path.split("/")) if part]
    done: list[str] = []
    tops: set[str] = set()
    links = 0
    while todo:
        part = todo.pop()
        if part == ".":
            continue
        if part == "..":
            done[-1:] = []
            continue
        here = "/" + "/".join([*done, part])
        try:
            target = os.readlink(here)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
                raise
            done.append(part)
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        tops |= {top for top in confined if here.startswith(top.rstrip("/") + "/")}
        todo += [each for each in reversed(target.split("/")) if each]
        if target.startswith("/"):
            done = []
    found = "/" + "/".join(done)
    for top in sorted(tops):
        if found != top and not found.startswith(top.rstrip("/") + "/"):
            raise InvalidArgument(
                f"{path} leads by a link in {top}, where a container may write, out of it to {found}"
            )
    return found
