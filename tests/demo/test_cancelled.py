# SPDX-License-Identifier: Apache-2.0
"""Waits of the demo that Ctrl-C ends, whatever they wait for at that moment."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from twisted.internet.defer import CancelledError
from twisted.internet.endpoints import UNIXServerEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import TestCase

from demo.daemon import Daemon
from demo.pod import remove_all
from infranetes_common.concurrency import Coro, start
from infranetes_common.reactors import installed
from infranetes_common.wire.cri_rpcs import RuntimeStub
from tests.support.waiting import until
from txgrpc import Channel, GrpcError

reactor = installed()


class Silent(Factory):
    """Takes connections, and says nothing."""

    def __init__(self) -> None:
        self.connections: list[Protocol] = []

    def buildProtocol(self, address: object) -> Protocol:
        self.connections.append(Protocol())
        return self.connections[-1]


class CancelledTests(TestCase):
    """A daemon that takes connections, and never answers."""

    async def setUp(self) -> None:
        place = Path(tempfile.mkdtemp(prefix="inf-"))  # short, for the socket
        self.addCleanup(shutil.rmtree, str(place))
        self.server = Silent()
        self.daemon = Daemon(reactor, place / "toml", place / "socket", place / "log")
        port = await UNIXServerEndpoint(reactor, str(place / "socket")).listen(self.server)
        self.addCleanup(port.stopListening)
        self.channel: Channel = self.daemon.channel()
        self.addCleanup(self.channel.close)

    async def check_it_ends(self, wait: Coro[object]) -> None:
        waiting = start(wait)
        await until(lambda: self.server.connections, "a connection")
        self.assertNoResult(waiting)
        waiting.cancel()
        with self.assertRaises((CancelledError, GrpcError)):
            await waiting

    async def test_for_the_daemon_to_be_ready(self) -> None:
        await self.check_it_ends(self.daemon.ready(RuntimeStub(self.channel), 60.0, lambda words: None))

    async def test_for_what_an_earlier_demo_left(self) -> None:
        await self.check_it_ends(remove_all(RuntimeStub(self.channel)))
