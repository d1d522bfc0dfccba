"""A file or directory that is carried between the node and a VM: looked at, read and written.

Nothing in here leaves the directory, whatever the other side or who writes in it at the same moment
does: paths are relative, have no "..", and every component is opened without following links.
Everything blocks, so it belongs in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from infranetes_common.entries import (
    DIRECTORY,
    FILE,
    MAX_DEPTH,
    MAX_PATH,
    SETID,
    TEMPORARY,
    Bounds,
    Change,
    Changed,
    Count,
    Entry,
    Manifest,
    check_path,
    entry_of,
)
from infranetes_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted

PIECE_BYTES = 256 * 1024
LOOKS = 5  # at a tree that is being written, for two that agree
SPOOL_BYTES = 1024 * 1024
# A link that was turned, or a mount below whose server is gone.
_PASSING = (errno.EINVAL, errno.ELOOP, errno.ENOTCONN)
_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = _LOOK | os.O_DIRECTORY


class Tree:
    """One file or directory.

    :param path: of it, no link. :param file: whether it is a file, which then is written in place, since a
        mount is of its inode. :param setid: whether files written here may have set-id bits.
    :param crossing: whether what other file systems that are mounted below have belongs to it; without,
        each is an empty directory.
    """

    def __init__(self, path: str | Path, *, file: bool, setid: bool, crossing: bool = True) -> None:
        self.path = os.fsencode(path)
        self.file = file
        self._setid = setid
        self._crossing = crossing

    # ---- looking

    def scan(self, bounds: Bounds) -> Manifest:
        """Everything in it but sockets, devices and pipes.

        :raise FailedPrecondition: it is not there. :raise ResourceExhausted: over `bounds`."""
        if self.file:
            with self._opened(_LOOK | os.O_NONBLOCK) as descriptor:
                only = entry_of(b"", os.fstat(descriptor))
            if only is None or only.kind != FILE:
                raise FailedPrecondition(f"{os.fsdecode(self.path)} is no file any more")
            Count(bounds, self.path).add(only)
            return {b"": only}
        found: Manifest = {}
        with self._opened(_DIRECTORY) as top:
            own = entry_of(b"", os.fstat(top))
            assert own is not None
            found[b""] = own
            device = None if self._crossing else os.fstat(top).st_dev
            self._walk(top, b"", found, Count(bounds, self.path), device)
        return found

    def stable(self, bounds: Bounds) -> Manifest:
        """As `scan`, of a moment at which nobody was writing, as far as such a one came.

        Who replaces a tree by turning a link writes the new one before and removes the old one after it;
        a single look could find the old link, and the old tree no more."""
        before = self.scan(bounds)
        for _ in range(LOOKS):
            found = self.scan(bounds)
            if found == before:
                return found
            before = found
        raise Changed(f"{os.fsdecode(self.path)} is being written all the time")

    def _walk(self, directory: int, prefix: bytes, found: Manifest, count: Count, device: int | None) -> None:
        if prefix.count(b"/") >= MAX_DEPTH:
            raise ResourceExhausted(f"{os.fsdecode(self.path)} is over {MAX_DEPTH} directories deep")
        for name in sorted(os.listdir(directory)):
            raw = os.fsencode(name)
            if raw.startswith(TEMPORARY):
                continue
            path = prefix + raw
            if len(path) > MAX_PATH:
                raise ResourceExhausted(f"{os.fsdecode(self.path)} has paths over {MAX_PATH} bytes")
            try:
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                link = stat.S_ISLNK(status.st_mode)
                target = os.fsencode(os.readlink(name, dir_fd=directory)) if link else b""
                entry = entry_of(path, status, target)
                if entry is None:
                    continue
                count.add(entry)
                found[path] = entry
                if entry.kind == DIRECTORY and device in (None, status.st_dev):
                    inner = os.open(name, _DIRECTORY, dir_fd=directory)
                    try:
                        self._walk(inner, path + b"/", found, count, device)
                    finally:
                        os.close(inner)
            except (FileNotFoundError, NotADirectoryError):
                found.pop(path, None)
            except OSError as error:
                if not isinstance(error, PermissionError) and error.errno not in _PASSING:
                    raise
                found.pop(path, None)

    @contextlib.contextmanager
    def _opened(self, flags: int) -> Iterator[int]:
        try:
            descriptor = os.open(self.path, flags)
        except OSError as error:
            raise FailedPrecondition(
                f"{os.fsdecode(self.path)} can't be looked at: {error.strerror}"
            ) from None
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _parent(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        """The directory that `path` is in, and its name there."""
        *parts, name = check_path(path).split(b"/")
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(self._opened(_DIRECTORY))
            for part in parts:
                try:
                    directory = os.open(part, _DIRECTORY, dir_fd=directory)
                except OSError as error:
                    raise Changed(
                        f"{os.fsdecode(path)!r} in {os.fsdecode(self.path)}: {error.strerror}"
                    ) from None
                stack.callback(os.close, directory)
            yield directory, name

    # ---- reading

    def read(self, entries: Iterable[Entry]) -> Iterator[Change]:
        """These entries, each file with its content.

        :raise Changed: a file is no longer what its entry says."""
        for entry in entries:
            yield entry
            if entry.kind == FILE:
                yield from self._content(entry)

    def _content(self, entry: Entry) -> Iterator[bytes]:
        flags = _LOOK | os.O_NONBLOCK  # who opens a pipe would wait for its writer
        try:
            if self.file:
                descriptor = os.open(self.path, flags)
            else:
                with self._parent(entry.path) as (directory, name):
                    descriptor = os.open(name, flags, dir_fd=directory)
        except OSError as error:
            raise Changed(f"{os.fsdecode(entry.path)!r}: {error.strerror}") from None
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            left = entry.size
            self._check_same(descriptor, entry)
            while left:
                piece = file.read(min(left, PIECE_BYTES))
                if not piece:
                    raise Changed(f"{os.fsdecode(entry.path)!r} has become shorter")
                left -= len(piece)
                if not left:
                    self._check_same(descriptor, entry)
                yield piece

    def _check_same(self, descriptor: int, entry: Entry) -> None:
        found = entry_of(entry.path, os.fstat(descriptor))
        if found is None or found.key != entry.key:
            raise Changed(f"{os.fsdecode(entry.path)!r} in {os.fsdecode(self.path)} is being written")

    # ---- writing

    def make_directory(self, entry: Entry) -> None:
        """A directory; what else is in its place goes."""
        if not entry.path:
            with self._opened(_DIRECTORY) as top:
                self._dress(top, entry)
            return
        with self._parent(entry.path) as (directory, name):
            try:
                inner = os.open(name, _DIRECTORY, dir_fd=directory)
            except FileNotFoundError:
                os.mkdir(name, 0o700, dir_fd=directory)
                inner = os.open(name, _DIRECTORY, dir_fd=directory)
            except OSError:
                _remove(directory, name)
                os.mkdir(name, 0o700, dir_fd=directory)
                inner = os.open(name, _DIRECTORY, dir_fd=directory)
            try:
                self._dress(inner, entry)
            finally:
                os.close(inner)

    def make_link(self, entry: Entry) -> None:
        """A link, in one step where another one is."""
        with self._parent(entry.path) as (directory, name):
            temporary = _temporary()
            os.symlink(entry.target, temporary, dir_fd=directory)
            try:
                os.chown(temporary, entry.uid, entry.gid, dir_fd=directory, follow_symlinks=False)
                _replace(directory, temporary, name)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=directory)
                raise

    def begin_file(self, entry: Entry) -> Writing:
        """A file, seen once it is whole."""
        if self.file:
            return _InPlace(self, entry)
        return _Renamed(self, entry)

    def remove(self, path: bytes) -> None:
        """Gone already, or a directory in which something is: nothing happens."""
        if not path or self.file:
            raise InvalidArgument("a volume itself can't be removed so")
        with contextlib.suppress(Changed, OSError), self._parent(path) as (directory, name):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                os.rmdir(name, dir_fd=directory)
            elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                os.unlink(name, dir_fd=directory)

    def _dress(self, descriptor: int, entry: Entry) -> None:
        """Owner first: changing it takes set-id bits away."""
        mode = entry.mode
        if entry.kind == FILE and not self._setid:
            mode &= ~SETID
        os.fchown(descriptor, entry.uid, entry.gid)
        os.fchmod(descriptor, mode)
        if entry.kind == FILE:
            os.utime(descriptor, ns=(entry.mtime, entry.mtime))


class Writing:
    """A file that is coming."""

    def write(self, data: bytes) -> None:
        """The next piece."""
        raise NotImplementedError

    def done(self) -> None:
        """All is there."""
        raise NotImplementedError

    def abort(self) -> None:
        """It will not be whole."""
        raise NotImplementedError


class _Renamed(Writing):
    def __init__(self, tree: Tree, entry: Entry) -> None:
        self._tree = tree
        self._entry = entry
        self._stack = contextlib.ExitStack()
        self._directory, self._name = self._stack.enter_context(tree._parent(entry.path))
        self._temporary = _temporary()
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

    def done(self) -> None:
        try:
            self._tree._dress(self._file, self._entry)
            _replace(self._directory, self._temporary, self._name)
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


class _InPlace(Writing):
    def __init__(self, tree: Tree, entry: Entry) -> None:
        self._tree = tree
        self._entry = entry
        self._spool: IO[bytes] = tempfile.SpooledTemporaryFile(  # noqa: SIM115
            SPOOL_BYTES, dir=os.path.dirname(os.fsdecode(tree.path))
        )

    def write(self, data: bytes) -> None:
        self._spool.write(data)

    def done(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            descriptor = os.open(self._tree.path, flags, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise FailedPrecondition(f"{os.fsdecode(self._tree.path)} is no file any more")
                self._spool.seek(0)
                at = 0
                while piece := self._spool.read(SPOOL_BYTES):
                    view = memoryview(piece)
                    while view:
                        written = os.pwrite(descriptor, view, at)
                        at, view = at + written, view[written:]
                os.ftruncate(descriptor, at)
                self._tree._dress(descriptor, self._entry)
            finally:
                os.close(descriptor)
        finally:
            self.abort()

    def abort(self) -> None:
        self._spool.close()


def _temporary() -> bytes:
    return TEMPORARY + secrets.token_hex(8).encode()


def _replace(directory: int, temporary: bytes, name: bytes) -> None:
    try:
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except IsADirectoryError:
        _remove(directory, name)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)


def _remove(directory: int, name: bytes) -> None:
    """Whatever it is, with all that is in it; never through a link."""
    try:
        os.unlink(name, dir_fd=directory)
        return
    except IsADirectoryError:
        pass
    inner = os.open(name, _DIRECTORY, dir_fd=directory)
    try:
        for one in os.listdir(inner):
            _remove(inner, os.fsencode(one))
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=directory)
