# SPDX-License-Identifier: Apache-2.0
"""The streaming server over real sockets; the test plays the agent's side of each session."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from twisted.internet import reactor as the_reactor
from twisted.internet.defer import Deferred, DeferredQueue
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from infranetes.streaming.server import StreamingServer
from infranetes_common.errors import InvalidArgument, NotFound
from infranetes_common.wire import cri, vmserver
from tests.infranetes.streaming.client import (
    Raw,
    SpdyClient,
    TunnelClient,
    WebSocketClient,
    connect,
    oversized_data_frame,
    spdy_head,
    websocket_head,
)
from txgrpc import Code, GrpcError

reactor: Any = the_reactor


class Call:
    """The agent's side: `sent` has what the node sends; `answer` sends data, an exception or None ends."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.half_closed: Deferred[None] = Deferred()
        self.cancelled = False
        self.taken = 0
        self._answers: DeferredQueue[Any] = DeferredQueue()
        self._waiting: list[tuple[Callable[[], bool], Deferred[None]]] = []

    def answer(self, message: Any) -> None:
        self._answers.put(message)

    def until(self, condition: Callable[[], bool]) -> Deferred[None]:
        done: Deferred[None] = Deferred()
        self._waiting.append((condition, done))
        self._check()
        return done

    def _check(self) -> None:
        for waiting in [each for each in self._waiting if each[0]()]:
            self._waiting.remove(waiting)
            waiting[1].callback(None)

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self._check()

    async def done_sending(self) -> None:
        if not self.half_closed.called:
            self.half_closed.callback(None)

    def cancel(self) -> None:
        self.cancelled = True
        self._check()

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        message = await self._answers.get()
        self.taken += 1
        if message is None:
            raise StopAsyncIteration
        if isinstance(message, Exception):
            raise message
        return message

    def stdin(self) -> bytes:
        return b"".join(each.stdin for each in self.sent)

    def connection_bytes(self) -> bytes:
        return b"".join(each.data for each in self.sent)


class Agents:
    """Agents of all containers and sandboxes except `unknown`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def exec_call(self, id: str) -> Call:
        if id == "unknown":
            raise NotFound("no container unknown; crictl ps -a lists those there are")
        self.calls.append(Call())
        return self.calls[-1]

    attach_call = exec_call
    port_forward_call = exec_call


def output(**fields: Any) -> Any:
    return vmserver.SessionOutput(**fields)


def ended(code: int) -> Any:
    return output(end=vmserver.SessionEnd(exit_code=code))


class StreamingCase(TestCase):
    """A server, and helpers for tests of it."""

    async def setUp(self) -> None:
        self.agents = Agents()
        self.server = StreamingServer(reactor, self.agents)
        await self.server.start()
        self.clients: list[Raw] = []

    async def tearDown(self) -> None:
        for client in self.clients:
            client.transport.abortConnection()
            if not client.lost.called:
                await client.lost
        await self.server.stop()
        await self.settle(lambda: not self.server._connections)

    async def settle(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, or until the test's own timeout."""
        while not condition():
            await deferLater(reactor, 0.01)

    async def connect(self, url: str, client: Any, head: str) -> Any:
        self.clients.append(client)
        return await connect(reactor, url, client, head)

    def exec_url(self, **fields: Any) -> str:
        request: dict[str, Any] = {"container_id": "c", "cmd": ["sh"], "stdout": True} | fields
        return self.server.url("exec", cri.ExecRequest(**request))

    async def call(self) -> Call:
        """Return the agent's side of the latest session, once the session has begun."""
        await self.settle(lambda: bool(self.agents.calls) and bool(self.agents.calls[-1].sent))
        return self.agents.calls[-1]


