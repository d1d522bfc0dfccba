# SPDX-License-Identifier: Apache-2.0
"""Both ends of a connection in memory, moved by hand, with a clock that only tests wind."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, fail
from twisted.internet.error import ConnectionAborted, ConnectionDone, ConnectionRefusedError
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

from tests.txgrpc.demo import DEMO, Demo, DemoStub
from txgrpc import Channel, Limits, Server, Service

#: What Twisted's transports hold before they pause their producer.
HIGH_WATER = 64 * 1024


class Transport:
    """One end's transport: what it writes stays in `unsent` until the wire takes it."""

    def __init__(self) -> None:
        self.unsent = bytearray()
        self.producer: Any = None
        self.paused = False
        self.closing = False
        self.aborted = False
        self.reading = True
        self.protocol: Any = None
        self.most = 0  # the most bytes it ever held

    def write(self, data: bytes) -> None:
        assert isinstance(data, bytes)
        if self.aborted or self.closing:
            return
        self.unsent += data
        self.most = max(self.most, len(self.unsent))
        if len(self.unsent) > HIGH_WATER and self.producer is not None and not self.paused:
            self.paused = True
            self.producer.pauseProducing()

    def take(self) -> bytes:
        data = bytes(self.unsent)
        self.unsent.clear()
        if self.paused:
            self.paused = False
            if self.producer is not None:
                self.producer.resumeProducing()
        return data

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        assert streaming
        self.producer = producer

    def unregisterProducer(self) -> None:
        self.producer = None

    def pauseProducing(self) -> None:
        self.reading = False

    def resumeProducing(self) -> None:
        self.reading = True

    def loseConnection(self) -> None:
        assert self.producer is None, "a transport waits for its producer to be unregistered"
        self.closing = True

    def abortConnection(self) -> None:
        self.aborted = True

    def getPeer(self) -> str:
        return "memory"


class Wire:
    """A client's and a server's transport, and what is between them."""

    def __init__(self, client: Any, server: Any) -> None:
        self.client, self.server = Transport(), Transport()
        self.client.protocol, self.server.protocol = client, server
        self.stalled: set[Transport] = set()  # whose output goes nowhere
        self.up = True
        server.makeConnection(self.server)
        client.makeConnection(self.client)

    def step(self) -> bool:
        """Move what there is, once each way; whether there was anything."""
        moved = False
        for sender, receiver in ((self.client, self.server), (self.server, self.client)):
            if not self.up:
                return False
            if sender.unsent and receiver.reading and sender not in self.stalled:
                moved = True
                data = sender.take()
                for start in range(0, len(data), 16 * 1024):
                    if not receiver.aborted:
                        receiver.protocol.dataReceived(data[start : start + 16 * 1024])
            if sender.aborted or (sender.closing and not sender.unsent):
                self.cut(ConnectionAborted() if sender.aborted else ConnectionDone())
        return moved

    def cut(self, why: Exception) -> None:
        """The connection is lost for both."""
        if self.up:
            self.up = False
            for end in (self.client, self.server):
                end.protocol.connectionLost(Failure(why))


@implementer(IStreamClientEndpoint)
class Endpoint:
    """Connects clients to a server's factory in memory."""

    def __init__(self, world: InMemoryPair) -> None:
        self.world = world
        self.refuse = False
        self.hang = False
        self.attempts = 0
        self.cancelled = 0

    def connect(self, factory: Any) -> Deferred[Any]:
        self.attempts += 1
        if self.hang:
            return Deferred(self._cancelled)
        if self.refuse:
            return fail(ConnectionRefusedError("no one there"))
        connected: Deferred[Any] = Deferred()
        self.world.clock.callLater(0, self._connect, factory, connected)
        return connected

    def _cancelled(self, _: Any) -> None:
        self.cancelled += 1

    def _connect(self, factory: Any, connected: Deferred[Any]) -> None:
        client = factory.buildProtocol(None)
        server = self.world.server.factory.buildProtocol(None)
        if server is None:
            connected.errback(ConnectionRefusedError("drained"))
            return
        self.world.wires.append(Wire(client, server))
        connected.callback(client)


class InMemoryPair:
    """A server with Demo, a channel to it, their clock, and the wires between them."""

    def __init__(
        self,
        *,
        server: dict[str, Any] | None = None,
        channel: dict[str, Any] | None = None,
        services: list[Service] | None = None,
    ) -> None:
        self.clock = Clock()
        self.wires: list[Wire] = []
        self.demo = Demo(self.clock)
        self.server = Server(self.clock, services or [Service(DEMO, self.demo)], **(server or {}))
        self.endpoint = Endpoint(self)
        self.channel = Channel(self.clock, self.endpoint, **(channel or {}))
        self.stub = DemoStub(self.channel)

    @property
    def wire(self) -> Wire:
        return self.wires[-1]

    def settle(self) -> None:
        """Move all that can be moved without time going by."""
        for _ in range(10_000):
            self.clock.advance(0)
            if not any([wire.step() for wire in self.wires]):
                break
        else:
            raise AssertionError("the two ends never stop talking")
        self.clock.advance(0)

    def wait(self, seconds: float, step: float = 1.0) -> None:
        """Let time go by, in steps, everything settling at each."""
        self.settle()
        while seconds > 0:
            self.clock.advance(min(step, seconds))
            seconds -= step
            self.settle()

    def end(self) -> None:
        """Cut what still runs, so that no coroutine is left for the garbage collector."""
        for wire in self.wires:
            wire.cut(ConnectionDone())


SMALL = Limits(stream_window=65535, connection_window=65535)
