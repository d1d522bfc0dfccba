# SPDX-License-Identifier: Apache-2.0
"""A volume's file that forgets, when its power is lost, whatever was not flushed: the worst of disks.

QEMU's storage daemon serves the file by FUSE, so whoever opens it has a file like any other, and logs each
write and each flush (`blklogwrites`, in the format of the kernel's dm-log-writes). When the power is lost the
daemon is killed before its users are, and the file gets what was logged before the last flush, and no more.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

_START_SECONDS = 30.0
_LOG_BYTES = 16 << 30  # of which little is written
_HEAD, _ENTRY = struct.Struct("<QQQI"), struct.Struct("<QQQQ")
_MAGIC = 0x6A736677736872
_FLUSH, _DISCARD = 1, 4


@attrs.frozen
class Write:
    """An entry of the log. In bytes. :ivar data: where it is in the log; None: zeros, or nothing known."""

    at: int
    size: int
    flags: int
    data: int | None


class VolatileFile:
    """A file while it is served. It is what it was before, until `lose_power`.

    :param path: where it is, and where it is served.
    :param work: a directory for what is written meanwhile.
    :ivar flushes: how often it was flushed, once the power is lost.
    """

    def __init__(self, path: Path, work: Path) -> None:
        self.path = path
        self.flushes = 0
        self._stable, self._volatile, self._log = work / "stable", work / "volatile", work / "log"
        work.mkdir()
        os.link(path, self._stable)  # reached by no other name while it is served
        subprocess.run(["cp", "--sparse=always", path, self._volatile], check=True)
        self._log.touch()
        os.truncate(self._log, _LOG_BYTES)
        files = [
            f"driver=file,node-name={name},filename={file}"
            for name, file in (("volatile", self._volatile), ("log", self._log))
        ]
        served = "driver=blklogwrites,node-name=served,file=volatile,log=log,discard=unmap"
        export = f"type=fuse,id=file,node-name=served,mountpoint={path},writable=on,allow-other=on"
        command = ["qemu-storage-daemon", "--export", export]
        command[1:1] = [word for each in (*files, served) for word in ("--blockdev", each)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        until = time.monotonic() + _START_SECONDS
        while not os.path.ismount(path):
            if self._process.poll() is not None or time.monotonic() > until:
                self._process.kill()
                raise RuntimeError("qemu-storage-daemon does not serve the file")
            time.sleep(0.02)

    def fail(self) -> None:
        """Have the power lost: every access fails from now on. Idempotent."""
        self._process.kill()
        self._process.wait()

    def lose_power(self) -> None:
        """Have the file as it is after a loss of power. Its users have ended."""
        self.fail()
        subprocess.run(["umount", self.path], check=True)
        written = list(_entries(self._log))
        flushes = [index for index, each in enumerate(written) if each.flags & _FLUSH]
        self.flushes = len(flushes)
        last = flushes[-1] if flushes else 0
        with self._log.open("rb") as log, self._stable.open("r+b") as stable:
            for each in written[:last]:
                _apply(each, log.fileno(), stable.fileno())
        shutil.rmtree(self._log.parent)

    def end(self) -> None:
        """Serve it no more, whatever becomes of what is in it. Idempotent."""
        self.fail()
        subprocess.run(["umount", "-l", self.path], check=False, stderr=subprocess.DEVNULL)


def _entries(path: Path) -> Iterator[Write]:
    """What the log has. Source: block/blklogwrites.c."""
    with path.open("rb") as log:
        magic, _, count, sector = _HEAD.unpack(log.read(_HEAD.size))
        if not magic:
            return  # its head is written with a flush, or with 4,096 entries: there was neither
        if magic != _MAGIC:
            raise RuntimeError(f"{path} is no log of writes")
        place = sector
        for _ in range(count):
            log.seek(place)
            at, size, flags, _ = _ENTRY.unpack(log.read(_ENTRY.size))
            place += sector
            has_data = not flags & _DISCARD
            yield Write(at * sector, size * sector, flags, place if has_data else None)
            if has_data:
                place += size * sector


def _apply(write: Write, log: int, to: int) -> None:
    # What is discarded nobody needs any more.
    data = bytes(write.size) if write.data is None else os.pread(log, write.size, write.data)
    os.pwrite(to, data, write.at)
