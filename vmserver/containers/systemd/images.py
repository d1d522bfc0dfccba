# SPDX-License-Identifier: Apache-2.0
"""The store of executables by their checksum, downloaded over https or sent by the node."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import urljoin, urlsplit

import treq
from OpenSSL.crypto import FILETYPE_PEM, load_certificate
from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.ssl import Certificate, trustRootFromCertificates
from twisted.python.failure import Failure
from twisted.web.client import Agent, BrowserLikePolicyForHTTPS, ResponseDone, ResponseFailed
from twisted.web.http import PotentialDataLoss
from twisted.web.http_headers import Headers
from twisted.web.iweb import IResponse

from infranetes_common.concurrency import run_in_thread, start
from infranetes_common.errors import (
    ConfigError,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import IReactor
from infranetes_common.transports import BodyTransport
from vmserver.containers.systemd.config import SystemdConfig

if TYPE_CHECKING:
    from twisted.internet._sslverify import IOpenSSLTrustRoot

REDIRECTS = 5
CONNECT_SECONDS = 30.0
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class Executables:
    """The image store of one VM. An image's id is "sha256:" and the checksum of the file."""

    def __init__(self, reactor: IReactor, config: SystemdConfig) -> None:
        self._reactor = reactor
        self._config = config
        self._directory = config.image_dir
        self._agent: Agent | None = None

    def start(self) -> None:
        """Remove the partial files of earlier processes.

        :raise FailedPrecondition: the directory can't be used."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o755)
            for part in self._directory.glob(".part-*"):
                part.unlink(missing_ok=True)
        except OSError as error:
            raise FailedPrecondition(f"{self._directory} can't be used: {error.strerror}") from error

    def path(self, image_id: str) -> Path:
        """Return the path of an image's executable, whether it exists or not."""
        return self._directory / image_id.removeprefix("sha256:")

    def has(self, image_id: str) -> bool:
        """Return whether an image is present."""
        return self.path(image_id).is_file()

    def list(self) -> list[str]:
        """Return the ids of all images, sorted."""
        return sorted(
            f"sha256:{file.name}"
            for file in self._directory.glob("*")
            if re.fullmatch(r"[0-9a-f]{64}", file.name)
        )

    async def remove(self, image_id: str) -> None:
        """Delete an image, in a thread: it may be large. Idempotent."""
        await run_in_thread(self._reactor, self.path(image_id).unlink, True)

    async def store(self, image_id: str, chunks: AsyncIterator[bytes]) -> None:
        """Store an executable. After a failure nothing of it remains.

        :raise InvalidArgument: `image_id` is not its checksum.
        :raise ResourceExhausted: it is too large, or the disk is full.
        """
        part = self._directory / f".part-{secrets.token_hex(8)}"
        try:
            with open(part, "xb") as file:  # noqa: ASYNC230  small chunks
                sink = Sink(image_id, self._config.image_max_size, file.write)
                async for chunk in chunks:
                    sink.add(chunk)
                sink.end()
                os.fchmod(file.fileno(), 0o755)
            os.rename(part, self.path(image_id))
        except OSError as error:
            raise _disk(self._directory, error) from error
        finally:
            await run_in_thread(self._reactor, part.unlink, True)

    async def fetch(self, image_id: str, url: str) -> None:
        """Download an executable unless it is present: see `IImageFetcher.fetch_image`."""
        if self.has(image_id):
            return
        check_url(url)
        part = self._directory / f".part-{secrets.token_hex(8)}"
        fetching = start(self._fetch(image_id, url, part))
        fetching.addTimeout(self._config.fetch_timeout, self._reactor)
        try:
            await fetching
        except TimeoutError:
            limit = self._config.fetch_timeout
            raise Unavailable(f"downloading {shown(url)} took over {limit:g} s; try again") from None
        finally:
            await run_in_thread(self._reactor, part.unlink, True)

    async def _fetch(self, image_id: str, url: str, part: Path) -> None:
        try:
            response = await self._open(url)
            with open(part, "xb") as file:  # noqa: ASYNC230  small chunks
                sink = Sink(image_id, self._config.image_max_size, file.write)
                await Body(sink.add).of(response)
                sink.end()
                os.fchmod(file.fileno(), 0o755)
            os.rename(part, self.path(image_id))
        except (InfranetesError, CancelledError):
            raise
        except OSError as error:
            raise _disk(self._directory, error) from error
        except Exception as error:
            raise Unavailable(f"{shown(url)} can't be downloaded: {_reason(error)}; try again") from None

    async def _open(self, url: str) -> IResponse:
        """Send the request and return the response with the file, after redirections to https URLs."""
        requested = url
        for _ in range(REDIRECTS + 1):
            response = await treq.get(
                url, agent=self._https(), allow_redirects=False, unbuffered=True,
                headers=Headers({b"Accept-Encoding": [b"identity"]}),
            )  # fmt: skip
            if response.code not in (301, 302, 303, 307, 308):
                break
            location = response.headers.getRawHeaders("location") or [""]
            await treq.collect(response, lambda data: None)
            url = urljoin(url, location[0])
            check_url(url)
        if response.code == 200:
            return cast(IResponse, response)
        await treq.collect(response, lambda data: None)
        kind: type[InfranetesError] = Unavailable
        if response.code in (404, 410):
            kind = NotFound
        elif response.code in (401, 403):
            kind = PermissionDenied
        raise kind(f"{shown(requested)}: the server answered {response.code}")

    def _https(self) -> Agent:
        if self._agent is None:
            policy = BrowserLikePolicyForHTTPS(_roots(self._config.ca_file))
            self._agent = Agent(self._reactor, policy, connectTimeout=CONNECT_SECONDS)
        return self._agent


