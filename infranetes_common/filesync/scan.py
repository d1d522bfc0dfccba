# SPDX-License-Identifier: Apache-2.0
"""Reading of a tree: its entries, and the content of its files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator

from infranetes_common.errors import FailedPrecondition, ResourceExhausted
from infranetes_common.filesync.manifest import (
    DIRECTORY,
    FILE,
    MAX_DEPTH,
    MAX_PATH,
    TEMPORARY,
    Bounds,
    BoundsCheck,
    Change,
    Changed,
    Entry,
    Manifest,
    Unread,
    entry_of,
)
from infranetes_common.filesync.tree import DIRECTORY_FLAGS, READ_FLAGS, Tree
from infranetes_common.paths import open_path

CHUNK_BYTES = 256 * 1024  # the most bytes of a file's content in one change
SCANS = 5  # the most scans of a tree that is being written, until two agree
# Errors of a link that was switched meanwhile, or of a mount whose server is gone.
_PASSING = (errno.EINVAL, errno.ELOOP, errno.ENOTCONN)


def scan(tree: Tree, bounds: Bounds) -> Manifest:
    """Return the manifest of a tree: everything but sockets, devices and pipes.

    :raise FailedPrecondition: the tree is not there.
    :raise ResourceExhausted: it is over `bounds`.
    """
    if tree.file:
        with tree.opened(READ_FLAGS | os.O_NONBLOCK) as descriptor:
            only = entry_of(b"", os.fstat(descriptor))
        if only is None or only.kind != FILE:
            raise FailedPrecondition(f"{os.fsdecode(tree.path)} is no file any more")
        BoundsCheck(bounds, tree.path).add(only)
        return {b"": only}
    with tree.opened(DIRECTORY_FLAGS) as top:
        own = entry_of(b"", os.fstat(top))
        assert own is not None
        found: Manifest = {b"": own}
        device = None if tree.crossing else os.fstat(top).st_dev
        _Walk(tree, found, BoundsCheck(bounds, tree.path), device).directory(top, b"")
    return found


def stable_scan(tree: Tree, bounds: Bounds) -> Manifest:
    """Scan until two scans in a row agree, so that no half-made state of the tree is returned.

    A program that replaces a tree by switching a link writes the new tree before that and removes the old one
    after it; a single scan could find the link to the old tree, and the old tree gone.

    :raise Changed: it is being written all the time. Otherwise raises as `scan`.
    """
    before = scan(tree, bounds)
    for left in reversed(range(SCANS)):
        found = scan(tree, bounds)
        # Files that are written all the time must not hold up the rest. Reading a file checks it again.
        if found == before or (not left and _shape(found) == _shape(before)):
            return found
        before = found
    raise Changed(f"{os.fsdecode(tree.path)} is being written all the time")


def _shape(found: Manifest) -> dict[bytes, tuple[str, bytes]]:
    """Return each entry's kind and target by path, without the files' content."""
    return {path: (entry.kind, entry.target) for path, entry in found.items()}


class _Walk:
    """One scan of a directory.

    :param device: the only file system to descend into; None: any.
    """

    def __init__(self, tree: Tree, manifest: Manifest, check: BoundsCheck, device: int | None) -> None:
        self._tree = tree
        self._manifest = manifest
        self._check = check
        self._device = device

    def directory(self, directory: int, prefix: bytes) -> None:
        where = os.fsdecode(self._tree.path)
        if prefix.count(b"/") >= MAX_DEPTH:
            raise ResourceExhausted(f"{where} is over {MAX_DEPTH} directories deep")
        for name in sorted(os.listdir(directory)):
            raw = os.fsencode(name)
            if raw.startswith(TEMPORARY):
                continue
            self._tree.alive()
            path = prefix + raw
            if len(path) > MAX_PATH:
                raise ResourceExhausted(f"{where} has paths over {MAX_PATH} bytes")
            try:
                self._entry(directory, name, path)
            except (FileNotFoundError, NotADirectoryError):
                self._manifest.pop(path, None)
            except OSError as error:
                if not isinstance(error, PermissionError) and error.errno not in _PASSING:
                    raise
                self._manifest.pop(path, None)

    def _entry(self, directory: int, name: str, path: bytes) -> None:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        link = stat.S_ISLNK(status.st_mode)
        target = os.fsencode(os.readlink(name, dir_fd=directory)) if link else b""
        entry = entry_of(path, status, target)
        if entry is None:
            return
        self._check.add(entry)
        self._manifest[path] = entry
        if entry.kind == DIRECTORY and self._device in (None, status.st_dev):
            inner = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
            try:
                self.directory(inner, path + b"/")
            finally:
                os.close(inner)


def read(tree: Tree, entries: Iterable[Entry]) -> Iterator[Change]:
    """Yield these entries, each file followed by its content in chunks.

    A file that no longer matches its entry, or that can't be read, ends with `Unread`.
    """
    for entry in entries:
        yield entry
        if entry.kind == FILE:
            try:
                yield from _content(tree, entry)
            except (Changed, OSError):
                yield Unread(entry.path)


def _content(tree: Tree, entry: Entry) -> Iterator[bytes]:
    flags = READ_FLAGS | os.O_NONBLOCK  # without O_NONBLOCK, opening a pipe would wait for its writer
    try:
        if tree.file:
            descriptor = open_path(tree.path, flags)
        else:
            with tree.parent_of(entry.path) as (directory, name):
                descriptor = os.open(name, flags, dir_fd=directory)
    except OSError as error:
        raise Changed(f"{os.fsdecode(entry.path)!r}: {error.strerror}") from None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        left = entry.size
        _check_same(tree, descriptor, entry)
        while left:
            chunk = file.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise Changed(f"{os.fsdecode(entry.path)!r} has become shorter")
            left -= len(chunk)
            if not left:
                _check_same(tree, descriptor, entry)
            yield chunk


def _check_same(tree: Tree, descriptor: int, entry: Entry) -> None:
    found = entry_of(entry.path, os.fstat(descriptor))
    if found is None or found.key != entry.key:
        raise Changed(f"{os.fsdecode(entry.path)!r} in {os.fsdecode(tree.path)} is being written")
