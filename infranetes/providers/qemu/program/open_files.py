# SPDX-License-Identifier: Apache-2.0
"""The open files that a QEMU process inherits. The daemon closes its own descriptors once QEMU has them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from infranetes_common.concurrency import run_in_thread
from infranetes_common.reactors import IReactor


@contextlib.asynccontextmanager
async def open_files(reactor: IReactor) -> AsyncIterator[OpenFiles]:
    """Hold the files of a QEMU that the block starts, and close them at its end.

    If the block fails, they are closed in a thread: no QEMU has the tap, so it goes with its descriptor, and
    the kernel takes its time for that."""
    files = OpenFiles()
    try:
        yield files
    except BaseException:
        await run_in_thread(reactor, files.close)
        raise
    files.close()


class OpenFiles:
    """Descriptors by the number that QEMU gets them as."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}

    def close(self) -> None:
        """Close all of them. Idempotent."""
        while self._descriptors:
            with contextlib.suppress(OSError):
                os.close(self._descriptors.popitem()[1])

    def add(self, fd: int, descriptor: int) -> None:
        """Take over a descriptor."""
        self._descriptors[int(fd)] = descriptor

    def open(self, fd: int, path: Path, flags: int = os.O_RDONLY) -> None:
        """Open `path`. :raise OSError: it can't be opened."""
        self.add(fd, os.open(path, flags | os.O_CLOEXEC, 0o600))

    def listen(self, fd: int, path: Path) -> None:
        """Listen on a unix socket at `path`, on which QEMU will accept. Clients can connect from now on."""
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen(4)
            self.add(fd, listener.detach())

    def set_standard_streams(self, output: Path) -> None:
        """Use /dev/null as standard input, and the file `output` for standard output and error."""
        self._descriptors[0] = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for number in (1, 2):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptors[number] = os.open(output, flags, 0o600)

    def by_number(self) -> dict[int, int]:
        """Return the descriptors as `spawn` takes them."""
        return dict(self._descriptors)
