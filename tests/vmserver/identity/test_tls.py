# SPDX-License-Identifier: Apache-2.0
"""Who may connect to the agent, over real sockets."""

from __future__ import annotations

from typing import Any

import attrs
from cryptography import x509
from OpenSSL import SSL
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common.errors import InvalidArgument
from infranetes_common.identity import encode
from infranetes_common.wire import vmserver
from infranetes_common.wire.vmserver_rpcs import AgentStub
from tests.support.waiting import until
from tests.vmserver import harness, pki
from tests.vmserver.harness import SANDBOX, Agent, run_directory
from tests.vmserver.pki import CLIENT, DAY, SERVER, Authority, Pair
from txgrpc import Code, GrpcError
from vmserver.config import LimitsConfig
from vmserver.identity import tls

HANDSHAKE_SECONDS = 2.0  # a handshake of the node itself takes half a second on a busy machine


class _Plain(Protocol):
    """A peer that does not speak TLS."""

    def __init__(self, says: bytes = b"") -> None:
        self._says = says
        self.received = b""
        self.lost: Deferred[None] = Deferred()

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(self._says)

    def dataReceived(self, data: bytes) -> None:
        self.received += data

    def connectionLost(self, reason: Any = None) -> None:
        self.lost.callback(None)


class DoorTests(TestCase):
    """The agent's listener serves only the node."""

    async def setUp(self) -> None:
        directory = run_directory(self)
        limits = LimitsConfig(connections=2, handshakes=3, handshake_seconds=HANDSHAKE_SECONDS)
        self.agent = Agent(reactor, directory, limits=limits)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.agent.stop()))
        self.service = await self.agent.start()

    async def _call(self, pair: Pair | None, authority: Authority | None = None) -> Any:
        channel = self.agent.channel(pair)
        return await AgentStub(channel).Info(vmserver.InfoRequest(), timeout=10.0)

    async def _refused(self, pair: Pair | None) -> None:
        with self.assertRaises(GrpcError) as caught:
            await self._call(pair)
        self.assertEqual(caught.exception.code, Code.UNAVAILABLE)
        await self._still_serves()

    async def _still_serves(self) -> None:
        info = await self._call(self.agent.authority.node())
        self.assertEqual(info.sandbox_id, SANDBOX)
        while self.agent.channels:
            await self.agent.channels.pop().close()

    async def test_the_node_is_served(self) -> None:
        info = await self._call(self.agent.authority.node())
        self.assertEqual((info.sandbox_id, info.container_provider), (SANDBOX, "fake"))
        self.assertGreater(info.memory_bytes, 0)

    async def test_no_certificate_is_refused(self) -> None:
        await self._refused(Pair("", ""))

    async def test_the_nodes_name_by_another_ca_is_refused(self) -> None:
        await self._refused(Authority().node())

    async def test_another_vms_certificate_is_refused(self) -> None:
        await self._refused(self.agent.authority.vm("6b" * 16))

    async def test_another_vms_certificate_is_refused_even_if_it_were_for_clients(self) -> None:
        await self._refused(self.agent.authority.vm("6b" * 16, CLIENT))

    async def test_the_nodes_name_on_a_certificate_for_servers_is_refused(self) -> None:
        names = [x509.UniformResourceIdentifier("infranetes:node")]
        await self._refused(self.agent.authority.issue("node", names, SERVER))

    async def test_a_certificate_without_names_is_refused(self) -> None:
        await self._refused(self.agent.authority.issue("infranetes:node", [], CLIENT))

    async def test_a_name_that_only_begins_like_the_nodes_is_refused(self) -> None:
        names = [x509.UniformResourceIdentifier("infranetes:node:not")]
        await self._refused(self.agent.authority.issue("node", names, CLIENT))

    async def test_an_expired_certificate_of_the_node_is_refused(self) -> None:
        await self._refused(self.agent.authority.node(-3 * DAY))

    async def test_one_that_is_newer_than_the_machines_clock_is_taken(self) -> None:
        info = await self._call(self.agent.authority.node(3 * DAY))
        self.assertEqual(info.sandbox_id, SANDBOX)

    async def test_though_not_of_another_ca_or_of_another_than_the_node(self) -> None:
        await self._refused(Authority().node(3 * DAY))
        names = [x509.UniformResourceIdentifier("infranetes:vm:" + "6b" * 16)]
        await self._refused(self.agent.authority.issue("vm", names, CLIENT, shift=3 * DAY))

    async def test_tls_before_1_3_is_refused(self) -> None:
        def older(ca_pem: str, pair: Pair | None) -> Any:
            made = pki.client_context(ca_pem, pair)
            made.set_max_proto_version(SSL.TLS1_2_VERSION)
            return made

        patched = self.patch(harness, "client_context", older)
        with self.assertRaises(GrpcError) as caught:
            await self._call(self.agent.authority.node())
        self.assertEqual(caught.exception.code, Code.UNAVAILABLE)
        patched.restore()
        await self._still_serves()

    async def _plain(self, says: bytes) -> _Plain:
        endpoint = HostnameEndpoint(reactor, "127.0.0.1", self.service.port)
        peer = _Plain(says)
        factory = Factory.forProtocol(lambda: peer)  # type: ignore[arg-type]
        await endpoint.connect(factory)
        return peer

    async def test_plain_text_is_refused_without_a_word_of_http2(self) -> None:
        peer = await self._plain(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        await peer.lost
        # At most a TLS alert (content type 21) comes back.
        self.assertIn(peer.received[:1], (b"", b"\x15"))
        await self._still_serves()

    async def test_a_peer_that_says_nothing_is_cut_off_after_the_deadline(self) -> None:
        began = reactor.seconds()  # type: ignore[attr-defined]
        peer = await self._plain(b"")
        await peer.lost
        self.assertGreater(reactor.seconds() - began, HANDSHAKE_SECONDS * 0.9)  # type: ignore[attr-defined]
        await self._still_serves()

    async def test_silent_peers_push_out_one_another_and_not_the_node(self) -> None:
        node = AgentStub(self.agent.channel())
        await node.Info(vmserver.InfoRequest(), timeout=10.0)
        peers = [await self._plain(b"") for _ in range(6)]
        await peers[0].lost
        assert self.service._listener.factory is not None
        self.assertLessEqual(self.service._listener.factory.counts[1], 3)
        info = await node.Info(vmserver.InfoRequest(), timeout=10.0)
        self.assertEqual(info.sandbox_id, SANDBOX)
        for peer in peers[1:]:
            await peer.lost

    async def test_connections_of_the_node_are_bounded_too(self) -> None:
        for _ in range(2):
            await self._call(None)
        with self.assertRaises(GrpcError):
            await self._call(None)

    async def test_a_renewed_certificate_serves_new_connections_and_old_ones_go_on(self) -> None:
        node = AgentStub(self.agent.channel())
        before = await node.Info(vmserver.InfoRequest(), timeout=10.0)
        port = self.service.port
        renewed = await self.service.accept(encode(self.agent.authority.identity(SANDBOX)))
        self.assertEqual(renewed, port)
        again = await node.Info(vmserver.InfoRequest(), timeout=10.0)
        fresh = await self._call(None)
        for info in (again, fresh):
            self.assertEqual((info.boot_id, info.agent_id), (before.boot_id, before.agent_id))

    async def test_nothing_is_left_when_the_peer_is_gone(self) -> None:
        await self._call(None)
        await self.agent.channels.pop().close()
        factory = self.service._listener.factory
        assert factory is not None
        await until(lambda: factory.counts == (0, 0), "no connection is counted")


class ContextTests(SynchronousTestCase):
    """An identity that can't be used for TLS is refused when it arrives, not at the first connection."""

    def setUp(self) -> None:
        self.identity = Authority().identity(SANDBOX)

    def _refused(self, **fields: Any) -> str:
        with self.assertRaises(InvalidArgument) as caught:
            tls.context(attrs.evolve(self.identity, **fields))
        return str(caught.exception)

    def test_a_certificate_of_another_sandbox(self) -> None:
        self.assertIn("sandbox other", self._refused(sandbox_id="other"))

    def test_a_key_that_does_not_fit(self) -> None:
        words = self._refused(key_pem=Authority().vm(SANDBOX).key)
        self.assertIn("does not belong", words)

    def test_texts_that_are_no_pem_are_not_quoted(self) -> None:
        for field in ("certificate_pem", "key_pem", "ca_pem"):
            self.assertNotIn("SECRET", self._refused(**{field: "SECRET"}))
