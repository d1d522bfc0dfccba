# SPDX-License-Identifier: Apache-2.0
"""Timeouts of a stream's client: for its request, its streams, between bytes, and for closing."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from infranetes.streaming import server
from infranetes.streaming.connection import HEAD_TIMEOUT, LINGER
from infranetes.streaming.server import IDLE_TIMEOUT, STREAMS_TIMEOUT, StreamingServer
from infranetes.streaming.spdy import Spdy
from infranetes_common.wire import cri
from tests.infranetes.streaming.client import SpdyClient, spdy_head
from tests.infranetes.streaming.test_server import Agents, ended, output

HOUR = 3600.0


class Transport(StringTransport):
    """A server's transport; `over`: how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: Any = None
        self.over = ""
        self.stuck = False  # whether the other side does not read, so that written data stays

    def loseConnection(self) -> None:
        assert self.producer is None, "a transport waits for its producer to be unregistered"
        self.disconnecting = True
        if not self.stuck:
            self.end("closed", ConnectionDone())

    def abortConnection(self) -> None:
        self.end("cut", ConnectionAborted())

    def end(self, how: str, reason: Exception) -> None:
        if not self.over:
            self.over = how
            self.producer = None
            self.protocol.connectionLost(Failure(reason))


class LimitTests(SynchronousTestCase):
    """Timeouts with a virtual clock."""

    def setUp(self) -> None:
        self.reactor = cast(Any, MemoryReactorClock())
        self.agents = Agents()
        self.server = StreamingServer(self.reactor, self.agents)
        self.successResultOf(Deferred.fromCoroutine(self.server.start()))
        self.spdy = Spdy(client=True)

    def tearDown(self) -> None:
        self.assertEqual([str(call) for call in self.reactor.getDelayedCalls() if not self.tokens(call)], [])
        self.assertFalse(self.server._connections)

    def tokens(self, call: Any) -> bool:
        """Return whether the call is the expiry of a token, which is valid for a minute."""
        return "Tokens" in repr(call.func)

    def connected(self, host: str = "") -> Any:
        connection = self.server.buildProtocol(IPv4Address("TCP", host, 1) if host else None)
        assert connection is not None
        transport = Transport()
        transport.protocol = connection
        connection.makeConnection(transport)
        return connection

    def exec(self, *streams: str) -> Any:
        """A session with these streams opened."""
        request = cri.ExecRequest(container_id="c", cmd=["sh"], stdin=True, stdout=True)
        url = self.server.url("exec", request)
        connection = self.connected()
        head = spdy_head("v4.channel.k8s.io").format(path="/" + url.split("/", 3)[3]).replace("\n", "\r\n")
        connection.dataReceived(head.encode() + b"\r\n")
        self.streams = {name: self.spdy.open_stream({"streamtype": name}) for name in streams}
        connection.dataReceived(self.spdy.take_output())
        return connection

    def pass_(self, seconds: float) -> None:
        self.reactor.advance(seconds)

    def test_for_the_request(self) -> None:
        connection = self.connected()
        self.pass_(HEAD_TIMEOUT - 1)
        connection.dataReceived(b"GET / HTTP/1.1\r\n")
        self.assertEqual(connection.transport.over, "")
        self.pass_(1)
        self.assertEqual(connection.transport.over, "cut")

    def test_beyond_the_limit_the_oldest_without_a_session_gives_way(self) -> None:
        self.patch(server, "MAX_CONNECTIONS", 3)
        session = self.exec("error", "stdin", "stdout")
        oldest, second = self.connected(), self.connected()
        refused = self.connected()
        over = [each.transport.over for each in (session, oldest, second, refused)]
        self.assertEqual(over, ["", "cut", "", ""])
        second.abort()
        refused.abort()
        sessions = []
        for _ in range(2):
            self.spdy = Spdy(client=True)
            sessions.append(self.exec("error", "stdin", "stdout"))
        self.assertIsNone(self.server.buildProtocol(None), "sessions give way to nobody")
        for each in (session, *sessions):
            self.assertEqual(each.transport.over, "")
            each.abort()

    def test_nobody_displaces_others_by_many_connections(self) -> None:
        self.patch(server, "MAX_CONNECTIONS", 4)
        slow = self.connected("192.0.2.1")
        crowd = [self.connected("192.0.2.2") for _ in range(6)]
        crowd += [self.connected(f"127.0.0.{last}") for last in range(1, 9)]  # who has one has all of these
        self.assertEqual(slow.transport.over, "")
        for each in (slow, *crowd):
            each.abort()

    def test_for_the_streams_of_a_session(self) -> None:
        connection = self.exec("error", "stdin")
        self.pass_(STREAMS_TIMEOUT - 1)
        self.assertEqual(connection.transport.over, "")
        self.pass_(1)
        self.assertEqual(self.agents.calls, [], "the command was never begun")
        self.pass_(LINGER)
        self.assertEqual(connection.transport.over, "closed")

    def test_streams_that_come_late_are_in_time(self) -> None:
        connection = self.exec("error", "stdin")
        self.pass_(STREAMS_TIMEOUT - 1)
        self.spdy.open_stream({"streamtype": "stdout"})
        connection.dataReceived(self.spdy.take_output())
        self.pass_(STREAMS_TIMEOUT)
        self.assertEqual((len(self.agents.calls), connection.transport.over), (1, ""))
        connection.abort()

    def test_for_the_second_stream_of_a_forwarded_connection(self) -> None:
        url = self.server.url("portforward", cri.PortForwardRequest(pod_sandbox_id="p"))
        connection = self.connected()
        head = spdy_head("portforward.k8s.io").format(path="/" + url.split("/", 3)[3]).replace("\n", "\r\n")
        connection.dataReceived(head.encode() + b"\r\n")
        client = SpdyClient()
        client.spdy = self.spdy
        lonely = self.spdy.open_stream({"streamtype": "data", "port": "80", "requestid": "0"})
        connection.dataReceived(self.spdy.take_output())
        self.pass_(STREAMS_TIMEOUT - 1)
        for seconds, resets in ((0, set()), (1, {lonely})):
            self.pass_(seconds)
            client.transport = StringTransport()
            client.dataReceived(connection.transport.value())
            connection.transport.clear()
            self.assertEqual((client.resets, connection.transport.over), (resets, ""))
        connection.abort()

    def test_between_two_bytes_of_a_session(self) -> None:
        connection = self.exec("error", "stdin", "stdout")
        (call,) = self.agents.calls
        self.pass_(IDLE_TIMEOUT - 1)
        self.spdy.send_data(self.streams["stdin"], b"x")
        connection.dataReceived(self.spdy.take_output())
        self.pass_(IDLE_TIMEOUT - 1)
        call.answer(output(stdout=b"y"))
        self.pass_(IDLE_TIMEOUT - 1)
        self.assertEqual((connection.transport.over, call.cancelled), ("", False))
        self.pass_(1)
        self.assertEqual((connection.transport.over, call.cancelled), ("closed", True))
        self.assertEqual(IDLE_TIMEOUT, 4 * HOUR)
        self.assertEqual(STREAMS_TIMEOUT, 30)

    def test_a_silent_client_that_reads_nothing_is_cut_off(self) -> None:
        connection = self.exec("error", "stdin", "stdout")
        connection.transport.stuck = True
        self.pass_(IDLE_TIMEOUT)
        self.assertEqual(connection.transport.over, "")
        self.pass_(LINGER)
        self.assertEqual(connection.transport.over, "cut")

    def test_to_close_after_the_end(self) -> None:
        connection = self.exec("error", "stdin", "stdout")
        self.agents.calls[0].answer(ended(0))
        self.pass_(LINGER - 1)
        self.assertEqual(connection.transport.over, "")
        self.pass_(1)
        self.assertEqual(connection.transport.over, "closed")

    def test_to_read_what_was_written_before_the_end(self) -> None:
        """A user may page through the output for hours."""
        connection = self.exec("error", "stdin", "stdout")
        connection.transport.stuck = True
        self.agents.calls[0].answer(ended(0))
        self.pass_(LINGER)
        self.pass_(IDLE_TIMEOUT - 1)
        self.assertEqual(connection.transport.over, "")
        self.pass_(1)
        self.assertEqual(connection.transport.over, "cut")

    def test_to_read_why_it_is_cut_off(self) -> None:
        connection = self.exec("error", "stdin", "stdout")
        connection.transport.stuck = True
        connection.dataReceived(b"\x80\x02" + bytes(20))
        self.pass_(LINGER)
        self.assertEqual(connection.transport.over, "cut")
        self.assertTrue(self.agents.calls[0].cancelled)
