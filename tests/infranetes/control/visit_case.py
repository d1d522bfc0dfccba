# SPDX-License-Identifier: Apache-2.0
"""A pod whose VM is visited by a client of the control socket, both over real sockets."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from twisted.internet.endpoints import UNIXClientEndpoint, UNIXServerEndpoint
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater
from twisted.logger import ILogObserver, LogEvent, globalLogPublisher
from twisted.trial import unittest
from zope.interface import implementer

from infranetes_common import errors
from infranetes_common.concurrency import start
from infranetes_common.reactors import installed
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlStub
from tests.infranetes.pods.fakes import FakeNode, pod
from txgrpc import Channel, Code, GrpcError, Server, Service

reactor = installed()


class VisitCase(unittest.TestCase):
    """The pod `web`, and the control socket once a test has called `serve_control`.

    :cvar log: the namespace of the log in which visits are written down.
    :ivar allowed: whether visits are. :ivar lines: what was written down of them.
    :ivar server: the one that was made last."""

    log = ""

    async def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.world = self.make_world()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)
        self.sandbox = await start(self.world.sandboxes.run(pod("web"), ""))
        self.allowed = True
        self.lines: list[LogEvent] = []

        @implementer(ILogObserver)
        def heard(event: LogEvent) -> None:
            if event["log_namespace"] == self.log:
                self.lines.append(event)

        globalLogPublisher.addObserver(heard)
        self.addCleanup(globalLogPublisher.removeObserver, heard)

    def make_world(self) -> FakeNode:
        """Return the node of the pod."""
        return FakeNode()

    async def serve_control(self, calls: object) -> None:
        """Serve these calls of `Control`, to `stub`."""
        self.control = await self.channel("control", Service(control.Control, calls))
        self.stub = ControlStub(self.control)

    async def channel(self, name: str, service: Service, **options: Any) -> Channel:
        """Serve at a socket of this name. Return a channel to it. Any: the channel's."""
        server = self.server = Server(reactor, [service], translate_error=errors.to_grpc)
        await self.listen(name, server.factory)
        channel = Channel(reactor, self.socket(name), **options)
        self.addCleanup(lambda: server.drain(0.1))
        self.addCleanup(channel.close)
        return channel

    def socket(self, name: str) -> UNIXClientEndpoint:
        """Return the way to the socket of this name."""
        return UNIXClientEndpoint(reactor, str(self.directory / name))

    async def listen(self, name: str, factory: Factory) -> None:
        """Listen at a socket of this name."""
        port = await UNIXServerEndpoint(reactor, str(self.directory / name)).listen(factory)
        self.addCleanup(port.stopListening)

    async def refused(self, code: Code, call: Any) -> str:
        """Check that a call fails with this code; return its message. Any: calls have no type in common."""
        with self.assertRaises(GrpcError) as caught:
            async for _ in call:
                pass
        self.assertEqual(caught.exception.code, code, caught.exception)
        return str(caught.exception.message)

    async def taken(self, write: Callable[[bytes], Awaitable[None]]) -> int:
        """Write until no more is taken for a moment. Return how many bytes were."""
        taken = 0

        async def write_all() -> None:
            nonlocal taken
            while True:
                await write(bytes(64 * 1024))
                taken += 64 * 1024

        writing = start(write_all())
        writing.addErrback(lambda _: None)
        before = -1
        while taken != before:
            before = taken
            await deferLater(reactor, 0.3, lambda: None)
        writing.cancel()
        return taken
