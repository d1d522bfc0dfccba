# SPDX-License-Identifier: Apache-2.0
"""Keepalive and drain, server and client in memory."""

from __future__ import annotations

from typing import Any

from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.settings import SettingCodes, Settings
from twisted.internet.error import ConnectionLost
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure

from tests.txgrpc.demo import DEMO, Demo, DemoStub, Note
from tests.txgrpc.memory_case import MemoryCase, start
from tests.txgrpc.support import drain_iterator
from tests.txgrpc.test_hostile import HEADERS
from txgrpc import Channel, Code, Disconnected, GrpcError, Limits, Server, Service
from txgrpc.framing import frame
from txgrpc.http2 import LAST_STREAM_ID, goaway
from txgrpc.server import _DRAIN_PING

ECHO, WAIT, COUNT = (f"/txgrpc.demo.Demo/{name}" for name in ("Echo", "Wait", "Count"))


class CrowdTests(MemoryCase):
    """More clients than a server has connections for."""

    def setUp(self) -> None:
        self.server = Server(Clock(), [Service(DEMO, Demo(Clock()))], limits=Limits(max_connections=3))

    def client(self, *calls: str, **how: Any) -> StringTransport:  # Any: as `begin` has them
        """Connect, and begin these calls."""
        return self.begin(self.server.factory.buildProtocol(None), *calls, **how)

    def begin(
        self, connection: Any, *calls: str, begin: bool = True, window: int = 65535, whole: bool = True
    ) -> StringTransport:
        """Begin these calls. :param whole: whether their requests have an end. Any: Twisted's IProtocol."""
        transport = StringTransport()
        connection.makeConnection(transport)
        if begin:
            client = H2Connection()
            client.local_settings = Settings(initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window})
            client.initiate_connection()
            for id, call in enumerate(calls):
                fields = {**dict(HEADERS), ":path": call}
                client.send_headers(2 * id + 1, list(fields.items()))
                request = frame(Note(number=1000).SerializeToString())
                client.send_data(2 * id + 1, request, end_stream=whole)
            connection.dataReceived(client.data_to_send())
        return transport

    def crowd(self, *clients: StringTransport) -> list[int]:
        """Connect as many more. Return which of them gave way, one after the other."""
        order: list[int] = []
        while len(order) < len(clients) and (connection := self.server.factory.buildProtocol(None)):
            order += [
                place for place, each in enumerate(clients) if each.disconnecting and place not in order
            ]
            self.begin(connection, WAIT)
        return order

    def test_the_oldest_that_has_not_begun_gives_way(self) -> None:
        self.assertEqual(
            self.crowd(self.client(), self.client(begin=False), self.client(begin=False)), [1, 2, 0]
        )

    def test_who_has_begun_no_call_gives_way_to_others(self) -> None:
        self.assertEqual(self.crowd(self.client(ECHO), self.client(), self.client()), [1, 2, 0])

    def test_who_waits_for_nothing_gives_way(self) -> None:
        """Be it that all is answered, or that the request has no end."""
        slow = self.client(ECHO, WAIT, whole=False)
        self.assertEqual(self.crowd(self.client(WAIT), slow, self.client(ECHO)), [1, 2])

    def test_who_does_not_read_gives_way_last(self) -> None:
        unread = self.client(COUNT, ECHO, window=0)
        self.assertEqual(self.crowd(unread, self.client(WAIT), self.client(ECHO)), [2, 0])

    def test_whose_methods_work_gives_way_to_nobody(self) -> None:
        for _ in range(3):
            self.client(WAIT, ECHO, window=0)
        self.assertIsNone(self.server.factory.buildProtocol(None))


class KeepaliveTests(MemoryCase):
    """PING."""

    def test_client_notices_a_dead_server(self) -> None:
        """Silence during a call is followed by a PING, and silence after that by the loss of the call."""
        world = self.world(channel={"keepalive": 10, "limits": Limits(keepalive_timeout=3)})
        call = world.stub.Wait(Note())
        world.wait(60)
        self.assertNoResult(call)
        world.wire.stalled.add(world.wire.server)
        world.wait(9)
        self.assertNoResult(call)
        world.wait(6)
        failure = self.failureResultOf(call, GrpcError)
        self.assertEqual(failure.value.code, Code.UNAVAILABLE)
        self.assertIn("PING", failure.value.message)
        self.assertTrue(world.wire.client.aborted)

    def test_server_notices_a_dead_client(self) -> None:
        """The methods of a client that is gone are cancelled."""
        world = self.world(server={"keepalive": 10})
        world.stub.Wait(Note()).addErrback(lambda _: None)
        world.wait(100)
        self.assertEqual(world.demo.ended, [])
        world.wire.stalled.add(world.wire.client)
        world.wait(35)
        self.assertEqual(world.demo.ended, ["Wait cancelled"])
        self.assertFalse(world.server.connections)

    def test_a_connection_that_is_lost_while_it_is_asked_has_no_next_question(self) -> None:
        world = self.world(channel={"keepalive": 10}, server={"keepalive": None})
        call = world.stub.Wait(Note())
        world.settle()
        client = world.wire.client

        def lose(data: bytes) -> None:
            client.protocol.connectionLost(Failure(ConnectionLost()))

        self.patch(client, "write", lose)
        world.wait(11)
        self.assertEqual(self.code_of(call), Code.UNAVAILABLE)
        self.assertEqual(world.clock.getDelayedCalls(), [])

    def test_idle_client_is_quiet(self) -> None:
        """Without a call in progress the client sends nothing."""
        world = self.world(channel={"keepalive": 1}, server={"keepalive": None})
        world.stub.Echo(Note())
        world.settle()
        world.wire.stalled.add(world.wire.client)
        world.wait(30)
        self.assertEqual(bytes(world.wire.client.unsent), b"")

    def test_peer_that_never_begins(self) -> None:
        """A connection without HTTP/2's first bytes is closed."""
        world = self.world()
        world.stub.Echo(Note()).addErrback(lambda _: None)
        world.clock.advance(0)
        world.wire.stalled.update((world.wire.client, world.wire.server))
        world.wait(21)
        self.assertTrue(world.wire.server.aborted)
        self.assertFalse(world.server.connections)


