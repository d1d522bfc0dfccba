# SPDX-License-Identifier: Apache-2.0
"""A container's stdin without a terminal: a pipe whose writing end conmon holds.

If conmon 2.1 gets data for a pipe that nobody can read any longer, it uses a whole processor until the
container ends: it mistakes the failed write for one that has to wait. So the agent writes into the pipe
itself. conmon still ends the pipe, and serves terminals. Source: containers/conmon src/conn_sock.c,
sock_try_write_to_local_sock.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from twisted.internet.abstract import FileDescriptor
from twisted.internet.error import ConnectionDone
from twisted.internet.fdesc import writeToFD
from twisted.internet.interfaces import IReactorFDSet
from twisted.python.failure import Failure

from infranetes_common.errors import Unavailable
from vmserver.containers.oci.launch import TOLD
from vmserver.containers.sessions import WriteGate


class ContainerStdin(FileDescriptor):
    """Writes to a container's stdin, with flow control.

    The pipe is open only while there is data to write. Data that nobody can read any longer is dropped.

    :param conmon: its pid. :ivar gate: wait for it after each write.
    :raise Unavailable: the pipe can't be identified.
    """

    def __init__(self, reactor: IReactorFDSet, conmon: int) -> None:
        super().__init__(reactor)
        self._found = _pipe_of(conmon)
        self._fd = -1
        self._then: Callable[[], None] = lambda: None
        self.gate = WriteGate()
        self.connected = 1
        self.registerProducer(self.gate, True)
        if self._found is None:
            self.close()

    def fileno(self) -> int:
        return self._fd

    def write(self, data: bytes) -> None:
        """Write, or drop it after the end."""
        if self._fd < 0 and self.connected:
            self._open()
        super().write(data)

    def finish(self, then: Callable[[], None]) -> None:
        """Call `then` once all is written or dropped."""
        if self._fd < 0:
            then()
        else:
            self._then = then

    def close(self) -> None:
        """Drop the data that is not written yet. Idempotent."""
        self.connectionLost(Failure(ConnectionDone()))

    def _open(self) -> None:
        assert self._found is not None
        path, inode = self._found
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # conmon has closed it
            self.close()
            return
        if not _is_pipe(self._fd, inode):  # conmon has closed it, and has opened another file
            self.close()

    def writeSomeData(self, data: bytes) -> int | BaseException:
        written: int | BaseException = writeToFD(self._fd, data)
        return written

    def stopWriting(self) -> None:
        super().stopWriting()  # type: ignore[no-untyped-call]
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._then()

    def connectionLost(self, reason: Failure) -> None:
        if self.connected:
            super().connectionLost(reason)  # type: ignore[no-untyped-call]


def _pipe_of(conmon: int) -> tuple[Path, int] | None:
    """Return the writing end of the container's stdin, and its inode; None: conmon has closed it.

    conmon has one other writing end of a pipe: that of the pipe that reported the creation to the agent."""
    found = []
    try:
        for entry in Path(f"/proc/{conmon}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if entry.name != str(TOLD) and os.readlink(entry).startswith("pipe:") and _written(entry):
                    found.append((entry, entry.stat().st_ino))
    except OSError as error:
        raise Unavailable(f"the files of conmon {conmon} can't be looked at: {error.strerror}") from None
    if len(found) > 1:
        raise Unavailable(f"conmon {conmon} has {len(found)} pipes that could be the container's stdin")
    return found[0] if found else None


def _written(entry: Path) -> bool:
    """Return whether a process has a file open for writing only. :param entry: the file in /proc/PID/fd."""
    for line in (entry.parents[1] / "fdinfo" / entry.name).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "flags":
            return int(value, 8) & os.O_ACCMODE == os.O_WRONLY
    return False


def _is_pipe(descriptor: int, inode: int) -> bool:
    status = os.fstat(descriptor)
    return stat.S_ISFIFO(status.st_mode) and status.st_ino == inode
