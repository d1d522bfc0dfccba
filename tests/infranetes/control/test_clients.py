# SPDX-License-Identifier: Apache-2.0
"""Clients of the control socket that are slow on purpose, over real sockets: others are answered."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import attrs
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings
from twisted.internet.endpoints import connectProtocol
from twisted.internet.protocol import Protocol
from twisted.internet.task import LoopingCall

from infranetes.control import server as module
from infranetes_common.concurrency import start
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlStub, control_service
from tests.contract.container_sessions import resident
from tests.infranetes.control.visit_case import VisitCase, reactor
from tests.infranetes.pods.fakes import pod
from tests.support.waiting import until
from txgrpc import Channel
from txgrpc.connection import Phase
from txgrpc.framing import frame

MOST = 64  # clients at once
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
BEGUN = 80  # bytes: SETTINGS are whole, and a call is not
GROWTH = 24 << 20  # bytes of the process, for all slow clients together


def calls(window: int = 65535, whole: bool = True) -> bytes:
    """Return what begins some calls of ListPods. :param whole: whether their requests end."""
    client = H2Connection()
    client.local_settings = Settings(initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window})
    client.initiate_connection()
    for number in range(4):
        client.send_headers(2 * number + 1, [
            (":method", "POST"), (":scheme", "http"), (":path", "/infranetes.control.v1.Control/ListPods"),
            (":authority", "localhost"), ("te", "trailers"), ("content-type", "application/grpc"),
        ])  # fmt: skip
        request = frame(control.ListPodsRequest().SerializeToString())
        client.send_data(2 * number + 1, request, end_stream=whole)
    return client.data_to_send()


class SlowClientTests(VisitCase):
    """A node with some pods."""

    async def setUp(self) -> None:
        await super().setUp()
        for number in range(5):
            await start(self.world.sandboxes.run(pod(f"pod-{number}"), ""))
        node = self.world.control
        service = control_service(node, *[None] * 13)
        self.assertLess(MOST, module.LIMITS.max_connections)
        self.patch(module, "LIMITS", attrs.evolve(module.LIMITS, max_connections=MOST))
        self.server = module.control_server(reactor, service)
        await self.listen("control", self.server.factory)
        self.addCleanup(lambda: self.server.drain(0.1))

    async def connected(self, beginning: bytes) -> Protocol:
        """Connect, send this, and never read."""
        client: Protocol = await connectProtocol(self.socket("control"), Protocol())
        self.addCleanup(client.transport.abortConnection)
        client.transport.pauseProducing()
        client.transport.write(beginning)
        return client

    async def answered(self) -> None:
        """A new client is answered."""
        channel = Channel(reactor, self.socket("control"))
        answer = await ControlStub(channel).ListPods(control.ListPodsRequest(), timeout=20)
        self.assertEqual(len(answer.pods), 6)
        await channel.close()

    def kinds(self) -> Iterator[tuple[bytes, Phase]]:
        """Yield what such clients send, and how far they so come."""
        for beginning in (b"", PREFACE[:10], PREFACE):
            yield beginning, Phase.HANDSHAKE
        for beginning in (calls()[:BEGUN], calls(whole=False), calls(window=0)):
            yield beginning, Phase.OPEN

    def are(self, phase: Phase) -> bool:
        """Return whether all clients have come that far."""
        return {each.phase for each in self.server.connections} == {phase}

    async def test_however_many_do_not_read_or_say_little_a_new_one_is_answered(self) -> None:
        before = resident()
        for beginning, phase in self.kinds():
            for _ in range(MOST):
                await self.connected(beginning)
            await until(partial(self.are, phase), "all have said what they say")
            await self.answered()
            self.assertLessEqual(len(self.server.connections), MOST)
        self.assertLess(resident() - before, GROWTH)

    async def test_who_sends_a_byte_now_and_then_gives_way_to_who_calls(self) -> None:
        """Each byte is a sign of life: such a client is never taken for gone."""
        rest = calls()[BEGUN:]
        clients = [await self.connected(calls()[:BEGUN]) for _ in range(MOST)]
        sent = 0

        def drip() -> None:
            nonlocal sent
            for client in clients:
                client.transport.write(rest[sent : sent + 1])
            sent += 1

        dripping = LoopingCall(drip)
        dripping.start(0.05).addErrback(lambda _: None)
        self.addCleanup(dripping.stop)
        await until(lambda: sent > 5, "some bytes are sent")
        for _ in range(5):
            await self.answered()
        self.assertLessEqual(len(self.server.connections), MOST)
