# SPDX-License-Identifier: Apache-2.0
"""Putting a layer's tar together again, of its files and of what tar-split wrote down of all else in it.

Podman, CRI-O and Docker unpack layers, and keep beside the files what is needed to have the same bytes again:
JSON objects, one a line, for runs of bytes (headers, padding) and for files, in their order. Names and files
come from images: no name leads out of the directory of the files, and nothing but a regular file is opened.
"""

from __future__ import annotations

import binascii
import errno
import gzip
import json
import os
import stat
import threading
import zlib
from pathlib import Path

from infranetes_common import paths
from infranetes_common.errors import DataLoss, NotFound

MAX_LINE = 16 << 20  # bytes; a header, a long name and a file's padding are far smaller
MAX_NAME = 4096  # bytes; no longer one could have been unpacked
_FILE, _SEGMENT = 1, 2
_HEADER = 512  # bytes in a tar, for which there may be three entries: header, file, padding
_CHUNK = 8 << 20


class Assembly:
    """One layer's tar.

    :param described: what tar-split wrote, compressed with gzip. :param files: where the layer is unpacked.
    :param size: of the tar, in bytes. :param stop: set from another thread to have it end soon.
    """

    def __init__(self, described: Path, files: Path, size: int, stop: threading.Event) -> None:
        self._described = described
        self._files = os.fsencode(os.path.realpath(files))
        self._size = size
        self._stop = stop
        self._written = 0
        self._entries = 16 + 4 * (size // _HEADER)  # the most entries that may still come

    def thd_write(self, target: int) -> None:
        """Write it to a file.

        :raise NotFound: there is no such layer any more. :raise DataLoss: it can't be put together.
        :raise OSError: `target` can't be written."""
        try:
            file = self._described.open("rb")
        except OSError as error:
            raise NotFound(f"{self._described}: {error.strerror}") from None
        with file, gzip.open(file) as lines:
            while not self._stop.is_set() and (line := self._line(lines)):
                self._thd_entry(line, target)
        if self._written != self._size and not self._stop.is_set():
            raise DataLoss(
                f"{self._described} describes {self._written} bytes, and the layer has {self._size}"
            )

    def _line(self, lines: gzip.GzipFile) -> bytes:
        try:
            line = lines.readline(MAX_LINE + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise DataLoss(f"{self._described} can't be read: {error}") from None
        if len(line) > MAX_LINE:
            raise DataLoss(f"{self._described} has a line of over {MAX_LINE} bytes")
        return line

    def _thd_entry(self, line: bytes, target: int) -> None:
        self._entries -= 1
        if self._entries < 0:
            raise DataLoss(f"{self._described} has more entries than a layer of {self._size} bytes")
        try:
            entry = json.loads(line)
            kind = entry["type"]
            if kind == _SEGMENT:
                data = binascii.a2b_base64(entry.get("payload") or "")
            elif kind == _FILE:
                raw = entry.get("name_raw")
                name = binascii.a2b_base64(raw) if raw else os.fsencode(entry.get("name", ""))
                size = entry.get("size", 0)
                if not isinstance(size, int):
                    raise ValueError("a size is no number")
                if len(name) > MAX_NAME or b"\0" in name:
                    raise ValueError("a name is none of a file")
            else:
                raise ValueError("an entry is of an unknown type")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataLoss(f"{self._described} can't be used: {error}") from None
        if kind == _SEGMENT:
            self._count(len(data))
            _thd_write(target, data)
        elif size > 0:
            self._count(size)
            self._thd_file(name, size, target)

    def _count(self, size: int) -> None:
        self._written += size
        if self._written > self._size:
            raise DataLoss(f"{self._described} describes over {self._size} bytes, which the layer has")

    def _thd_file(self, name: bytes, size: int, target: int) -> None:
        try:
            descriptor = open_inside(self._files, name)
        except OSError as error:
            raise DataLoss(f"{os.fsdecode(name)!r} in {os.fsdecode(self._files)}: {error.strerror}") from None
        try:
            if os.fstat(descriptor).st_size != size:
                raise DataLoss(
                    f"{os.fsdecode(name)!r} in {os.fsdecode(self._files)} is not the layer's any more"
                )
            at = 0
            while at < size and not self._stop.is_set():
                sent = os.sendfile(target, descriptor, at, min(size - at, _CHUNK))
                if not sent:
                    raise DataLoss(f"{os.fsdecode(name)!r} in {os.fsdecode(self._files)} became shorter")
                at += sent
        finally:
            os.close(descriptor)


def open_inside(root: bytes, name: bytes) -> int:
    """Open a regular file below a directory for reading, as a process would that has it as its root.

    :param root: absolute, without links.
    :raise OSError: it is not there, is something else, or can't be opened."""
    todo = [part for part in reversed(name.split(b"/")) if part not in (b"", b".")]
    done: list[bytes] = []
    links = 0
    while todo:
        part = todo.pop()
        if part == b"..":
            done[-1:] = []
            continue
        try:
            target = os.readlink(b"/".join((root, *done, part)))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            done.append(part)
            continue
        links += 1
        if links > paths.MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if target.startswith(b"/"):
            done = []
        todo += [each for each in reversed(target.split(b"/")) if each not in (b"", b".")]
    found = paths.open_path(b"/".join((root, *done)), os.O_PATH)
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):  # opening a device can have effects
            raise OSError(errno.EINVAL, "not a regular file")
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(found)


def _thd_write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
