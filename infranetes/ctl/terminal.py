# SPDX-License-Identifier: Apache-2.0
"""The terminal or the pipes that a session goes by, at infranetes-ctl's end."""

from __future__ import annotations

import os
import select
import signal
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReadDescriptor, IWriteDescriptor
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common.reactors import IReactor

LEAVE = b"\x1d"  # ^]
LEAVE_TIMES, LEAVE_SECONDS = 3, 1.0
READ_BYTES = 64 * 1024
# The bytes that a descriptor which is ready for writing takes without blocking; see pipe(7).
_PIECE = select.PIPE_BUF


@implementer(IReadDescriptor, IWriteDescriptor)
class Descriptor:
    """One of this process's descriptors, for one reader or one writer.

    It is used when it is ready, and stays as it is: one that is made not to block would not block for other
    programs that have it too, such as the shell on the same terminal.
    """

    def __init__(self, reactor: IReactor, fd: int) -> None:
        self._reactor = reactor
        self._fd = fd
        self._event = 0  # the event of poll(2) that is waited for
        self._ready: Deferred[None] | None = None

    async def read(self) -> bytes:
        """Return the next input, once there is some; b"" at its end."""
        await self._wait(self._reactor.addReader, select.POLLIN)
        try:
            return os.read(self._fd, READ_BYTES)
        except OSError:  # the terminal is gone, or the descriptor was closed from the beginning
            return b""

    async def write(self, data: bytes) -> None:
        """Write all of it. :raise BrokenPipeError: nobody reads it."""
        rest = memoryview(data)
        while rest:
            await self._wait(self._reactor.addWriter, select.POLLOUT)
            rest = rest[os.write(self._fd, rest[:_PIECE]) :]

    def _wait(self, watch: Callable[[Descriptor], None], event: int) -> Deferred[None]:
        self._event = event
        ready: Deferred[None] = Deferred(lambda _: self._forget())
        self._ready = ready
        try:
            watch(self)
        except OSError:  # the descriptor is not open, as reading or writing then reports
            self._wake()
        return ready

    def _forget(self) -> None:
        self._ready = None
        self._reactor.removeReader(self)
        self._reactor.removeWriter(self)

    def _wake(self) -> None:
        ready = self._ready
        self._forget()
        if ready is not None:
            ready.callback(None)

    # IReadDescriptor, IWriteDescriptor

    def fileno(self) -> int:
        return self._fd

    def logPrefix(self) -> str:
        return "terminal"

    def doRead(self) -> None:
        self._wake()

    def doWrite(self) -> None:
        self._wake()

    def connectionLost(self, reason: Failure) -> None:
        """Stop waiting: the descriptor is hung up, or the reactor stops, after which a read would block."""
        poll = select.poll()
        poll.register(self._fd, self._event)
        if poll.poll(0):
            self._wake()


class Leaving:
    """Notices that a person wants to leave a session that does not answer: ^] three times within a second."""

    def __init__(self) -> None:
        self._typed: list[float] = []

    def typed(self, data: bytes, now: float) -> bool:
        """Take what was typed, which ends with one key or is many at once. Return whether to leave."""
        for position in range(len(data)):
            if data[position : position + 1] != LEAVE:
                self._typed.clear()
                continue
            self._typed = [*(at for at in self._typed if now - at <= LEAVE_SECONDS), now]
            if len(self._typed) >= LEAVE_TIMES:
                return True
        return False


def window_size(fd: int) -> tuple[int, int] | None:
    """Return columns and lines of a terminal; None: it does not know."""
    try:
        columns, lines = os.get_terminal_size(fd)
    except OSError:
        return None
    return (columns, lines) if 0 < columns < 65536 and 0 < lines < 65536 else None


@contextmanager
def raw_terminal(reactor: IReactor, fd: int, resized: Callable[[], None]) -> Iterator[None]:
    """Put a terminal into raw mode, and restore it afterwards, even if a signal ends the process.

    :param resized: called in the reactor's thread when the terminal has another size."""
    before = termios.tcgetattr(fd)

    def restore() -> None:
        with suppress(OSError, termios.error):  # the terminal is gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)

    def on_resize(number: int, frame: FrameType | None) -> None:
        reactor.callFromThread(resized)

    def on_hangup(number: int, frame: FrameType | None) -> None:
        reactor.callFromThread(reactor.stop)

    trigger = reactor.addSystemEventTrigger("during", "shutdown", restore)
    handled = {
        signal.SIGWINCH: signal.signal(signal.SIGWINCH, on_resize),
        signal.SIGHUP: signal.signal(signal.SIGHUP, on_hangup),
    }
    try:
        tty.setraw(fd, termios.TCSADRAIN)
        yield
    finally:
        restore()
        for number, handler in handled.items():
            signal.signal(number, handler)
        with suppress(ValueError):  # the reactor has shut down, and called it
            reactor.removeSystemEventTrigger(trigger)
