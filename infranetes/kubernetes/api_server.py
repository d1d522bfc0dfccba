# SPDX-License-Identifier: Apache-2.0
"""Requests to Kubernetes' API server, with credentials that rotate."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import treq
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.protocol import Protocol
from twisted.internet.protocol import connectionDone as connection_done
from twisted.internet.ssl import PrivateCertificate
from twisted.python.failure import Failure
from twisted.web.client import Agent, ResponseDone
from twisted.web.http import PotentialDataLoss
from twisted.web.http_headers import Headers
from twisted.web.iweb import IResponse

from infranetes.kubernetes.credentials import Credentials
from infranetes.kubernetes.kubeconfig import Access
from infranetes.kubernetes.requests import Refused, Requests
from infranetes_common.concurrency import cancellable, within
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.https_client import TlsPolicy, error_words, machine_trust, trust_in
from infranetes_common.reactors import IReactor

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 30.0  # until the headers of an answer have arrived
IDLE_SECONDS = 180.0  # without a byte; a watch has a bookmark about every minute
MAX_LINE = 16 << 20  # bytes of one event
MAX_LIST = 4 << 30  # bytes of one answer, which is not kept in memory
MAX_REFUSAL = 4096
MAX_ANSWER = 256 * 1024
_CONTENT_TYPES = {"POST": "application/json", "PATCH": "application/strategic-merge-patch+json"}


def _policy(access: Access) -> TlsPolicy:
    """Return a kubeconfig's TLS policy. :raise FailedPrecondition: a certificate or key can't be read."""
    try:
        own = PrivateCertificate.loadPEM(access.key + access.certificate) if access.key else None
        return TlsPolicy(trust_in(access.authority) or machine_trust(), own, access.server_name)
    except Exception as error:  # OpenSSL's errors have no common base
        raise FailedPrecondition(f"a certificate or key of the kubeconfig can't be read: {error}") from None


def check_certificates(access: Access) -> None:
    """Check that connections can be made with these certificates and keys.

    :raise FailedPrecondition: one can't be read."""
    _policy(access)


class ApiServer(Requests):
    """The API server that a kubeconfig names.

    :param host: an address to use instead of the kubeconfig's; "": use that one.
    """

    def __init__(self, reactor: IReactor, kubeconfig: Path, host: str = "") -> None:
        self._reactor = reactor
        self._credentials = Credentials(reactor, kubeconfig, host)
        self._used: Access | None = None  # by `_agent`
        self._agent: Agent | None = None

    async def cluster(self) -> str:
        """Return a digest of its URL and its authority."""
        access = await self._credentials.current()
        return hashlib.sha256(f"{access.server}\n".encode() + access.authority).hexdigest()

    async def lines(self, path: str, query: Mapping[str, str], take: Callable[[bytes], None]) -> None:
        await self._ask("GET", path, _Lines(self._reactor, take), query=query)

    async def pieces(self, path: str, query: Mapping[str, str], take: Callable[[bytes], None]) -> None:
        await self._ask("GET", path, _Pieces(self._reactor, take), query=query)

    async def create(self, path: str, document: object) -> None:
        await self._ask("POST", path, _Ignored(self._reactor), document=document)

    async def answer(self, path: str, document: object) -> bytes:
        """Create an object from JSON, such as a review; return the answer, of at most MAX_ANSWER bytes."""
        body = _Answer(self._reactor)
        await self._ask("POST", path, body, document=document)
        return body.content

    async def merge(self, path: str, document: object) -> None:
        await self._ask("PATCH", path, _Ignored(self._reactor), document=document)

    async def _ask(
        self,
        method: str,
        path: str,
        body: _Body,
        *,
        query: Mapping[str, str] | None = None,
        document: object = None,
    ) -> None:
        access = await self._current()
        headers = Headers({"Accept": ["application/json"]})
        data = None
        if document is not None:
            data = json.dumps(document).encode()
            headers.setRawHeaders("Content-Type", [_CONTENT_TYPES[method]])
        if access.token:
            headers.setRawHeaders("Authorization", [f"Bearer {access.token}"])
        try:
            asking = treq.request(
                method,
                access.server + path,
                params=query,
                headers=headers,
                data=data,
                agent=self._agent,
                unbuffered=True,
            )
            answer = cancellable(cast(Deferred[IResponse], asking))  # treq's type has no name
            response = await within(self._reactor, ANSWER_SECONDS, answer, f"{method} {path}")
        except CancelledError:
            raise
        except Exception as error:  # errors of twisted.web and OpenSSL have no common base
            self._credentials.unreachable()
            raise Unavailable(f"{access.server} can't be asked: {error_words(error)}") from error
        if response.code in (200, 201):
            await _delivered(response, body)
            return
        if response.code == 401:
            self._credentials.refused()
        refusal = _Refusal(self._reactor)
        with contextlib.suppress(InfranetesError):  # the status is enough without the text
            await _delivered(response, refusal)
        raise Refused(response.code, refusal.content.decode(errors="replace"))

    async def _current(self) -> Access:
        """Return the present credentials, and make `_agent` use them."""
        access = await self._credentials.current()
        if access != self._used:
            self._agent = Agent(self._reactor, _policy(access), connectTimeout=CONNECT_SECONDS)
            self._used = access
        return access