class Body(Protocol):
    """Passes a response's body to `write` as it arrives, and closes the connection if that raises."""

    transport: BodyTransport | None

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._failure: Failure | None = None
        self._over: Deferred[None] = Deferred(lambda _: self._stop())

    async def of(self, response: IResponse) -> None:
        """Read the body to its end. :raise Exception: what `write` raised, or how the connection was lost."""
        response.deliverBody(self)
        await self._over

    def dataReceived(self, data: bytes) -> None:
        if self._failure is None:
            try:
                self._write(data)
            except Exception:
                self._failure = Failure()
                self._stop()

    def _stop(self) -> None:
        if self.transport is not None:
            self.transport.stopProducing()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._over.called:
            return
        if self._failure is not None:
            self._over.errback(self._failure)
        elif reason.check(ResponseDone, PotentialDataLoss):
            self._over.callback(None)
        else:
            self._over.errback(reason)


class Sink:
    """Writes a file while it computes the checksum and enforces a size limit."""

    def __init__(self, image_id: str, limit: int, write: Callable[[bytes], object]) -> None:
        self._image_id, self._limit, self._write = image_id, limit, write
        self._sum = hashlib.sha256()
        self._size = 0

    def add(self, data: bytes) -> None:
        """Write some bytes. :raise ResourceExhausted: the size limit is exceeded."""
        self._size += len(data)
        if self._size > self._limit:
            raise ResourceExhausted(
                f"image {self._image_id} is larger than providers.systemd.image_max_size, {self._limit} bytes"
            )
        self._sum.update(data)
        self._write(data)

    def end(self) -> None:
        """Compare the checksum. :raise InvalidArgument: it is another one."""
        found = f"sha256:{self._sum.hexdigest()}"
        if found != self._image_id:
            raise InvalidArgument(
                f"image {self._image_id} has the checksum {found}: it is another file; correct the checksum, "
                "or the URL"
            )


def check_url(url: str) -> None:
    """Validate a URL. :raise InvalidArgument: it is malformed, not https, or has credentials."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidArgument(f"{url[:200]!r} is not a URL") from None
    if parts.scheme != "https" or not parts.hostname or port == 0:
        raise InvalidArgument(f"{shown(url)}: executables are downloaded over https only")
    if parts.username is not None or parts.password is not None:
        raise InvalidArgument(f"{shown(url)}: a URL with credentials is refused")


def shown(url: str) -> str:
    """Return a URL for errors and logs, without the parts that may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:300]


def _roots(file: Path | None) -> IOpenSSLTrustRoot:
    if file is None:
        from twisted.internet.ssl import platformTrust

        return cast("IOpenSSLTrustRoot", platformTrust())
    try:
        pem = file.read_bytes()
        found = [Certificate.loadPEM(one) for one in _PEM.findall(pem)]
        for one in found:
            load_certificate(FILETYPE_PEM, one.dumpPEM())
    except Exception as error:
        raise ConfigError(f"providers.systemd.ca_file: {file} can't be read: {error}") from None
    if not found:
        raise ConfigError(f"providers.systemd.ca_file: {file} has no certificate in it")
    return cast("IOpenSSLTrustRoot", trustRootFromCertificates(found))


def _reason(error: Exception) -> str:
    if isinstance(error, ResponseFailed) and error.reasons:
        return str(error.reasons[0].value) or type(error.reasons[0].value).__name__
    return str(error) or type(error).__name__


def _disk(directory: Path, error: OSError) -> InfranetesError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhausted(f"the disk of {directory} is full")
    return FailedPrecondition(f"{directory} can't be written: {error.strerror or error}")
