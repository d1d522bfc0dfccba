# SPDX-License-Identifier: Apache-2.0
"""Takes the connections of the node's programs to pods that sleep: answers probes, and hands over all others.

A connection      what comes                               what is done
is listened to    a GET of kube-probe that the pod has     the answer is repeated, and the connection ends
                  answered well
                  other bytes, or none for a second        the pod is woken, and called
                  its end                                  nothing: it was a probe by TCP
waits             more bytes                               they wait, and the caller once they are many
                  its end                                  nothing: the pod is awake for nobody
is handed over    bytes, or the end of one side            they are the other side's
"""

from __future__ import annotations

import re
import socket
import struct
from ipaddress import IPv4Address
from typing import Protocol, cast

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.interfaces import IAddress, IDelayedCall, ISystemHandle
from twisted.internet.protocol import Factory, connectionDone
from twisted.internet.protocol import Protocol as Connection
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes_common.concurrency import start
from infranetes_common.reactors import IReactor
from infranetes_common.transports import StreamTransport

MOST_CONNECTIONS = 64
MOST_HEAD = 8 << 10  # bytes of a probe's request
SILENT_SECONDS = 1.0  # after which the pod is taken to be the one that speaks first
CONNECT_SECONDS = 30.0
_SO_ORIGINAL_DST = 80  # linux/netfilter_ipv4.h: a struct sockaddr_in
_PROBE = re.compile(rb"GET [^\r\n]* HTTP/1\.[01]\r\n(?:[^\r\n]+\r\n)*?user-agent: *kube-probe/", re.I)
_GOOD = re.compile(rb"HTTP/1\.[01] (2[0-9][0-9])[ \r]")

_log = Logger()


class ProbedPods(Protocol):
    """The pods whose place is taken. They are meant by their addresses."""

    def has(self, pod: IPv4Address) -> bool:
        """Return whether it is one of them."""

    def answer(self, pod: IPv4Address, port: int, request: bytes) -> int | None:
        """Return the status that is repeated; None: the pod is asked."""

    def answered_probe(self, pod: IPv4Address, port: int, request: bytes, status: int) -> None:
        """Note a pod's own answer, a good one: only then is what was asked repeated."""

    async def wake(self, pod: IPv4Address) -> None:
        """Wait until the pod is awake, and is called by itself. :raise InfranetesError: it is not."""


class StandIn(Factory):
    """Makes the protocols of connections that the kernel leads here."""

    noisy = False

    def __init__(self, reactor: IReactor, pods: ProbedPods) -> None:
        self.reactor = reactor
        self.pods = pods
        self.callers: set[Caller] = set()

    def buildProtocol(self, addr: IAddress | None) -> Caller:
        return Caller(self)

    def close(self) -> None:
        """End all connections."""
        for caller in list(self.callers):
            caller.abort()


class CallersTransport(StreamTransport, ISystemHandle):
    """The transport of a connection whose socket can be asked."""


