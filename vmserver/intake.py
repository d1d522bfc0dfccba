"""How the machine's identity reaches the agent.

Over virtio-serial the two sides talk in lines. The agent says ``waiting`` about once a second until
the node writes one line, the identity document; then ``ready PORT`` once its listener listens, or
``failed WORDS``. The channel stays open afterwards: the node may write the identity again, and a
renewed certificate comes the same way. `LineBuffer` is the protocol's core, without I/O.

Of Linux's virtio_console: while nobody is connected on the host's side a read gives nothing at all
(as at a file's end), a write would block, and poll says "readable" and "hung up" for ever. So the
device is only handed to the reactor while its other side is there, and looked at now and then
otherwise. That is also what happens to a clone: its channel is a new one at every unfreezing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReadDescriptor
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from zope.interface import implementer

from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument
from infranetes_common.identity import MAX_DOCUMENT_BYTES, Identity, encode
from vmserver import tls

Offer = Callable[[bytes], Awaitable[int]]
"""Take an identity document in; the port that the agent then listens on."""

WAITING_SECONDS = 1.0
RECONNECT_SECONDS = 0.02  # how often a channel without another side is looked at, while identity lacks
RELAXED_SECONDS = 0.5  # the same, once there is an identity
FILE_SECONDS = 0.5
_MAX_WORDS = 500
_CERTIFICATE_END = "-----END CERTIFICATE-----"

_log = Logger()


class LineBuffer:
    """Bytes in, whole lines out; a line beyond the limit is dropped and reported as None."""

    def __init__(self, limit: int = MAX_DOCUMENT_BYTES) -> None:
        self._limit = limit
        self._buffer = b""
        self._dropping = False

    def clear(self) -> None:
        """Forget a line's beginning: its rest will not come."""
        self._buffer = b""
        self._dropping = False

    def feed(self, data: bytes) -> list[bytes | None]:
        """The lines that `data` completes, without newline; None for each that was too long."""
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


async def answer(document: bytes | None, offer: Offer) -> bytes:
    """The line that answers one line from the node."""
    try:
        if document is None:
            raise InvalidArgument(f"the identity document is over {MAX_DOCUMENT_BYTES} bytes")
        return b"ready %d\n" % await offer(document)
    except InfranetesError as error:
        words = str(error)
    except Exception as error:
        # Not its text: that might quote the document, which holds a key.
        _log.failure("an identity could not be taken on")
        words = f"unexpected {type(error).__name__}; the agent's log has the details"
    _log.error("the identity was refused: {words}", words=words)
    return b"failed " + words.replace("\n", " ").encode()[:_MAX_WORDS] + b"\n"


@implementer(IReadDescriptor)
class VirtioSerial:
    """The node on the other side of a virtio-serial port.

    :param offer: given each document. :param waiting: whether there is no identity yet.
    """

    def __init__(self, reactor: Any, path: Path, offer: Offer, waiting: Callable[[], bool]) -> None:
        self._reactor = reactor
        self._path = path
        self._offer = offer
        self._waiting = waiting
        self._fd = -1
        self._connected = False
        self._lines = LineBuffer()
        self._queue: list[bytes | None] = []
        self._busy = False
        self._running = False
        self._timer: Any = None
        self._said: str = ""
        self._greeting = LoopingCall(self._greet)
        self._greeting.clock = reactor

    def start(self) -> None:
        """Open the device, now or as soon as it is there, and talk."""
        self._running = True
        self._look()
        self._greeting.start(WAITING_SECONDS)

    def stop(self) -> None:
        """Close the device. Twice is once."""
        self._running = False
        if self._greeting.running:
            self._greeting.stop()
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None
        if self._fd >= 0:
            self._disconnected()
            os.close(self._fd)
            self._fd = -1

    # IReadDescriptor

    def fileno(self) -> int:
        return self._fd

    def logPrefix(self) -> str:
        return "identity channel"

    def doRead(self) -> None:
        self._read()

    def connectionLost(self, reason: Any) -> None:
        """The reactor saw a hang-up, or stops."""
        if self._fd >= 0:
            self._disconnected()
            self._look_later()

    # The channel

    def _look(self) -> None:
        """Is the device there, and someone on its other side?"""
        self._timer = None
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            except OSError as error:
                self._say_once(
                    f"the identity channel {self._path} can't be opened: {error.strerror}; trying on"
                )
                self._look_later(WAITING_SECONDS)
                return
        if not self._read():
            self._look_later()

    def _look_later(self, seconds: float = 0.0) -> None:
        if self._timer is None and self._running:
            pause = seconds or (RECONNECT_SECONDS if self._waiting() else RELAXED_SECONDS)
            self._timer = self._reactor.callLater(pause, self._look)

    def _read(self) -> bool:
        """Read what is there; whether somebody is on the other side."""
        try:
            data = os.read(self._fd, MAX_DOCUMENT_BYTES)
        except BlockingIOError:
            self._is_connected()
            return True
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                self._say_once(f"reading the identity channel {self._path} failed: {error.strerror}")
            data = b""
        if not data:
            if self._connected:
                self._disconnected()
                self._look_later()
            return False
        self._is_connected()
        self._queue.extend(self._lines.feed(data))
        self._next()
        return True

    def _is_connected(self) -> None:
        if not self._connected:
            self._connected = True
            self._reactor.addReader(self)
            self._greet()

    def _disconnected(self) -> None:
        if self._connected:
            self._connected = False
            self._reactor.removeReader(self)
        self._lines.clear()

    def _greet(self) -> None:
        if self._connected and not self._busy and self._waiting():
            self._write(b"waiting\n")

    def _write(self, line: bytes) -> None:
        # A port takes a short line whole or not at all; unread greetings may fill it.
        with contextlib.suppress(OSError):
            os.write(self._fd, line)

    def _next(self) -> None:
        if self._queue and not self._busy:
            self._busy = True
            Deferred.fromCoroutine(self._serve())

    async def _serve(self) -> None:
        while self._queue:
            line = await answer(self._queue.pop(0), self._offer)
            if self._fd >= 0:
                self._write(line)
        self._busy = False

    def _say_once(self, words: str) -> None:
        if words != self._said:
            self._said = words
            _log.warn("{words}", words=words)


