# SPDX-License-Identifier: Apache-2.0
"""Access to files in a container's root: symbolic links are followed only within it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from infranetes_common.errors import InvalidArgument
from infranetes_common.paths import remove_tree

_MAX_LINKS = 40
_MAX_PARTS = 4096
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def read_within(root: Path, path: str, most: int) -> bytes:
    """Read a regular file below `root`; b"" if there is none. Blocks.

    No part of the path leads out of `root`, and nothing else than a regular file is opened.

    :raise InvalidArgument: it has over `most` bytes, or can't be read.
    """
    try:
        descriptor = _opened(root, path)
        if descriptor is None:
            return b""
        with open(descriptor, "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        if error.errno in _ABSENT:
            return b""
        raise InvalidArgument(f"the image's {path} can't be read: {error.strerror}") from error
    if len(data) > most:
        raise InvalidArgument(f"the image's {path} has over {most} bytes")
    return data


def resolved(root: Path, path: str) -> tuple[str, bool]:
    """Return where a path leads within `root`, and whether symbolic links lead it to nothing. Blocks.

    :raise InvalidArgument: it has too many links.
    """
    at: list[str] = []
    parts, links, absent = _parts(path), 0, False
    while parts:
        part = parts.pop()
        if part == "..":
            del at[-1:]
            continue
        at.append(part)
        if absent:
            continue
        try:
            target = os.readlink(root.joinpath(*at))
        except OSError as error:
            absent = error.errno != errno.EINVAL  # readlink's error for a file that is not a link
            continue
        links += 1
        if links > _MAX_LINKS:
            raise InvalidArgument(f"the image's {path[:200]!r} has too many links")
        at = [] if target.startswith("/") else at[:-1]
        parts += _parts(target)
    return "/" + "/".join(at), absent and links > 0


def make_directory(root: Path, path: str, uid: int, gid: int) -> Path | None:
    """Make a directory at a path within `root`, and those above it, unless they are there. Blocks.

    Nobody changes `root` meanwhile.

    :param uid: the owner of those that are made, whose mode is 0755.
    :return: the directory; None if something else is there.
    :raise InvalidArgument: the path has too many links.
    """
    at = root
    for part in reversed(_parts(resolved(root, path)[0])):
        at /= part
        try:
            at.mkdir()
        except FileExistsError:
            continue
        except NotADirectoryError:
            return None
        at.chmod(0o755)
        os.chown(at, uid, gid)
    return at if at.is_dir() else None


def make_file(root: Path, path: str, uid: int, gid: int) -> None:
    """Make an empty file at a path within `root`, in place of anything but a regular file. Blocks.

    Links on the way are followed within `root`; one at the path itself is replaced. Nobody changes `root`
    meanwhile. If something else than a directory is on the way, nothing is made.

    :param uid: the owner of what is made.
    :raise InvalidArgument: the path has too many links.
    """
    above, _, name = path.rpartition("/")
    directory = make_directory(root, above, uid, gid)
    if directory is None:
        return
    at = directory / name
    with contextlib.suppress(FileNotFoundError):
        mode = at.lstat().st_mode
        if stat.S_ISREG(mode):
            return
        if stat.S_ISDIR(mode):
            remove_tree(at)
        else:
            at.unlink()
    at.touch()
    at.chmod(0o644)
    os.chown(at, uid, gid)


def _opened(root: Path, path: str) -> int | None:
    """Return a descriptor for reading, or None if it is not a regular file."""
    directories = [os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]  # from the root downwards
    try:
        parts, links, steps = _parts(path), 0, 0
        while parts:
            part = parts.pop()
            steps += 1
            if steps > _MAX_PARTS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if part == "..":
                if len(directories) > 1:
                    os.close(directories.pop())
                continue
            at = directories[-1]
            descriptor = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            directories.append(descriptor)
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISLNK(mode):
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                target = os.readlink("", dir_fd=descriptor)
                os.close(directories.pop())
                while target.startswith("/") and len(directories) > 1:
                    os.close(directories.pop())
                parts += _parts(target)
            elif not parts and stat.S_ISREG(mode):
                return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        return None
    finally:
        for descriptor in directories:
            os.close(descriptor)


def _parts(path: str) -> list[str]:
    """Return the names in a path, last first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]
