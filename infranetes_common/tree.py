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
from typing import IO, Any

import attrs

from infranetes_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable

FILE, DIRECTORY, SYMLINK = "file", "directory", "symlink"
KINDS = (FILE, DIRECTORY, SYMLINK)
PIECE_BYTES = 256 * 1024
MAX_PATH = 4096
MAX_NAME = 255
MAX_DEPTH = 128
LOOKS = 5  # at a tree that is being written, for two that agree
SPOOL_BYTES = 1024 * 1024
TEMPORARY = b".infranetes-"  # what is half written; never carried
_SETID = stat.S_ISUID | stat.S_ISGID
# A link that was turned, or a mount below whose server is gone.
_PASSING = (errno.EINVAL, errno.ELOOP, errno.ENOTCONN)
_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = _LOOK | os.O_DIRECTORY


class Changed(Unavailable):
    """It is being written at this moment: look again."""


@attrs.frozen
class Bounds:
    """What is carried at most."""

    entries: int
    bytes: int


@attrs.frozen
class Entry:
    """A file, directory or link. Its `path` is relative, b"" the top itself; `mtime` in ns since 1970."""

    path: bytes
    kind: str
    mode: int
    uid: int
    gid: int
    size: int = 0
    mtime: int = 0
    target: bytes = b""

    @property
    def key(self) -> tuple[Any, ...]:
        """What is equal for two that need no carrying. Bits that no VM may set count for nothing."""
        if self.kind == FILE:
            return (FILE, self.mode & ~_SETID, self.uid, self.gid, self.size, self.mtime)
        if self.kind == DIRECTORY:
            return (DIRECTORY, self.mode, self.uid, self.gid)
        return (SYMLINK, self.uid, self.gid, self.target)


Manifest = dict[bytes, Entry]


@attrs.frozen
class Removed:
    """What was at `path` is no more."""

    path: bytes


Change = Entry | Removed | bytes  # bytes: the next piece of the file that was named last


def check_path(path: bytes) -> bytes:
    """`path`, if it can't lead out of a directory. :raise InvalidArgument: it can, or is too long."""
    if path:
        parts = path.split(b"/")
        if (
            len(path) > MAX_PATH
            or len(parts) > MAX_DEPTH
            or b"\0" in path
            or any(part in (b"", b".", b"..") or len(part) > MAX_NAME for part in parts)
        ):
            raise InvalidArgument(f"{path[:200]!r} is no path within a volume")
        if any(part.startswith(TEMPORARY) for part in parts):
            raise InvalidArgument(f"{path[:200]!r}: such names are kept for files half written")
    return path


def check_entry(entry: Entry) -> Entry:
    """`entry`, if it is one. :raise InvalidArgument: out of bounds; says how."""
    check_path(entry.path)
    words = f"{entry.path[:200]!r} in a volume"
    if entry.kind not in KINDS:
        raise InvalidArgument(f"{words}: neither file nor directory nor link")
    if not 0 <= entry.mode <= 0o7777:
        raise InvalidArgument(f"{words}: mode {entry.mode:o}")
    if not (0 <= entry.uid < 2**32 - 1 and 0 <= entry.gid < 2**32 - 1 and 0 <= entry.size < 2**63):
        raise InvalidArgument(f"{words}: owner or size out of bounds")
    if not 0 <= entry.mtime < 2**63:
        raise InvalidArgument(f"{words}: a time out of bounds")
    if entry.kind == SYMLINK:
        if not 0 < len(entry.target) < MAX_PATH or b"\0" in entry.target:
            raise InvalidArgument(f"{words}: a link to nowhere")
    elif entry.target:
        raise InvalidArgument(f"{words}: no link, but a target")
    return entry


def ordered(entries: Iterable[Entry]) -> list[Entry]:
    """As they are to be applied: directories and files by path, then links, those being what makes a new
    state of them the one that is seen."""
    return sorted(entries, key=lambda one: (one.kind == SYMLINK, one.path))