class Caller(Connection):
    """A connection of one of the node's programs."""

    transport: CallersTransport

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in
        self._pods = stand_in.pods
        self._heard = b""
        self._silence: IDelayedCall | None = None
        self._handing: Deferred[None] | None = None
        self._pod: _Called | None = None

    def connectionMade(self) -> None:
        self._stand_in.callers.add(self)
        meant = _original_destination(cast(socket.socket, self.transport.getHandle()))
        if meant is None or not self._pods.has(meant[0]) or len(self._stand_in.callers) > MOST_CONNECTIONS:
            self.abort()
            return
        self._address, self._port = meant
        self._silence = self._stand_in.reactor.callLater(SILENT_SECONDS, self._hand_over)

    def abort(self) -> None:
        """End the connection at once."""
        self.transport.abortConnection()

    def dataReceived(self, data: bytes) -> None:
        if self._pod is not None:
            self._pod.transport.write(data)
            return
        self._heard += data
        if self._handing is not None:
            if len(self._heard) > MOST_HEAD:
                self.transport.pauseProducing()
        elif not _may_be_probe(self._heard):
            status = None
            if _is_probe(self._heard):
                status = self._pods.answer(self._address, self._port, self._heard)
            if status is not None:
                self._answer(status)
            else:
                self._hand_over()

    def _answer(self, status: int) -> None:
        self._rest()
        head = f"HTTP/1.1 {status} Repeated\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        self.transport.write(head.encode())
        self.transport.loseConnection()

    def _rest(self) -> None:
        silence, self._silence = self._silence, None
        if silence is not None and silence.active():
            silence.cancel()

    # ---- handing over

    def _hand_over(self) -> None:
        self._rest()
        self._handing = start(self._handed_over())
        self._handing.addErrback(self._not_handed_over)

    async def _handed_over(self) -> None:
        await self._pods.wake(self._address)
        endpoint = TCP4ClientEndpoint(
            self._stand_in.reactor, str(self._address), self._port, timeout=int(CONNECT_SECONDS)
        )
        called = await endpoint.connect(Factory.forProtocol(_Called))
        pod = cast(_Called, called)
        request = self._heard if _is_probe(self._heard) else b""
        pod.meet(self, request)
        self._pod, self._heard, heard = pod, b"", self._heard
        pod.transport.write(heard)
        self.transport.resumeProducing()

    def _not_handed_over(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            _log.info(
                "a connection to port {port} of a pod that sleeps, {address}, is ended: {error}",
                port=self._port,
                address=str(self._address),
                error=failure.value,
            )
            self.abort()

    def note(self, request: bytes, answer: bytes) -> None:
        """Note what the pod has answered to a probe."""
        if (good := _GOOD.match(answer)) is not None:
            self._pods.answered_probe(self._address, self._port, request, int(good[1]))

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._rest()
        self._stand_in.callers.discard(self)
        if self._pod is not None:
            self._pod.leave()
        elif self._handing is not None:
            self._handing.cancel()


class _Called(Connection):
    """The connection to the pod in place of a caller."""

    transport: StreamTransport

    def __init__(self) -> None:
        self._caller: Caller | None = None
        self._request = b""  # of a probe; b"": it is none, or its answer is noted
        self._answer = b""

    def meet(self, caller: Caller, request: bytes) -> None:
        """Be the other side of a caller."""
        self._caller, self._request = caller, request
        self.transport.registerProducer(caller.transport, True)
        caller.transport.registerProducer(self.transport, True)

    def leave(self) -> None:
        """The caller is gone: send what is written, and end."""
        self._caller = None
        self.transport.unregisterProducer()
        self.transport.loseConnection()

    def dataReceived(self, data: bytes) -> None:
        if self._caller is None:
            return
        if self._request:
            self._answer += data
            if b"\n" in self._answer or len(self._answer) > MOST_HEAD:
                self._caller.note(self._request, self._answer)
                self._request = self._answer = b""
        self._caller.transport.write(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        caller, self._caller = self._caller, None
        if caller is not None:
            caller.transport.unregisterProducer()
            caller.transport.loseConnection()


def _is_probe(heard: bytes) -> bool:
    """Return whether what was heard is the request of a probe, as kubelet makes it."""
    return heard.endswith(b"\r\n\r\n") and _PROBE.match(heard) is not None


def _may_be_probe(heard: bytes) -> bool:
    """Return whether what was heard may still become the request of a probe."""
    return b"GET ".startswith(heard[:4]) and b"\r\n\r\n" not in heard and len(heard) <= MOST_HEAD


def _original_destination(connection: socket.socket) -> tuple[IPv4Address, int] | None:
    """Return where a connection was meant for; None: here."""
    try:
        meant = connection.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
    except OSError:  # the kernel did not lead it here
        return None
    port, address = struct.unpack("!2xH4s8x", meant)
    return (IPv4Address(address), port) if not IPv4Address(address).is_loopback else None