class IdentityFile:
    """An identity document in a file, read when it appears and whenever it changes."""

    def __init__(self, reactor: Any, path: Path, offer: Offer) -> None:
        self._path = path
        self._offer = offer
        self._seen: tuple[int, ...] | None = None
        self._failed: int | None = 0
        self._loop = LoopingCall(self._look)
        self._loop.clock = reactor

    def start(self) -> None:
        """Read the file, now or as soon as it is there."""
        self._loop.start(FILE_SECONDS)

    def stop(self) -> None:
        """Look no more. Twice is once."""
        if self._loop.running:
            self._loop.stop()

    def _look(self) -> Deferred[None] | None:
        try:
            document, version = self._content()
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != self._failed:
                self._failed = error.errno
                _log.error("{path} can't be read: {words}", path=str(self._path), words=error.strerror)
            return None
        if document is None:
            return None
        self._seen = version
        return Deferred.fromCoroutine(self._take(document))

    def _content(self) -> tuple[bytes | None, tuple[int, ...]]:
        with open(self._path, "rb") as file:
            status = os.fstat(file.fileno())
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if version == self._seen:
                return None, version
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                self._seen = version
                _log.error("{path} holds a key and others may read it: chmod 0600", path=str(self._path))
                return None, version
            return file.read(MAX_DOCUMENT_BYTES + 1), version

    async def _take(self, document: bytes) -> None:
        line = await answer(document, self._offer)
        _log.info("identity from {path}: {answer}", path=str(self._path), answer=line.decode().strip())


class CertificateFiles(IdentityFile):
    """An identity out of PEM files: a certificate with its CA's behind it, and the key.

    They say who the machine is and nothing else: its names and addresses are left as they are.
    """

    def __init__(self, reactor: Any, certificate: Path, key: Path, offer: Offer) -> None:
        super().__init__(reactor, key, offer)
        self._certificate = certificate

    def _content(self) -> tuple[bytes | None, tuple[int, ...]]:
        key, version = super()._content()
        if key is None:
            return None, version
        leaf, end, chain = self._certificate.read_text(errors="replace").partition(_CERTIFICATE_END)
        certificate = leaf + end + "\n"
        try:
            identity = Identity(
                sandbox_id=tls.sandbox_of(certificate),
                certificate_pem=certificate,
                key_pem=key.decode(errors="replace"),
                ca_pem=chain.strip() + "\n",
            )
            return encode(identity), version
        except InvalidArgument as error:
            self._seen = version
            _log.error(
                "{path}, {key}: {error}; expected are a PEM certificate with its CA's behind it, and its key",
                path=str(self._certificate),
                key=str(self._path),
                error=error,
            )
            return None, version


def save(path: Path, text: str) -> None:
    """Make `path` a file of mode 0600 with that text, whole or not at all.

    :raise FailedPrecondition: it can't be written.
    """
    beside = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside.unlink(missing_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w") as file:
            file.write(text)
        beside.replace(path)
    except OSError as error:
        raise FailedPrecondition(f"{path} can't be written: {error.strerror}; see run_dir") from error