class Exec(StreamingCase):
    async def spdy(self, url: str, names: list[str], *protocols: str) -> tuple[SpdyClient, dict[str, int]]:
        client = await self.connect(url, SpdyClient(), spdy_head(*(protocols or ("v4.channel.k8s.io",))))
        return client, {name: client.open(streamtype=name) for name in names}

    async def test_streams_go_both_ways_and_the_exit_code_is_a_status(self) -> None:
        url = self.exec_url(stdin=True, stderr=True)
        client, streams = await self.spdy(url, ["error", "stdin", "stdout", "stderr"])
        call = await self.call()
        self.assertEqual(list(call.sent[0].start.command), ["sh"])
        client.write(streams["stdin"], b"exit 3\n", finish=True)
        await call.half_closed
        self.assertEqual(call.stdin(), b"exit 3\n")
        call.answer(output(stdout=b"out"))
        call.answer(output(stderr=b"err"))
        call.answer(ended(3))
        await client.until(lambda: len(client.finished) == 4)
        self.assertIn(b"X-Stream-Protocol-Version: v4.channel.k8s.io", client.head)
        self.assertEqual((client.data[streams["stdout"]], client.data[streams["stderr"]]), (b"out", b"err"))
        status = json.loads(client.data[streams["error"]])
        self.assertEqual((status["status"], status["reason"]), ("Failure", "NonZeroExitCode"))
        self.assertEqual(status["details"]["causes"], [{"reason": "ExitCode", "message": "3"}])

    async def test_success_is_a_status_too(self) -> None:
        client, streams = await self.spdy(self.exec_url(), ["error", "stdout"])
        (await self.call()).answer(ended(0))
        await client.until(lambda: streams["error"] in client.finished)
        self.assertEqual(json.loads(client.data[streams["error"]])["status"], "Success")

    async def test_before_v4_the_error_stream_has_words_and_says_nothing_of_success(self) -> None:
        client, streams = await self.spdy(self.exec_url(), ["error", "stdout"], "v2.channel.k8s.io")
        (await self.call()).answer(ended(7))
        await client.until(lambda: streams["error"] in client.finished)
        self.assertIn(b"exit status 7", client.data[streams["error"]])
        client, streams = await self.spdy(self.exec_url(), ["error", "stdout"], "v2.channel.k8s.io")
        await self.settle(lambda: len(self.agents.calls) == 2)
        self.agents.calls[1].answer(ended(0))
        await client.until(lambda: streams["error"] in client.finished)
        self.assertNotIn(streams["error"], client.data)

    async def test_a_terminal_has_sizes(self) -> None:
        url = self.exec_url(stdin=True, tty=True)
        client, streams = await self.spdy(url, ["error", "stdin", "stdout", "resize"])
        call = await self.call()
        client.write(streams["resize"], b'{"Width":80,"Height":24}\n{"Width":132,')
        client.write(streams["resize"], b'"Height":50}')
        await call.until(lambda: len(call.sent) == 3)
        sizes = [(each.resize.width, each.resize.height) for each in call.sent[1:]]
        self.assertEqual(sizes, [(80, 24), (132, 50)])

    async def test_what_the_agent_refuses_is_said_on_the_error_stream(self) -> None:
        client, streams = await self.spdy(self.exec_url(), ["error", "stdout"])
        (await self.call()).answer(GrpcError(Code.FAILED_PRECONDITION, "container c has ended"))
        await client.until(lambda: streams["error"] in client.finished)
        status = json.loads(client.data[streams["error"]])
        self.assertIn("container c has ended", status["message"])

    async def test_an_unknown_container_is_said_on_the_error_stream(self) -> None:
        client, streams = await self.spdy(self.exec_url(container_id="unknown"), ["error", "stdout"])
        await client.until(lambda: streams["error"] in client.finished)
        self.assertIn("no container unknown", json.loads(client.data[streams["error"]])["message"])

    async def test_a_client_that_vanishes_ends_the_command(self) -> None:
        client, _ = await self.spdy(self.exec_url(stdin=True), ["error", "stdin", "stdout"])
        call = await self.call()
        client.transport.abortConnection()
        await call.until(lambda: call.cancelled)

    async def test_a_slow_reader_holds_the_agent_back(self) -> None:
        client, streams = await self.spdy(self.exec_url(), ["error", "stdout"])
        call = await self.call()
        client.transport.pauseProducing()
        pieces = 400
        for _ in range(pieces):
            call.answer(output(stdout=bytes(64 * 1024)))
        call.answer(ended(0))
        taken = -1
        while taken != call.taken:
            taken = call.taken
            await deferLater(reactor, 0.3)
        self.assertLess(taken, pieces // 2)
        client.transport.resumeProducing()
        await client.until(lambda: streams["error"] in client.finished)
        self.assertEqual(len(client.data[streams["stdout"]]), pieces * 64 * 1024)

    async def test_a_slow_agent_holds_the_client_back(self) -> None:
        client, streams = await self.spdy(self.exec_url(stdin=True), ["error", "stdin", "stdout"])
        call = await self.call()
        room: list[Deferred[None]] = []

        async def send(message: Any) -> None:
            call.sent.append(message)
            room.append(Deferred())
            await room[-1]

        call.send = send  # type: ignore[method-assign]
        client.write(streams["stdin"], bytes(64 * 1024 * 1024))
        await self.settle(lambda: bool(room))
        connection = next(iter(self.server._connections))
        await self.settle(lambda: not connection.flow.reading)
        self.assertLess(connection.flow._unread, 1024 * 1024)
        for waiting in room:
            waiting.callback(None)

    async def test_ten_sessions_go_on_at_once(self) -> None:
        sessions = []
        for number in range(10):
            client, streams = await self.spdy(self.exec_url(), ["error", "stdout"])
            await self.settle(lambda number=number: len(self.agents.calls) == number + 1)  # type: ignore[misc]
            sessions.append((client, streams, self.agents.calls[-1]))
        for number, (_, _, call) in enumerate(sessions):
            call.answer(output(stdout=str(number).encode()))
            call.answer(ended(0))
        for number, (client, streams, _) in enumerate(sessions):
            await client.until(lambda client=client, s=streams: s["error"] in client.finished)
            self.assertEqual(client.data[streams["stdout"]], str(number).encode())


class WebSockets(StreamingCase):
    async def test_channels_are_the_first_byte(self) -> None:
        url = self.exec_url(stdin=True, stderr=True)
        client = await self.connect(url, WebSocketClient(), websocket_head("v4.channel.k8s.io"))
        call = await self.call()
        await client.until(lambda: bool(client.head))
        self.assertIn(b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", client.head)
        client.write(0, b"input")
        await call.until(lambda: call.stdin() == b"input")
        call.answer(output(stdout=b"out"))
        call.answer(output(stderr=b"err"))
        call.answer(ended(0))
        await client.until(lambda: client.closed)
        self.assertEqual((client.data[1], client.data[2]), (b"out", b"err"))
        self.assertEqual(json.loads(client.data[3])["status"], "Success")

    async def test_the_base64_form_is_text(self) -> None:
        url = self.exec_url(stdin=True)
        client = await self.connect(url, WebSocketClient(), websocket_head("v4.base64.channel.k8s.io"))
        call = await self.call()
        client.write_text("0aW5wdXQ=")
        await call.until(lambda: call.stdin() == b"input")
        call.answer(output(stdout=b"output"))
        await client.until(lambda: "1b3V0cHV0" in client.texts)

    async def test_without_a_sub_protocol_it_is_the_oldest(self) -> None:
        client = await self.connect(self.exec_url(), WebSocketClient(), websocket_head())
        (await self.call()).answer(ended(4))
        await client.until(lambda: client.closed)
        self.assertIn(b"exit status 4", client.data[3])

    async def test_v5_can_end_stdin(self) -> None:
        url = self.exec_url(stdin=True)
        client = await self.connect(url, WebSocketClient(), websocket_head("v5.channel.k8s.io"))
        call = await self.call()
        client.write(0, b"all")
        client.write(255, bytes([0]))
        await call.half_closed
        self.assertEqual(call.stdin(), b"all")

    async def test_a_channel_that_is_not_there_cuts_the_client_off(self) -> None:
        client = await self.connect(self.exec_url(), WebSocketClient(), websocket_head("v4.channel.k8s.io"))
        call = await self.call()
        client.write(9, b"?")
        await client.lost
        await call.until(lambda: call.cancelled)

    async def test_an_unknown_sub_protocol_is_refused(self) -> None:
        client = await self.connect(self.exec_url(), Raw(), websocket_head("v9.channel.k8s.io"))
        await client.lost
        self.assertTrue(client.received.startswith(b"HTTP/1.1 403 "))


class PortForward(StreamingCase):
    def url(self, *ports: int) -> str:
        return self.server.url("portforward", cri.PortForwardRequest(pod_sandbox_id="p", port=ports))

    async def carried(self, client: SpdyClient) -> None:
        for number in (0, 1):
            error = client.open(streamtype="error", port="80", requestID=str(number))
            data = client.open(streamtype="data", port="80", requestID=str(number))
            await self.settle(lambda number=number: len(self.agents.calls) == number + 1)  # type: ignore[misc]
            call = await self.call()
            self.assertEqual(call.sent[0].port, 80)
            client.write(data, b"GET", finish=True)
            await call.half_closed
            self.assertEqual(call.connection_bytes(), b"GET")
            call.answer(vmserver.PortForwardOutput(data=b"200"))
            call.answer(None)
            await client.until(lambda data=data, error=error: {data, error} <= client.finished)
            self.assertEqual(client.data[data], b"200")

    async def test_each_pair_of_streams_is_a_connection(self) -> None:
        await self.carried(await self.connect(self.url(), SpdyClient(), spdy_head("portforward.k8s.io")))

    async def test_the_same_inside_a_websocket(self) -> None:
        head = websocket_head("SPDY/3.1+portforward.k8s.io")
        await self.carried(await self.connect(self.url(), TunnelClient(), head))

    async def test_a_port_where_nothing_listens_is_said_on_the_error_stream(self) -> None:
        client = await self.connect(self.url(), SpdyClient(), spdy_head("portforward.k8s.io"))
        error = client.open(streamtype="error", port="81", requestID="0")
        client.open(streamtype="data", port="81", requestID="0")
        (await self.call()).answer(GrpcError(Code.UNAVAILABLE, "nothing listens on port 81"))
        await client.until(lambda: error in client.finished)
        self.assertIn(b"nothing listens on port 81", client.data[error])

    async def test_a_stream_without_a_port_is_refused_and_harms_no_other(self) -> None:
        client = await self.connect(self.url(), SpdyClient(), spdy_head("portforward.k8s.io"))
        bad = client.open(streamtype="data")
        await client.until(lambda: bad in client.resets)
        await self.carried(client)

    async def test_a_client_that_vanishes_ends_its_connections(self) -> None:
        client = await self.connect(self.url(), SpdyClient(), spdy_head("portforward.k8s.io"))
        client.open(streamtype="error", port="80", requestID="0")
        client.open(streamtype="data", port="80", requestID="0")
        call = await self.call()
        client.transport.abortConnection()
        await call.until(lambda: call.cancelled)

    async def test_websocket_channels_come_in_pairs_and_begin_with_their_port(self) -> None:
        client = await self.connect(self.url(80, 443), WebSocketClient(), websocket_head("v4.channel.k8s.io"))
        await self.settle(lambda: len(self.agents.calls) == 2)
        await client.until(lambda: len(client.data) == 4)
        self.assertEqual(client.data, {0: b"P\0", 1: b"P\0", 2: b"\xbb\x01", 3: b"\xbb\x01"})
        client.write(2, b"hello")
        tls = self.agents.calls[1]
        await tls.until(lambda: tls.connection_bytes() == b"hello")
        tls.answer(vmserver.PortForwardOutput(data=b"hi"))
        await client.until(lambda: client.data[2] == b"\xbb\x01hi")


class BadInput(StreamingCase):
    async def answered(self, url: str, head: str) -> bytes:
        client = await self.connect(url, Raw(), head)
        await client.lost
        received: bytes = client.received
        return received

    async def test_a_token_is_good_once(self) -> None:
        url = self.exec_url()
        await self.connect(url, SpdyClient(), spdy_head("v4.channel.k8s.io"))
        await self.settle(lambda: not self.server._tokens._tickets)
        self.assertIn(b" 404 ", await self.answered(url, spdy_head("v4.channel.k8s.io")))

    async def test_no_sub_protocol_is_400(self) -> None:
        self.assertIn(b" 400 ", await self.answered(self.exec_url(), spdy_head()))

    async def test_an_unknown_sub_protocol_is_403_with_those_that_are_spoken(self) -> None:
        answer = await self.answered(self.exec_url(), spdy_head("v9.channel.k8s.io"))
        self.assertIn(b" 403 ", answer)
        for version in (b"v4", b"v3", b"v2", b"v1"):
            self.assertIn(b"X-Accepted-Stream-Protocol-Versions: " + version + b".channel.k8s.io", answer)

    async def test_no_upgrade_is_400(self) -> None:
        self.assertIn(b" 400 ", await self.answered(self.exec_url(), "GET {path} HTTP/1.1\nHost: node\n"))

    async def test_another_path_is_404_and_another_method_405(self) -> None:
        url = self.exec_url()
        head = spdy_head("v4.channel.k8s.io")
        self.assertIn(b" 404 ", await self.answered(url, head.replace("{path}", "/elsewhere")))
        self.assertIn(b" 405 ", await self.answered(url, head.replace("POST", "DELETE")))

    async def test_what_is_not_http_is_400(self) -> None:
        self.assertIn(b" 400 ", await self.answered(self.exec_url(), "\x16\x03\x01 hello\n"))

    async def test_spdy_nonsense_cuts_its_client_off_and_no_other(self) -> None:
        good = await self.connect(self.exec_url(), SpdyClient(), spdy_head("v4.channel.k8s.io"))
        streams = {name: good.open(streamtype=name) for name in ("error", "stdout")}
        call = await self.call()
        bad = await self.connect(self.exec_url(), SpdyClient(), spdy_head("v4.channel.k8s.io"))
        await bad.until(lambda: bool(bad.head))
        bad.transport.write(b"\x80\x02" + bytes(20))
        await bad.lost
        call.answer(ended(0))
        await good.until(lambda: streams["error"] in good.finished)

    async def test_an_oversized_data_frame_is_not_buffered(self) -> None:
        client = await self.connect(self.exec_url(stdin=True), SpdyClient(), spdy_head("v4.channel.k8s.io"))
        streams = {name: client.open(streamtype=name) for name in ("error", "stdin", "stdout")}
        call = await self.call()
        client.transport.write(oversized_data_frame(streams["stdin"]) + b"first bytes")
        await call.until(lambda: call.stdin() == b"first bytes")

    async def test_a_request_that_asks_for_nothing_gets_no_url(self) -> None:
        nothing: dict[str, Any] = {"cmd": []}
        for fields in ({"stdout": False}, {"tty": True, "stderr": True}, nothing):
            with self.assertRaises(InvalidArgument):
                self.exec_url(**fields)
