# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: its connections are bounded in number, and each request in time.

A connection alternates between two states:

==========  ================================  ==================================================
state       becomes                           where there are too many connections
==========  ================================  ==================================================
waiting     answering: the request is whole   gives way to a new one, unless its last request showed
            ended: REQUEST_SECONDS are over   the token
answering   waiting: the answer is written    stays
==========  ================================  ==================================================

Of the connections that wait, the longest waiting gives way of the address that has most, so that nobody
displaces others' by making many. A client that sends another request before it has the answer to one gets
that answer alone: otherwise the answers to all its requests would be kept until it reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from twisted.internet.interfaces import IAddress, ITCPTransport
from twisted.internet.protocol import Protocol, connectionDone
from twisted.protocols.policies import ProtocolWrapper
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel, _GenericHTTPChannelProtocol
from twisted.web.http import Request as HttpRequest
from twisted.web.resource import Resource
from twisted.web.server import Request, Site

from infranetes_common.crowding import one_too_many, source_of
from infranetes_common.transports import StreamTransport

MAX_CONNECTIONS = 64
REQUEST_SECONDS = 30.0  # from a connection, or the answer before, until the whole request has arrived

Screen = Callable[[Request], Resource | None]
"""Returns the resource that refuses a request, or None."""


class ShownRequest(Request):
    """A request whose body is dropped as it arrives, since no resource takes one."""

    def gotLength(self, length: int | None) -> None:
        Request.gotLength(self, 0)

    def handleContentChunk(self, data: bytes) -> None:
        pass

    def trust(self) -> None:
        """Keep the connection even where there are too many: its client has shown the token."""
        cast(_Connection, self.channel).is_trusted = True


class _Connection(HTTPChannel):
    """One client's connection."""

    site: QuietSite
    is_trusted = False
    source = ""  # whom it counts as

    def connectionMade(self) -> None:
        HTTPChannel.connectionMade(self)
        self.source = source_of(cast(ITCPTransport, self.transport).getPeer())
        self.site.waiting[self] = None

    def resetTimeout(self) -> None:
        """Do nothing: what arrives of a request does not start its time anew."""

    def allContentReceived(self) -> None:
        self.site.waiting.pop(self, None)
        self.site.answering.add(self)
        self.is_trusted = False
        HTTPChannel.allContentReceived(self)

    def requestDone(self, request: HttpRequest) -> None:
        self.site.answering.discard(self)
        self.site.waiting[self] = None
        if any(self._dataBuffer):
            self.persistent = False
        HTTPChannel.requestDone(self, request)
        if not self.persistent:
            self.setTimeout(REQUEST_SECONDS)  # type: ignore[no-untyped-call]  # to read the answer

    def abort(self) -> None:
        """Close it at once."""
        cast(ITCPTransport, self.transport).abortConnection()

    def leave(self) -> StreamTransport:
        """Let go of the transport, which another protocol takes. Nothing is bounded here any more."""
        self.setTimeout(None)  # type: ignore[no-untyped-call]
        self.site.answering.discard(self)
        transport = cast(StreamTransport, self.transport)
        transport.unregisterProducer()
        return transport

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.site.answering.discard(self)
        self.site.waiting.pop(self, None)
        HTTPChannel.connectionLost(self, reason)


def hand_over(request: Request, taker: Protocol) -> None:
    """Have another protocol take a request's connection. It begins with the request's head.

    Twisted has no call for that: its own protocols replace each other in this way (startTLS, h2)."""
    transport = cast(_Connection, request.channel).leave()
    if isinstance(transport, ProtocolWrapper):  # TLS
        transport.wrappedProtocol = taker
    else:
        transport.protocol = taker  # type: ignore[attr-defined]
    taker.makeConnection(transport)
    transport.resumeProducing()
    lines = [b" ".join((request.method, request.uri, request.clientproto))]
    for name, values in request.requestHeaders.getAllRawHeaders():
        lines += [name + b": " + value for value in values]
    taker.dataReceived(b"\r\n".join([*lines, b"", b""]))


def abort(request: Request) -> None:
    """Close a request's connection at once; it must not be lost yet."""
    cast(_Connection, request.channel).abort()


class QuietSite(Site):
    """A site that logs no requests and shows no tracebacks.

    :param screen: looks at each request first.
    :ivar waiting: the connections that wait for a request, the longest waiting first.
    :ivar answering: those whose requests are being answered."""

    displayTracebacks = False
    noisy = False
    protocol = _Connection  # type: ignore[assignment]  # Twisted's type has its own wrapper alone

    def __init__(self, root: Resource, screen: Screen) -> None:
        Site.__init__(self, root, requestFactory=ShownRequest, timeout=REQUEST_SECONDS)
        self.waiting: dict[_Connection, None] = {}
        self.answering: set[_Connection] = set()
        self._screen = screen

    def acceptableProtocols(self) -> list[bytes]:
        return [b"http/1.1"]

    def buildProtocol(self, addr: IAddress | None) -> _GenericHTTPChannelProtocol | None:
        """Serve a new connection, if need be in the place of one that waits; None: close it."""
        if len(self.waiting) + len(self.answering) >= MAX_CONNECTIONS:
            untrusted = [each for each in self.waiting if not each.is_trusted]
            if not untrusted:
                return None
            most = one_too_many(untrusted, lambda each: each.source)
            del self.waiting[most]
            most.abort()
        return cast(_GenericHTTPChannelProtocol, Site.buildProtocol(self, addr))

    def getResourceFor(self, request: Request) -> Resource:
        return self._screen(request) or Site.getResourceFor(self, request)

    def log(self, request: HttpRequest) -> None:
        pass
