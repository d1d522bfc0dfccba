# SPDX-License-Identifier: Apache-2.0
"""The template's memory as its clones map it: a sealed memfd, which nobody can write to.

QEMU opens the file that backs its memory for writing, even if its mapping is private, and keeps it open. If
that were the template's file, whoever takes over one QEMU could write into the memory of every VM that has
not changed the page yet. So the content is copied into a memfd, once for all clones, and sealed: the kernel
refuses every write, through any descriptor or mapping (memfd_create(2), fcntl(2)). A clone's own mapping is
private, so the clone may write to it as before.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

from twisted.internet.interfaces import IReactorThreads

from infranetes.providers.qemu.program.memory import Memory
from infranetes_common.concurrency import KeyedLock, run_in_thread

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
NAME = "infranetes-ram"
_CHUNK = 1 << 20
_BLOCK = 1 << 16  # blocks of zeros are left out, as they would take memory
_ZEROS = bytes(_BLOCK)
_MADV_POPULATE_READ = 22
_FileState = tuple[str, int, int, int]  # path, inode, size, ctime


def load(path: Path) -> int:
    """Copy `path` into a sealed memfd and return its descriptor. Blocks for some tenths of a second.

    :raise OSError: the file can't be read, or there is not enough memory.
    """
    memory = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(memory, 0o666)  # the VMs' users open it again; the seals protect it
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(source).st_size
            os.ftruncate(memory, size)
            for begin, end in _data(source, size):
                for offset in range(begin, end, _CHUNK):
                    _copy(memory, os.pread(source, min(_CHUNK, end - offset), offset), offset)
            # Drops the page cache: one copy in memory is enough.
            os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(source)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(memory)
        raise
    return memory


def _data(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges of a sparse file that have data: beginnings and ends."""
    end = 0
    while end < size:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole follows
                return
            raise
        end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        yield begin, end


def _copy(memory: int, data: bytes, offset: int) -> None:
    for at in range(0, len(data), _BLOCK):
        block = data[at : at + _BLOCK]
        if block != _ZEROS[: len(block)]:
            written = 0
            while written < len(block):
                written += os.pwrite(memory, block[written:], offset + at + written)


def thd_fill(memory: int) -> None:
    """Make all pages of this memory exist, as zeros where there are none yet. Blocks for some tenths of a
    second the first time.

    :raise OSError: there is not enough memory."""
    size = os.fstat(memory).st_size
    with mmap.mmap(memory, size, mmap.MAP_PRIVATE, mmap.PROT_READ) as pages:
        try:
            pages.madvise(_MADV_POPULATE_READ)
        except OSError as error:
            if error.errno != errno.EINVAL:  # before Linux 5.14
                raise
            for offset in range(0, size, mmap.PAGESIZE):
                pages[offset]


def _state(path: Path) -> _FileState:
    status = path.stat()
    return str(path), status.st_ino, status.st_size, status.st_ctime_ns


class SharedRam:
    """Has the memory of the files that VMs start from, as long as somebody else has it too."""

    def __init__(self, reactor: IReactorThreads) -> None:
        self._reactor = reactor
        self._files_in_work: KeyedLock[Path] = KeyedLock()
        self._memories: weakref.WeakValueDictionary[_FileState, Memory] = weakref.WeakValueDictionary()

    async def of(self, path: Path) -> Memory:
        """Return the sealed content of `path`, the same one as long as the file is not changed.

        :raise OSError: the file can't be read, or there is not enough memory.
        """
        async with self._files_in_work.held(path):
            state = _state(path)
            memory = self._memories.get(state)
            if memory is None:
                memory = Memory(await run_in_thread(self._reactor, load, path))
                self._memories[state] = memory
            return memory