def _entry(path: bytes, found: os.stat_result, target: bytes = b"") -> Entry | None:
    mode, uid, gid = stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid
    if stat.S_ISREG(found.st_mode):
        return Entry(path, FILE, mode, uid, gid, found.st_size, max(found.st_mtime_ns, 0))
    if stat.S_ISDIR(found.st_mode):
        return Entry(path, DIRECTORY, mode, uid, gid)
    if stat.S_ISLNK(found.st_mode):
        return Entry(path, SYMLINK, mode, uid, gid, target=target)
    return None


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
                only = _entry(b"", os.fstat(descriptor))
            if only is None or only.kind != FILE:
                raise FailedPrecondition(f"{os.fsdecode(self.path)} is no file any more")
            _Count(bounds, self.path).add(only)
            return {b"": only}
        found: Manifest = {}
        with self._opened(_DIRECTORY) as top:
            own = _entry(b"", os.fstat(top))
            assert own is not None
            found[b""] = own
            device = None if self._crossing else os.fstat(top).st_dev
            self._walk(top, b"", found, _Count(bounds, self.path), device)
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

    def _walk(
        self, directory: int, prefix: bytes, found: Manifest, count: _Count, device: int | None
    ) -> None:
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
                entry = _entry(path, status, target)
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
        found = _entry(entry.path, os.fstat(descriptor))
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
            mode &= ~_SETID
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


class Applier:
    """Applies changes in their order. A file's pieces follow its entry.

    :raise InvalidArgument: a change that is none. :raise ResourceExhausted: over `bounds`, or disk full.
    """

    def __init__(self, tree: Tree, bounds: Bounds) -> None:
        self._tree = tree
        self._count = _Count(bounds, tree.path)
        self._writing: Writing | None = None
        self._left = 0

    def feed(self, changes: Iterable[Change]) -> None:
        """Some more."""
        try:
            for change in changes:
                self._apply(change)
        except OSError as error:
            self.abort()
            kind = ResourceExhausted if error.errno in (28, 122) else FailedPrecondition  # ENOSPC EDQUOT
            raise kind(f"{os.fsdecode(self._tree.path)} can't be written: {error.strerror}") from None
        except BaseException:
            self.abort()
            raise

    def _apply(self, change: Change) -> None:
        if isinstance(change, bytes):
            if self._writing is None or len(change) > self._left:
                raise InvalidArgument("more bytes than the file in a volume was said to have")
            self._writing.write(change)
            self._left -= len(change)
            self._done_if_whole()
            return
        if self._writing is not None:
            raise InvalidArgument("fewer bytes than the file in a volume was said to have")
        if isinstance(change, Removed):
            self._tree.remove(check_path(change.path))
            return
        entry = check_entry(change)
        if (entry.path == b"") != (self._tree.file or (entry.kind == DIRECTORY and not entry.path)):
            raise InvalidArgument(f"{entry.path[:200]!r} has no place in this volume")
        if self._tree.file and entry.kind != FILE:
            raise InvalidArgument("this volume is a file")
        self._count.add(entry)
        if entry.kind == DIRECTORY:
            self._tree.make_directory(entry)
        elif entry.kind == SYMLINK:
            self._tree.make_link(entry)
        else:
            self._writing, self._left = self._tree.begin_file(entry), entry.size
            self._done_if_whole()

    def _done_if_whole(self) -> None:
        if self._writing is not None and not self._left:
            writing, self._writing = self._writing, None
            writing.done()

    def finish(self) -> None:
        """That was all. :raise InvalidArgument: the last file is not whole; nothing of it stays."""
        if self._writing is not None:
            self.abort()
            raise InvalidArgument("fewer bytes than the file in a volume was said to have")

    def abort(self) -> None:
        """No more will come."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.abort()


class _Count:
    def __init__(self, bounds: Bounds, path: bytes) -> None:
        self._bounds = bounds
        self._path = os.fsdecode(path)
        self._entries = 0
        self._bytes = 0

    def add(self, entry: Entry) -> None:
        self._entries += 1
        self._bytes += entry.size
        if self._entries > self._bounds.entries:
            raise ResourceExhausted(f"{self._path} has over {self._bounds.entries} files and directories")
        if self._bytes > self._bounds.bytes:
            raise ResourceExhausted(f"{self._path} has over {self._bounds.bytes} bytes")


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
