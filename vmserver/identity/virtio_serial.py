# SPDX-License-Identifier: Apache-2.0
"""The identity over a virtio-serial port, which QEMU gives the VM.

The two sides exchange lines. The agent says ``waiting`` about once a second until the node writes one line,
the identity document; then ``ready PORT`` once its listener listens at a TCP port, ``ready 0`` once it can be
called by its own serial port (`serial_listener`), or ``failed WORDS``. The channel stays open afterwards, and
the node may write the identity again.

Linux's virtio_console has peculiarities: while nobody is connected on the host's side a read returns
nothing (as at a file's end), a write would block, and poll reports "readable" and "hung up" without end. So
the device is handed to the reactor only while its other side is there, and polled slowly otherwise. A clone
goes through this too: its channel is a new one each time a VM is resumed from the template.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from twisted.internet.interfaces import IDelayedCall, IReadDescriptor
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common.concurrency import start
from infranetes_common.identity import MAX_DOCUMENT_BYTES
from infranetes_common.reactors import IReactor
from vmserver.identity.delivery import POLL_SECONDS, Accept, answer

RECONNECT_SECONDS = 0.02  # between two checks for the other side while there is no identity
RELAXED_SECONDS = 0.5  # the same pause once there is an identity

_log = Logger()


class LineBuffer:
    """Bytes in, whole lines out: the protocol without I/O."""

    def __init__(self, limit: int = MAX_DOCUMENT_BYTES) -> None:
        self._limit = limit
        self._buffer = b""
        self._dropping = False

    def clear(self) -> None:
        """Forget the beginning of a line whose rest will never arrive."""
        self._buffer = b""
        self._dropping = False

    def feed(self, data: bytes) -> list[bytes | None]:
        """Return the lines that `data` completes, without newline; None for each that was too long."""
        *ended, rest = data.split(b"\n")
        lines: list[bytes | None] = []
        for part in ended:
            whole = self._buffer + part
            lines.append(None if self._dropping or len(whole) > self._limit else whole)
            self.clear()
        self._buffer += rest
        if len(self._buffer) > self._limit:
            self._buffer = b""
            self._dropping = True
        return lines


@implementer(IReadDescriptor)
class VirtioSerial:
    """The agent's end of the channel, an `IdentitySource`.

    :param accept: given each document. :param waiting: whether there is no identity yet.
    """

    def __init__(self, reactor: IReactor, path: Path, accept: Accept, waiting: Callable[[], bool]) -> None:
        self._reactor = reactor
        self._path = path
        self._accept = accept
        self._waiting = waiting
        self._fd = -1
        self._connected = False
        self._lines = LineBuffer()
        self._queue: list[bytes | None] = []
        self._busy = False
        self._running = False
        self._timer: IDelayedCall | None = None
        self._warned = ""
        self._greeting = LoopingCall(self._greet)
        self._greeting.clock = reactor

    def start(self) -> None:
        """Open the device, now or as soon as it is there, and talk."""
        self._running = True
        self._poll()
        self._greeting.start(POLL_SECONDS)

    def stop(self) -> None:
        """Close the device. Idempotent."""
        self._running = False
        if self._greeting.running:
            self._greeting.stop()
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None
        if self._fd >= 0:
            self._set_disconnected()
            os.close(self._fd)
            self._fd = -1

    # IReadDescriptor

    def fileno(self) -> int:
        return self._fd

    def logPrefix(self) -> str:
        return "identity channel"

    def doRead(self) -> None:
        self._read()

    def connectionLost(self, reason: Failure) -> None:
        """Called by the reactor at a hang-up, and when it stops."""
        if self._fd >= 0:
            self._set_disconnected()
            self._poll_later()

    # The channel

    def _poll(self) -> None:
        """Open the device if it exists, and read from it if its other side is connected."""
        self._timer = None
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            except OSError as error:
                self._warn_once(
                    f"the identity channel {self._path} can't be opened: {error.strerror}; trying again"
                )
                self._poll_later(POLL_SECONDS)
                return
        if not self._read():
            self._poll_later()

    def _poll_later(self, seconds: float = 0.0) -> None:
        if self._timer is None and self._running:
            pause = seconds or (RECONNECT_SECONDS if self._waiting() else RELAXED_SECONDS)
            self._timer = self._reactor.callLater(pause, self._poll)

    def _read(self) -> bool:
        """Read the available data. Return whether the other side is connected."""
        try:
            data = os.read(self._fd, MAX_DOCUMENT_BYTES)
        except BlockingIOError:
            self._set_connected()
            return True
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                self._warn_once(f"reading the identity channel {self._path} failed: {error.strerror}")
            data = b""
        if not data:
            if self._connected:
                self._set_disconnected()
                self._poll_later()
            return False
        self._set_connected()
        self._queue.extend(self._lines.feed(data))
        self._serve_next()
        return True

    def _set_connected(self) -> None:
        if not self._connected:
            self._connected = True
            self._reactor.addReader(self)
            self._greet()

    def _set_disconnected(self) -> None:
        if self._connected:
            self._connected = False
            self._reactor.removeReader(self)
        self._lines.clear()

    def _greet(self) -> None:
        if self._connected and not self._busy and self._waiting():
            self._write(b"waiting\n")

    def _write(self, line: bytes) -> None:
        # The port takes a short line whole or not at all. It is full if nothing on the node reads the
        # greetings.
        with contextlib.suppress(OSError):
            os.write(self._fd, line)

    def _serve_next(self) -> None:
        if self._queue and not self._busy:
            self._busy = True
            start(self._serve())

    async def _serve(self) -> None:
        while self._queue:
            line = await answer(self._queue.pop(0), self._accept)
            if self._fd >= 0:
                self._write(line)
        self._busy = False

    def _warn_once(self, words: str) -> None:
        if words != self._warned:
            self._warned = words
            _log.warn("{words}", words=words)