async def _delivered(response: IResponse, body: _Body) -> None:
    response.deliverBody(body)
    try:
        await body.ended
    finally:
        body.stop()


class _Body(Protocol):
    """An answer's body. :ivar ended: fires at its end; fails with Unavailable if that is not reached."""

    def __init__(self, reactor: IReactor) -> None:
        self._reactor = reactor
        self._idle: IDelayedCall | None = None
        self.ended: Deferred[None] = Deferred(lambda _: self._abort())

    def connectionMade(self) -> None:
        self._idle = self._reactor.callLater(IDLE_SECONDS, self._silent)

    def dataReceived(self, data: bytes) -> None:
        if self._idle is not None:
            self._idle.reset(IDLE_SECONDS)
        if self.ended.called:
            return
        try:
            self.received(data)
        except Exception as error:  # ValueError, and whatever else a broken answer raises
            self._fail(Unavailable(f"the API server's answer can't be used: {error}"))

    def received(self, data: bytes) -> None:
        """Take a piece of the body. :raise Exception: the body is not valid."""
        raise NotImplementedError

    def connectionLost(self, reason: Failure = connection_done) -> None:
        self.stop()
        if self.ended.called:
            return
        if reason.check(ResponseDone, PotentialDataLoss):
            self.ended.callback(None)
        else:
            self._fail(Unavailable(f"the API server's answer broke off: {reason.getErrorMessage()}"))

    def stop(self) -> None:
        """Stop watching for silence. Idempotent."""
        idle, self._idle = self._idle, None
        if idle is not None and idle.active():
            idle.cancel()

    def _silent(self) -> None:
        self._idle = None
        self._fail(Unavailable(f"the API server was silent for {IDLE_SECONDS:g} s"))

    def _fail(self, error: Unavailable) -> None:
        if not self.ended.called:
            self.ended.errback(error)
        self._abort()

    def _abort(self) -> None:
        self.stop()
        if self.transport is not None:
            self.transport.loseConnection()


class _Lines(_Body):
    """A body whose lines are passed to `take`."""

    def __init__(self, reactor: IReactor, take: Callable[[bytes], None]) -> None:
        super().__init__(reactor)
        self._take = take
        self._rest = b""

    def received(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = self._rest + lines[0]
            self._rest = rest
        else:
            self._rest += rest
        if len(self._rest) > MAX_LINE:
            raise ValueError(f"one event has over {MAX_LINE} bytes")
        for line in lines:
            if line.strip():
                self._take(line)


class _Pieces(_Body):
    """A body whose pieces are passed to `take` as they arrive."""

    def __init__(self, reactor: IReactor, take: Callable[[bytes], None]) -> None:
        super().__init__(reactor)
        self._take = take
        self._size = 0

    def received(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_LIST:
            raise ValueError(f"it has over {MAX_LIST} bytes")
        self._take(data)


class _Ignored(_Body):
    """A body that is ignored."""

    def received(self, data: bytes) -> None:
        pass


class _Answer(_Body):
    """A body of a bounded size. :ivar content: what has arrived."""

    most = MAX_ANSWER

    def __init__(self, reactor: IReactor) -> None:
        super().__init__(reactor)
        self.content = b""

    def received(self, data: bytes) -> None:
        if len(self.content) + len(data) > self.most:
            raise ValueError(f"it has over {self.most} bytes")
        self.content += data


class _Refusal(_Answer):
    """A body of an error."""

    most = MAX_REFUSAL
