# SPDX-License-Identifier: Apache-2.0
"""Agents in VMs that boot images are given their identity."""

from __future__ import annotations

import shutil
import stat
import tempfile
from pathlib import Path

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXServerEndpoint
from twisted.internet.interfaces import IListeningPort
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import TestCase

from infranetes.identity.authority import Authority
from infranetes.providers.qemu.program.sockets import IDENTITY
from infranetes.providers.qemu.vm import introduction
from infranetes.providers.qemu.vm.introduction import Introduction
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import InvalidArgument
from infranetes_common.identity import Identity, decode
from infranetes_common.reactors import installed

reactor = installed()


class _Agent(Protocol):
    """The agent's end, at QEMU's socket."""

    def __init__(self, met: Deferred[_Agent]) -> None:
        self._met = met
        self._buffer = b""
        self.document: Deferred[bytes] = Deferred()

    def connectionMade(self) -> None:
        self._met.callback(self)

    def dataReceived(self, data: bytes) -> None:
        self._buffer += data
        if self._buffer.endswith(b"\n"):
            document, self.document = self.document, Deferred()
            received, self._buffer = self._buffer, b""
            document.callback(received)

    def says(self, words: bytes) -> None:
        assert self.transport is not None
        self.transport.write(words)


class IntroductionTests(TestCase):
    """An agent asks, and is answered."""

    async def setUp(self) -> None:  # type: ignore[override]
        self.sockets = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.sockets)
        certificate, key = Authority(self.mktemp()).issue_vm("sandbox", 3600)
        self.identity = Identity("sandbox", certificate, key, certificate)
        self.meetings: list[Deferred[_Agent]] = [Deferred() for _ in range(3)]
        self.agents = iter(list(self.meetings))
        factory = Factory.forProtocol(lambda: _Agent(next(self.agents)))
        self.port: IListeningPort = await UNIXServerEndpoint(reactor, str(self.sockets / IDENTITY)).listen(
            factory
        )
        self.addCleanup(self.port.stopListening)

    def begun(self) -> Introduction:
        made = Introduction(reactor, "qemu-1", self.sockets, lambda: True)
        self.addCleanup(made.end)
        made.begin()
        made.begin()
        return made

    async def test_it_gets_its_identity_and_the_time_each_time_that_it_asks(self) -> None:
        introduction.keep(self.identity, self.sockets)
        self.begun()
        agent = await self.meetings[0]
        times = []
        for _ in range(2):
            waiting = agent.document
            agent.says(b"waiting\nwaiting\n")
            received = decode(await waiting)
            self.assertEqual(attrs.evolve(received, now_nanos=0), self.identity)
            times.append(received.now_nanos)
            agent.says(b"ready 2475\n")
        self.assertLess(0, times[0])
        self.assertLess(times[0], times[1])

    async def test_the_next_daemon_goes_on(self) -> None:
        introduction.keep(self.identity, self.sockets)
        first = self.begun()
        await self.meetings[0]
        first.end()
        first.end()
        self.begun()
        agent = await self.meetings[1]
        waiting = agent.document
        agent.says(b"waiting\n")
        self.assertEqual(decode(await waiting).key_pem, self.identity.key_pem)

    async def test_a_lost_connection_is_made_again(self) -> None:
        introduction.keep(self.identity, self.sockets)
        self.begun()
        agent = await self.meetings[0]
        assert agent.transport is not None
        agent.transport.loseConnection()
        agent = await self.meetings[1]
        waiting = agent.document
        agent.says(b"waiting\n")
        await waiting

    async def test_nonsense_is_not_answered(self) -> None:
        introduction.keep(self.identity, self.sockets)
        self.begun()
        agent = await self.meetings[0]
        waiting = agent.document
        agent.says(b"x" * 100_000 + b"\nfailed " + b"y" * 3000 + b"\n\xff\xfe\nready 99999999\n")
        self.assertFalse(waiting.called)
        agent.says(b"waiting\n")
        decode(await waiting)

    async def test_a_guest_that_asks_and_never_reads_fills_no_memory_of_the_node(self) -> None:
        introduction.keep(self.identity, self.sockets)
        made = self.begun()
        agent = await self.meetings[0]
        assert agent.transport is not None
        agent.transport.pauseProducing()  # type: ignore[attr-defined]
        for _ in range(2000):
            agent.says(b"waiting\n")
            await run_in_thread(reactor, int)
        transport = made._port.transport  # type: ignore[union-attr]
        held = len(transport.dataBuffer) + len(b"".join(transport._tempDataBuffer))  # type: ignore[union-attr]
        self.assertLess(held, 256 << 10)
        waiting = agent.document
        agent.transport.resumeProducing()  # type: ignore[attr-defined]
        await waiting

    async def test_it_is_kept_for_root_alone_and_what_is_none_is_refused(self) -> None:
        introduction.keep(self.identity, self.sockets)
        [file] = [each for each in self.sockets.iterdir() if each.is_file()]
        self.assertEqual(stat.S_IMODE(file.stat().st_mode), 0o600)
        for _ in range(2):
            introduction.keep(self.identity, self.sockets)
        with self.assertRaises(InvalidArgument):
            introduction.keep(attrs.evolve(self.identity, key_pem="nonsense"), self.sockets)
