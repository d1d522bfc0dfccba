# SPDX-License-Identifier: Apache-2.0
"""Downloads of disks: with a checksum, within bounds, continued after a break.

Not by treq: its client asks for gzip, and undoes what it gets. A file that a server keeps compressed would be
another one then, and the rest of one that has come in part could not be asked for.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple
from urllib.parse import SplitResult, urljoin, urlsplit

import attrs
from OpenSSL import SSL
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import wrapClientTLS
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.ssl import optionsForClientTLS, platformTrust
from twisted.python.failure import Failure
from twisted.web.client import URI, Agent, HTTPConnectionPool, ResponseDone
from twisted.web.http import PotentialDataLoss
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgentEndpointFactory, IResponse
from zope.interface import implementer

from infranetes.images.machine.endpoints import Allowed, CheckedEndpoint, anywhere, elsewhere
from infranetes_common import __version__
from infranetes_common.concurrency import IMAGES, backoff, cancellable, run_in_thread, sleep, within
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import IReactor
from infranetes_common.redaction import redacted
from infranetes_common.transports import BodyTransport

if TYPE_CHECKING:
    from hashlib import _Hash

    from twisted.internet._sslverify import IOpenSSLTrustRoot

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_REDIRECTS = 5
RETRY_SECONDS = (1.0, 60.0)
"""The pause before the second attempt, which doubles before each further one, and the longest pause."""
_WORTH = 64 * 1024  # bytes by which an attempt has brought the download on
_AHEAD = 1 << 20  # bytes that are read before they are written
_MIB = 1 << 20
_RANGE = re.compile(r"bytes (\d{1,19})-\d{1,19}/(?:\d{1,19}|\*)")
_REDIRECTS = (301, 302, 303, 307, 308)

Progress = Callable[[str], None]


@attrs.frozen
class Wanted:
    """A file that is to be fetched.

    :ivar digest: sha256: and 64 hex digits. :ivar most: bytes that it may have.
    :ivar what: the image's name, for messages.
    """

    url: str
    digest: str
    most: int
    what: str


@attrs.frozen
class _Origin:
    """A host and port. :ivar named: the configuration names it, so it may be anywhere."""

    host: str
    port: int


class Downloads:
    """Fetches files by https.

    :param stall_seconds: how long nothing may come. :param attempts: how often it is tried without getting
        on. :param trust: the CAs; None: the machine's.
    """

    def __init__(
        self, reactor: IReactor, stall_seconds: float, attempts: int, trust: IOpenSSLTrustRoot | None = None
    ) -> None:
        self._reactor = reactor
        self._stall_seconds = stall_seconds
        self._attempts = attempts
        self._trust = trust

    async def fetch(self, wanted: Wanted, target: Path, progress: Progress) -> None:
        """Fetch a file to a path where nothing is, whole and checked, or leave nothing.

        :raise NotFound: the server has no such file.
        :raise PermissionDenied: it does not give it to us.
        :raise FailedPrecondition: its checksum is another, it is too large, or the server, its certificate
            or where it redirects to can't be accepted; says which.
        :raise Unavailable: the server can't be reached, or breaks off again and again.
        :raise ResourceExhausted: the disk is full.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            part = _Part(await self._thread(os.open, target, flags, 0o400))
        except OSError as error:
            raise _disk_error(error, target, wanted) from None
        try:
            await self._fetched(wanted, part, progress)
            digest = part.digest
            if digest != wanted.digest:
                raise FailedPrecondition(
                    f"image {wanted.what}: what {redacted(wanted.url)} has is {digest}, not the file with "
                    "the sha256 of the configuration; find out which of them is right"
                )
            await self._thread(os.fsync, part.descriptor)
        except OSError as error:
            await self._thread(target.unlink, True)
            raise _disk_error(error, target, wanted) from None
        except BaseException:
            await self._thread(target.unlink, True)
            raise
        finally:
            await self._thread(os.close, part.descriptor)

    async def _fetched(self, wanted: Wanted, part: _Part, progress: Progress) -> None:
        """Fetch a file, in as many attempts as bring it on."""
        pauses, fruitless = backoff(*RETRY_SECONDS), 0
        for number in count(1):
            before = part.size
            try:
                await self._attempt(wanted, part, progress)
                return
            except Unavailable as error:
                fruitless = fruitless + 1 if part.size < before + _WORTH else 0
                if fruitless >= self._attempts:
                    raise
                if not fruitless:
                    pauses = backoff(*RETRY_SECONDS)
                pause = next(pauses)
                progress(f"downloading image {wanted.what}: attempt {number} ended, as {error}")
                await sleep(self._reactor, pause)

    async def _attempt(self, wanted: Wanted, part: _Part, progress: Progress) -> None:
        headers = Headers({"User-Agent": [f"infranetes/{__version__}"], "Accept-Encoding": ["identity"]})
        if part.size:
            headers.setRawHeaders("Range", [f"bytes={part.size}-"])
            if part.validator:
                headers.setRawHeaders("If-Range", [part.validator])
        response = await self._answer(wanted, headers)
        body = _Body()
        response.deliverBody(body)
        try:
            await self._check(response, wanted, part)
            length = response.length if isinstance(response.length, int) else 0
            total = part.size + length
            if total > wanted.most:
                raise _too_large(wanted)
            await self._thread(_thd_check_room, part.descriptor, length, wanted)
            reported = -1  # MiB
            while True:
                data = await within(self._reactor, self._stall_seconds, body.more(), "the server's answer")
                if not data:
                    return
                if part.size + len(data) > wanted.most:
                    raise _too_large(wanted)
                await self._thread(part.thd_add, data)
                if part.size // _MIB > reported:
                    reported = part.size // _MIB
                    of = f" of {total // _MIB}" if length else ""
                    progress(f"downloading image {wanted.what}: {reported}{of} MiB")
        except DeadlineExceeded:
            raise Unavailable(
                f"the server of image {wanted.what} sent nothing for {self._stall_seconds:g} s"
            ) from None
        finally:
            body.stop()

    async def _check(self, response: IResponse, wanted: Wanted, part: _Part) -> None:
        """Check an answer, and make the part what it continues."""
        where = f"image {wanted.what}: {redacted(wanted.url)}"
        if response.code == 206:
            said = _RANGE.fullmatch(_header(response, "Content-Range"))
            if said is None or int(said[1]) != part.size:
                await self._thread(part.thd_restart)
                raise Unavailable(f"{where} answers with another part than it was asked for")
            return
        if response.code == 416:
            await self._thread(part.thd_restart)
            raise Unavailable(f"{where} has another size than it had")
        if response.code == 200:
            await self._thread(part.thd_restart)
            tag = _header(response, "ETag")
            part.validator = tag if tag.startswith('"') else _header(response, "Last-Modified")
            return
        if response.code in (404, 410):
            raise NotFound(f"{where} is not there (HTTP {response.code}); correct its url")
        if response.code in (401, 403):
            raise PermissionDenied(f"{where} is not given to us (HTTP {response.code})")
        if response.code == 429 or response.code >= 500:
            raise Unavailable(f"{where} can't be had for now (HTTP {response.code})")
        raise FailedPrecondition(f"{where} is answered with HTTP {response.code}")

    async def _answer(self, wanted: Wanted, headers: Headers) -> IResponse:
        """Return the answer to a request, after redirects."""
        url, own = wanted.url, _origin(urlsplit(wanted.url))
        for _ in range(MAX_REDIRECTS + 1):
            parts = urlsplit(url)
            allowed = anywhere if _origin(parts) == own else elsewhere
            response = await self._request(url, headers, allowed, wanted)
            if response.code not in _REDIRECTS:
                return response
            body = _Body()
            response.deliverBody(body)
            body.stop()
            url = _redirected(url, _header(response, "Location"), wanted)
        raise FailedPrecondition(f"image {wanted.what}: {redacted(wanted.url)} redirects too often")

    async def _request(self, url: str, headers: Headers, allowed: Allowed, wanted: Wanted) -> IResponse:
        host = _origin(urlsplit(url)).host
        endpoints = _Endpoints(self._reactor, host, allowed, self._trust or platformTrust())
        agent = Agent.usingEndpointFactory(
            self._reactor, endpoints, HTTPConnectionPool(self._reactor, persistent=False)
        )
        where = f"image {wanted.what}: {redacted(url)}"
        try:
            asked = cancellable(agent.request(b"GET", url.encode("ascii"), headers))
            return await within(self._reactor, self._stall_seconds, asked, "the server's answer")
        except (CancelledError, Unavailable):
            raise
        except DeadlineExceeded:
            raise Unavailable(f"{where} did not answer in {self._stall_seconds:g} s") from None
        except InfranetesError as error:
            raise type(error)(f"{where}: {error}") from None
        except Exception as error:  # errors of twisted.web and OpenSSL have no common base
            raise _connection_error(error, where) from None

    async def _thread(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        return await run_in_thread(self._reactor, work, *args, purpose=IMAGES)


class _Part:
    """The part of a file that has come.

    :ivar validator: what the server calls its content, by which a rest is one of the same content.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = 0
        self.validator = ""
        self._summed: _Hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        return f"sha256:{self._summed.hexdigest()}"

    def thd_add(self, data: bytes) -> None:
        self._summed.update(data)
        view = memoryview(data)
        while view:
            written = os.pwrite(self.descriptor, view, self.size)
            self.size += written
            view = view[written:]

    def thd_restart(self) -> None:
        """Begin again with nothing."""
        os.ftruncate(self.descriptor, 0)
        self.size, self.validator, self._summed = 0, "", hashlib.sha256()


class _Body(Protocol):
    """An answer's body, taken in pieces: while they are not, the server waits."""

    transport: BodyTransport | None

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._held = 0
        self._ended: Failure | None = None
        self._stopped = False
        self._waiting: Deferred[None] | None = None

    def more(self) -> Deferred[bytes]:
        """Return what has come; nothing at the end. Unavailable: it broke off."""
        return Deferred.fromCoroutine(self._more())

    async def _more(self) -> bytes:
        while not self._data and self._ended is None:
            self._waiting = Deferred()
            await self._waiting
        data, self._data, self._held = b"".join(self._data), [], 0
        if data:
            if self._ended is None and self.transport is not None:
                self.transport.resumeProducing()
            return data
        assert self._ended is not None
        if self._ended.check(ResponseDone, PotentialDataLoss):
            return b""
        raise Unavailable(f"the server broke off: {_words(self._ended.value)}")

    def stop(self) -> None:
        """Take no more. Idempotent."""
        if not self._stopped and self._ended is None and self.transport is not None:
            self._stopped = True
            self.transport.stopProducing()

    def dataReceived(self, data: bytes) -> None:
        if self._stopped:
            return
        self._data.append(data)
        self._held += len(data)
        if self._held >= _AHEAD and self.transport is not None:
            self.transport.pauseProducing()
        self._wake()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._ended = reason
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.called:
            waiting.callback(None)


@implementer(IAgentEndpointFactory)
class _Endpoints:
    """Endpoints with TLS at addresses that are allowed."""

    def __init__(self, reactor: IReactor, host: str, allowed: Allowed, trust: IOpenSSLTrustRoot) -> None:
        self._reactor = reactor
        self._host = host
        self._allowed = allowed
        self._trust = trust

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        options = optionsForClientTLS(self._host, trustRoot=self._trust)
        return wrapClientTLS(options, CheckedEndpoint(self._reactor, self._host, uri.port, self._allowed))


def _origin(parts: SplitResult) -> _Origin:
    return _Origin(parts.hostname or "", parts.port or 443)


def _redirected(url: str, location: str, wanted: Wanted) -> str:
    """Return where a redirect leads. :raise FailedPrecondition: somewhere else than to https."""
    where = f"image {wanted.what}: {redacted(url)} redirects"
    target = urljoin(url, location)
    try:
        parts = urlsplit(target)
        whole = bool(location) and bool(parts.hostname) and parts.port != 0 and target.isascii()
    except ValueError:
        whole = False
    if not whole or not target.isprintable() or " " in target or "@" in parts.netloc:
        raise FailedPrecondition(f"{where} to no address")
    if parts.scheme != "https":
        raise FailedPrecondition(f"{where} to {parts.scheme[:20]!r}; only https is followed")
    return target


def _header(response: IResponse, name: str) -> str:
    values = response.headers.getRawHeaders(name, [])
    value = values[0] if values else ""
    return value if isinstance(value, str) else value.decode("latin-1")


def _words(error: BaseException | None) -> str:
    """Return the message of an error. Some errors of twisted.web hold lists of Failures."""
    reasons = getattr(error, "reasons", None)
    return "; ".join(_words(each.value) for each in reasons) if reasons else str(error)


def _connection_error(error: Exception, where: str) -> InfranetesError:
    reasons = [error, *(each.value for each in getattr(error, "reasons", ()))]
    if any("certificate" in str(each) for each in reasons if isinstance(each, SSL.Error)) or any(
        type(each).__name__ == "VerificationError" for each in reasons
    ):
        return FailedPrecondition(f"{where}: its certificate is not trusted; put its CA into the machine's")
    return Unavailable(f"{where} can't be asked: {_words(error)}")


def _thd_check_room(descriptor: int, length: int, wanted: Wanted) -> None:
    """Refuse before the disk is full rather than after. :raise ResourceExhausted: there is no room."""
    filesystem = os.fstatvfs(descriptor)
    free = filesystem.f_bavail * filesystem.f_frsize
    if length > free:
        raise ResourceExhausted(
            f"image {wanted.what} needs {length} bytes more, and the disk is full but for {free}; "
            "remove images or make room, then call again"
        )


def _too_large(wanted: Wanted) -> FailedPrecondition:
    return FailedPrecondition(
        f"image {wanted.what}: its file has over {wanted.most} bytes (images.max_layer_bytes)"
    )


def _disk_error(error: OSError, target: Path, wanted: Wanted) -> InfranetesError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhausted(
            f"the disk of {target.parent} is full, so image {wanted.what} can't be downloaded; "
            "remove images or make room, then call again"
        )
    return FailedPrecondition(f"{target.parent} can't be written: {error.strerror}")