class DrainTests(MemoryCase):
    """GOAWAY."""

    def test_running_calls_end(self) -> None:
        """Draining waits for the calls that run, and closes then; nothing is lost."""
        world = self.world()
        call = world.stub.Wait(Note(number=5000))
        world.settle()
        drained = world.server.drain(60)
        world.wait(4)
        self.assertNoResult(call)
        self.assertNoResult(drained)
        world.wait(2)
        self.assertEqual(self.successResultOf(call).number, 5000)
        self.successResultOf(drained)
        self.assertFalse(world.wire.up)

    def test_calls_under_way_are_answered(self) -> None:
        """Calls that the client began before it knew are answered too."""
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        late = [world.stub.Echo(Note(number=n)) for n in range(5)]
        drained = world.server.drain(60)
        world.settle()
        self.assertEqual([self.successResultOf(call).number for call in late], list(range(5)))
        self.successResultOf(drained)

    def test_time_is_limited(self) -> None:
        """What still runs when the time is over is cancelled; its caller sees UNAVAILABLE."""
        world = self.world()
        call = world.stub.Wait(Note())
        world.settle()
        drained = world.server.drain(10)
        world.wait(9)
        self.assertNoResult(drained)
        world.wait(2)
        error = self.failureResultOf(call, GrpcError).value
        self.assertEqual((error.code, error.message), (Code.UNAVAILABLE, "the server is shutting down"))
        self.assertNotIsInstance(error, Disconnected)  # the server has said so itself
        self.assertEqual(world.demo.ended, ["Wait cancelled"])
        self.successResultOf(drained)

    def test_silent_client(self) -> None:
        """A client that answers nothing does not hold up the end."""
        world = self.world()
        world.stub.Wait(Note()).addErrback(lambda _: None)
        world.settle()
        drained = world.server.drain(10)
        world.wire.stalled.update((world.wire.client, world.wire.server))
        world.wait(16)
        self.successResultOf(drained)

    def test_idle_connections_close(self) -> None:
        """Without calls, draining is done once the client knows; nothing left: at once."""
        world = self.world()
        world.stub.Echo(Note())
        world.settle()
        self.patch(world.wire.client, "loseConnection", lambda: None)
        drained = world.server.drain(10)
        world.settle()
        self.successResultOf(drained)
        self.successResultOf(world.server.drain(10))
        self.assertEqual([call for call in world.clock.getDelayedCalls() if call.active()], [])

    def test_new_connection_for_new_calls(self) -> None:
        """After a GOAWAY the channel's next call has a new connection; the old one closes with its last."""
        world = self.world()
        old_call = world.stub.Wait(Note(number=5000))
        world.settle()
        first = world.wire
        for connection in world.server.connections:
            connection.drain()
        world.settle()
        new = world.stub.Echo(Note(text="new"))
        world.settle()
        self.assertEqual(self.successResultOf(new).text, "new")
        self.assertIsNot(world.wire, first)
        world.wait(6)
        self.assertEqual(self.successResultOf(old_call).number, 5000)
        self.assertFalse(first.up)
        self.assertTrue(world.wire.up)
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        self.assertEqual(len(world.wires), 2, "the end of the old connection ended the new one for new calls")

    def test_a_server_closes_once_the_client_knows_and_does_not_wait_for_it_to_close(self) -> None:
        """The first answer to the drain's PING shows that the client knows; no other answer does."""
        world = self.world()
        call = world.stub.Wait(Note(number=1000))
        world.settle()
        self.patch(world.wire.client, "loseConnection", lambda: None)
        (connection,) = world.server.connections
        world.wire.stalled.add(world.wire.client)
        connection.pong(_DRAIN_PING)
        drained = world.server.drain(60)
        connection.pong(b"another ")
        self.assertEqual(connection._last_stream_id, LAST_STREAM_ID)
        world.wire.stalled.clear()
        world.settle()
        self.assertEqual(connection._last_stream_id, 1)
        connection.pong(_DRAIN_PING)
        self.assertEqual(bytes(world.wire.server.unsent), b"", "it is told once")
        world.wait(2)
        self.successResultOf(call)
        self.successResultOf(drained)

    def test_draining_again_tells_the_client_nothing_new(self) -> None:
        """A server that is told to drain while it drains says so once."""
        world = self.world()
        call = world.stub.Wait(Note(number=1000))
        world.settle()
        drained = [world.server.drain(60)]
        world.settle()
        drained.append(world.server.drain(60))
        self.assertEqual(bytes(world.wire.server.unsent), b"")
        world.wait(2)
        self.successResultOf(call)
        for each in drained:
            self.successResultOf(each)
        self.assertEqual(world.clock.getDelayedCalls(), [])

    def test_draining_again_gives_no_more_time(self) -> None:
        world = self.world()
        call = world.stub.Wait(Note())
        world.settle()
        drained = [world.server.drain(5)]
        world.wait(4)
        drained.append(world.server.drain(60))
        world.wait(2)
        self.assertEqual(self.code_of(call), Code.UNAVAILABLE)
        for each in drained:
            self.successResultOf(each)

    def test_a_server_is_drained_once_the_last_client_has_left(self) -> None:
        world = self.world()
        other = Channel(world.clock, world.endpoint)
        calls = [world.stub.Wait(Note(number=1000)), DemoStub(other).Wait(Note(number=5000))]
        world.settle()
        drained = world.server.drain(60)
        world.wait(3)
        self.successResultOf(calls[0])
        self.assertNoResult(drained)
        world.wait(3)
        self.successResultOf(calls[1])
        self.successResultOf(drained)

    def test_unseen_calls_go_elsewhere(self) -> None:
        """A unary call that GOAWAY says was never looked at is made again on a new connection."""
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        first = world.wire
        first.stalled.add(first.client)
        call = world.stub.Echo(Note(text="again"))
        stream = world.stub.Chat()
        heard = start(drain_iterator(stream))
        first.client.protocol.dataReceived(goaway(1, ErrorCodes.NO_ERROR, b"moving house"))
        world.settle()
        self.assertEqual(self.successResultOf(call).text, "again")
        failure = self.failureResultOf(heard, GrpcError)
        self.assertEqual(failure.value.code, Code.UNAVAILABLE)
        self.assertIn("moving house", failure.value.message)

    def test_an_unseen_call_that_is_cancelled_before_it_goes_elsewhere_goes_nowhere(self) -> None:
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        world.wire.stalled.add(world.wire.client)
        call = world.stub.Wait(Note())
        world.endpoint.hang = True
        world.wire.client.protocol.dataReceived(goaway(1, ErrorCodes.NO_ERROR, b""))
        world.clock.advance(0)
        self.assertNoResult(call)
        call.cancel()
        self.assertEqual(self.code_of(call), Code.CANCELLED)
        world.endpoint.hang = False
        world.wait(60)
        other = world.stub.Echo(Note(text="other"))
        world.settle()
        self.successResultOf(other)
        self.assertNotIn("/txgrpc.demo.Demo/Wait", [each.method for each in world.demo.calls])

    def test_why_a_server_takes_no_more_calls_is_told_by_its_number_if_it_says_nothing(self) -> None:
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        world.wire.stalled.add(world.wire.client)
        heard = start(drain_iterator(world.stub.Chat()))
        world.wire.client.protocol.dataReceived(goaway(1, ErrorCodes.ENHANCE_YOUR_CALM, b""))
        self.assertIn("HTTP/2 error 11", self.failureResultOf(heard, GrpcError).value.message)

    def test_refused_streams_go_again(self) -> None:
        """A unary call whose stream was refused is made once more; refused again, it is UNAVAILABLE."""
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        server = next(iter(world.server.connections))
        accept = server.request_received
        refused: list[int] = []

        def refuse(stream_id: int, headers: Any) -> None:
            if len(refused) in (0, 1, 2):
                refused.append(stream_id)
                server.send_reset(stream_id, ErrorCodes.REFUSED_STREAM)
            else:
                accept(stream_id, headers)

        server.request_received = refuse  # type: ignore[method-assign]
        first = world.stub.Echo(Note())
        world.settle()
        self.assertEqual(self.code_of(first), Code.UNAVAILABLE)
        second = world.stub.Echo(Note(text="again"))
        world.settle()
        self.assertEqual(self.successResultOf(second).text, "again")
        self.assertEqual(len(refused), 3)

    def test_a_refused_stream_of_requests_does_not_go_again(self) -> None:
        """The requests that were taken from the caller's iterator are not there for another time."""
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        server = next(iter(world.server.connections))
        refused: list[int] = []

        def refuse(stream_id: int, headers: Any) -> None:
            refused.append(stream_id)
            server.send_reset(stream_id, ErrorCodes.REFUSED_STREAM)

        server.request_received = refuse  # type: ignore[method-assign]
        call = world.stub.Sum([Note(number=1)])
        world.settle()
        self.assertEqual(self.code_of(call), Code.UNAVAILABLE)
        self.assertEqual(len(refused), 1)
