# SPDX-License-Identifier: Apache-2.0
"""The FIFO for messages to a running conmon: a terminal's new size, or that its log was renamed.

If conmon 2.1 reads several messages together, it follows only the first, once for each message. So each
message is written only once the previous one has been read, also from the FIFO `winsz`, through which conmon
passes sizes on to itself. Source: containers/conmon src/ctrl.c.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import termios
from pathlib import Path

from twisted.internet.defer import DeferredLock
from twisted.internet.interfaces import IReactorTime

from infranetes_common.concurrency import backoff, sleep
from infranetes_common.errors import Unavailable

TAKEN_SECONDS = 10.0  # for conmon to read a message
_MAX_SIZE = 65535


class Control:
    """Sends messages to one conmon. There is one instance for each container.

    :param bundle: the container's.
    """

    def __init__(self, clock: IReactorTime, bundle: Path) -> None:
        self._clock = clock
        self._bundle = bundle
        self._lock = DeferredLock()
        self._size: tuple[int, int] | None = None  # the terminal's next size

    async def resize(self, width: int, height: int) -> None:
        """Set the size of the container's terminal, in characters. Does nothing after its end.

        If several sizes are pending, only the last is sent.

        :raise Unavailable: conmon does not accept the message."""
        if not (0 <= width <= _MAX_SIZE and 0 <= height <= _MAX_SIZE):
            return
        self._size = (width, height)
        async with self._lock:
            size, self._size = self._size, None
            if size is not None:
                await self._tell(f"1 {size[1]} {size[0]}\n")

    async def reopen_log(self, log: Path) -> None:
        """Tell conmon to make a new log file, unless there is one. Does nothing after the container's end.

        conmon would replace an existing file and lose its content.

        :raise Unavailable: conmon does not accept the message."""
        async with self._lock:
            await self._tell("2 0 0\n", unless=log)

    async def _tell(self, message: str, unless: Path | None = None) -> None:
        fifos: list[int] = []
        try:
            for name in ("ctl", "winsz"):
                fifos.append(os.open(self._bundle / name, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            await self._empty(fifos)
            if not _there(unless):
                os.write(fifos[0], message.encode())
                await self._empty(fifos)
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ENOENT, errno.EPIPE):  # conmon has ended
                raise Unavailable(f"{self._bundle / 'ctl'}: {error.strerror}") from error
        finally:
            for fifo in fifos:
                os.close(fifo)

    async def _empty(self, fifos: list[int]) -> None:
        """Wait until conmon has read everything in these FIFOs."""
        waited = 0.0
        pauses = backoff(0.002, 0.05)
        while any(_unread(fifo) for fifo in fifos):
            if waited > TAKEN_SECONDS:
                raise Unavailable(f"the conmon of {self._bundle} does not read its control messages")
            pause = next(pauses)
            await sleep(self._clock, pause)
            waited += pause


def _there(path: Path | None) -> bool:
    return path is not None and path.exists()


def _unread(fifo: int) -> int:
    size = array.array("i", [0])
    fcntl.ioctl(fifo, termios.FIONREAD, size)
    return size[0]
