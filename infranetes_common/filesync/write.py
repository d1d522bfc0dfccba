# SPDX-License-Identifier: Apache-2.0
"""Writing one entry of a tree. A file is visible once it is whole; a link is switched in one step."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
from typing import IO, Protocol

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.filesync.manifest import FILE, MAX_DEPTH, SETID, TEMPORARY, Changed, Entry
from infranetes_common.filesync.tree import DIRECTORY_FLAGS, Tree
from infranetes_common.paths import open_path, parent

SPOOL_BYTES = 1024 * 1024  # of a file to be written in place, held in memory until the file is whole


class FileWriter(Protocol):
    """A file whose content is arriving."""

    def write(self, data: bytes) -> None:
        """Take the next part."""

    def finish(self) -> None:
        """Make the file visible, now that all of it is here."""

    def abort(self) -> None:
        """Drop the content so far; the file stays as it was."""


def make_directory(tree: Tree, entry: Entry) -> None:
    """Make a directory, or give one its mode and owner; anything else in its place is removed."""
    if not entry.path:
        with tree.opened(DIRECTORY_FLAGS) as top:
            _set_status(tree, top, entry)
        return
    with tree.parent_of(entry.path) as (directory, name):
        try:
            inner = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
        except FileNotFoundError:
            os.mkdir(name, 0o700, dir_fd=directory)
            inner = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
        except OSError:
            _remove_all(directory, name)
            os.mkdir(name, 0o700, dir_fd=directory)
            inner = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
        try:
            _set_status(tree, inner, entry)
        finally:
            os.close(inner)


def make_link(tree: Tree, entry: Entry) -> None:
    """Make a symbolic link, or switch one in a single step."""
    with tree.parent_of(entry.path) as (directory, name):
        temporary = _temporary_name()
        os.symlink(entry.target, temporary, dir_fd=directory)
        try:
            os.chown(temporary, entry.uid, entry.gid, dir_fd=directory, follow_symlinks=False)
            _rename(directory, temporary, name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise


def begin_file(tree: Tree, entry: Entry) -> FileWriter:
    """Begin to write a file."""
    return _InPlaceFile(tree, entry) if tree.file else _RenamedFile(tree, entry)


def remove(tree: Tree, path: bytes) -> None:
    """Remove a file, a link or an empty directory. What is gone, or is not empty, is left alone.

    :raise OSError: it can't be removed.
    """
    if not path or tree.file:
        raise InvalidArgument("a volume itself can't be removed like this")
    with contextlib.suppress(Changed, FileNotFoundError), tree.parent_of(path) as (directory, name):
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            try:
                os.rmdir(name, dir_fd=directory)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            os.unlink(name, dir_fd=directory)


def link_target(tree: Tree, path: bytes) -> bytes | None:
    """Return where the link at `path` leads now; None if there is no link."""
    try:
        with tree.parent_of(path) as (directory, name):
            return os.readlink(name, dir_fd=directory)
    except (Changed, OSError):
        return None


class _RenamedFile(FileWriter):
    """A file that is written under a temporary name in the same directory, and then renamed."""

    def __init__(self, tree: Tree, entry: Entry) -> None:
        self._tree = tree
        self._entry = entry
        self._stack = contextlib.ExitStack()
        self._directory, self._name = self._stack.enter_context(tree.parent_of(entry.path))
        self._temporary = _temporary_name()
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(self._temporary, flags, 0o600, dir_fd=self._directory)
        except BaseException:
            self._stack.close()
            raise

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]

    def finish(self) -> None:
        try:
            _set_status(self._tree, self._file, self._entry)
            _rename(self._directory, self._temporary, self._name)
        except BaseException:
            self.abort()
            raise
        os.close(self._file)
        self._stack.close()

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._temporary, dir_fd=self._directory)
        os.close(self._file)
        self._stack.close()


class _InPlaceFile(FileWriter):
    """Spooled until it is whole, then written over the old content: the inode stays."""

    def __init__(self, tree: Tree, entry: Entry) -> None:
        self._tree = tree
        self._entry = entry
        self._spool: IO[bytes] = io.BytesIO()

    def write(self, data: bytes) -> None:
        if isinstance(self._spool, io.BytesIO) and self._spool.tell() + len(data) > SPOOL_BYTES:
            file = _unnamed_file_beside(self._tree.path)
            file.write(self._spool.getvalue())
            self._spool = file
        self._spool.write(data)

    def finish(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            descriptor = open_path(self._tree.path, flags, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise FailedPrecondition(f"{os.fsdecode(self._tree.path)} is no file any more")
                _clear_setid(self._tree, descriptor)
                self._copy_to(descriptor)
                _set_status(self._tree, descriptor, self._entry)
            finally:
                os.close(descriptor)
        finally:
            self.abort()

    def _copy_to(self, descriptor: int) -> None:
        self._spool.seek(0)
        at = 0
        while chunk := self._spool.read(SPOOL_BYTES):
            view = memoryview(chunk)
            while view:
                written = os.pwrite(descriptor, view, at)
                at, view = at + written, view[written:]
        os.ftruncate(descriptor, at)

    def abort(self) -> None:
        self._spool.close()


def _clear_setid(tree: Tree, descriptor: int) -> None:
    """Take set-id bits from a file before it gets the other side's content."""
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if mode & SETID and not tree.setid:
        os.fchmod(descriptor, mode & ~SETID)


def _set_status(tree: Tree, descriptor: int, entry: Entry) -> None:
    """Set owner, mode and time; the owner first, since changing it clears set-id bits."""
    mode = entry.mode
    if not tree.setid:
        mode &= ~(SETID if entry.kind == FILE else stat.S_ISUID)
    os.fchown(descriptor, entry.uid, entry.gid)
    os.fchmod(descriptor, mode)
    if entry.kind == FILE:
        os.utime(descriptor, ns=(entry.mtime, entry.mtime))


def _unnamed_file_beside(path: bytes) -> IO[bytes]:
    """Open a new file without a name, on the disk or tmpfs that `path` is on."""
    with parent(path) as (directory, _):
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            descriptor = os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=directory)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise
            name = _temporary_name()
            descriptor = os.open(
                name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=directory
            )
            os.unlink(name, dir_fd=directory)
    return os.fdopen(descriptor, "w+b")


def _temporary_name() -> bytes:
    return TEMPORARY + secrets.token_hex(8).encode()


def _rename(directory: int, temporary: bytes, name: bytes) -> None:
    try:
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except IsADirectoryError:
        _remove_all(directory, name)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)


def _remove_all(directory: int, name: bytes, depth: int = 0) -> None:
    """Remove whatever is there, with all that is in it; never through a link, nor what is mounted there."""
    if depth > 2 * MAX_DEPTH:
        raise OSError(errno.ENAMETOOLONG, f"over {2 * MAX_DEPTH} directories in one another")
    try:
        os.unlink(name, dir_fd=directory)
        return
    except IsADirectoryError:
        pass
    try:
        os.rmdir(name, dir_fd=directory)  # of a mount point EBUSY, even if it is not empty
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    inner = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
    try:
        for each in os.listdir(inner):
            _remove_all(inner, os.fsencode(each), depth + 1)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=directory)
