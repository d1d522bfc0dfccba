# SPDX-License-Identifier: Apache-2.0
"""Exec, Attach and PortForward as the node sees them: over mutual TLS, on the fake ContainerProvider."""

from __future__ import annotations

import os
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver as messages
from tests.contract.container_sessions import living
from tests.harness.needs import needs_programs
from tests.support.waiting import until
from tests.vmserver.rpc.test_agent import ID, AgentCase
from txgrpc import Code
from vmserver.config import LimitsConfig

reactor = installed()


def stdin(data: bytes) -> Any:
    return messages.SessionInput(stdin=data)


@needs_programs("busybox")
class SessionCase(AgentCase):
    """Calls with a first message."""

    async def setUp(self) -> None:
        self.calls: list[Any] = []
        await super().setUp()

    async def _clean_up(self) -> None:
        for call in self.calls:
            call.cancel()
        await super()._clean_up()

    async def begun(self, call: Any, first: Any) -> Any:
        self.calls.append(call)
        await call.send(first)
        return call

    async def exec(self, *command: str, **fields: Any) -> Any:
        start = messages.SessionStart(id=ID, command=command, **({"stdout": True, "stderr": True} | fields))
        return await self.begun(self.stub.Exec(timeout=30.0), messages.SessionInput(start=start))

    async def all(self, call: Any) -> tuple[bytes, bytes, int]:
        out, err, code = b"", b"", -1
        async for message in call:
            out, err = out + message.stdout, err + message.stderr
            if message.HasField("end"):
                code = message.end.exit_code
        return out, err, code

    async def failed(self, code: Code, call: Any) -> str:
        return await self.refused(code, Deferred.fromCoroutine(self.all(call)))

    async def running(self) -> None:
        await self.load()
        await self.run_container("sleep", "600")


class ExecTests(SessionCase):
    """A command and its streams."""

    async def test_output_and_exit_code(self) -> None:
        await self.running()
        call = await self.exec("sh", "-c", "echo out; echo err >&2; exit 7")
        self.assertEqual(await self.all(call), (b"out\n", b"err\n", 7))

    async def test_the_end_of_the_requests_is_the_end_of_stdin(self) -> None:
        await self.running()
        call = await self.exec("cat", stdin=True)
        await call.send(stdin(b"one "))
        await call.send(stdin(b"two"))
        await call.done_sending()
        self.assertEqual(await self.all(call), (b"one two", b"", 0))

    async def test_a_terminal_gets_its_size(self) -> None:
        await self.running()
        call = await self.exec("sh", "-c", "read x; stty size", stdin=True, tty=True)
        await call.send(messages.SessionInput(resize=messages.TerminalSize(width=91, height=17)))
        await call.send(stdin(b"\n"))
        out, err, code = await self.all(call)
        self.assertIn(b"17 91", out)
        self.assertEqual((err, code), (b"", 0))

    async def test_a_call_that_is_cancelled_ends_the_command(self) -> None:
        await self.running()
        marker = str(800000 + os.getpid() % 100000)
        call = await self.exec("sleep", marker)
        await until(lambda: living("sleep", marker), "it runs")
        call.cancel()
        await until(lambda: not living("sleep", marker), "it is killed")

    async def test_no_more_than_the_limit_at_once(self) -> None:
        await self.running()
        self.agent.service._agent.limit(LimitsConfig(sessions=2))  # type: ignore[union-attr]
        calls = [await self.exec("cat", stdin=True) for _ in range(2)]
        self.assertIn("2 sessions", await self.failed(Code.RESOURCE_EXHAUSTED, await self.exec("true")))
        for call in calls:
            await call.done_sending()
            await self.all(call)
        self.assertEqual((await self.all(await self.exec("true")))[2], 0)

    async def test_what_is_wrong_is_said(self) -> None:
        await self.failed(Code.NOT_FOUND, await self.exec("true"))
        await self.load()
        await self.create("sleep", "600")
        await self.failed(Code.FAILED_PRECONDITION, await self.exec("true"))
        await self.failed(Code.INVALID_ARGUMENT, await self.exec())
        first = await self.begun(self.stub.Exec(timeout=30.0), stdin(b"x"))
        self.assertIn("start", await self.failed(Code.INVALID_ARGUMENT, first))
        empty = self.stub.Attach(timeout=30.0)
        await empty.done_sending()
        await self.failed(Code.INVALID_ARGUMENT, empty)

    async def test_wrong_input_ends_the_command(self) -> None:
        await self.running()
        marker = str(900000 + os.getpid() % 100000)
        for wrong in (
            stdin(b"x" * (256 * 1024 + 1)),
            messages.SessionInput(resize=messages.TerminalSize(width=70000, height=1)),
            messages.SessionInput(start=messages.SessionStart(id=ID)),
        ):
            call = await self.exec("sleep", marker, stdin=True)
            await call.send(wrong)
            await self.failed(Code.INVALID_ARGUMENT, call)
            await until(lambda: not living("sleep", marker), "it is killed")


class AttachTests(SessionCase):
    """A container's own streams."""

    async def test_output_from_now_on_until_the_container_ends(self) -> None:
        await self.load()
        await self.run_container("sh", "-c", "sleep 2; echo later; exit 2")
        start = messages.SessionStart(id=ID, stdout=True)
        call = await self.begun(self.stub.Attach(timeout=30.0), messages.SessionInput(start=start))
        self.assertEqual(await self.all(call), (b"later\n", b"", 2))

    async def test_cancelled_it_goes_on(self) -> None:
        await self.running()
        start = messages.SessionStart(id=ID, stdout=True)
        call = await self.begun(self.stub.Attach(timeout=30.0), messages.SessionInput(start=start))
        await deferLater(reactor, 0.2, lambda: None)
        call.cancel()
        listed = await self.stub.ListContainers(messages.ListContainersRequest(), timeout=10.0)
        self.assertTrue(listed.containers[0].pid)


class Peer(Protocol):
    """A server in the pod that echoes everything once the client has finished writing."""

    transport: Any

    def __init__(self) -> None:
        self.got = b""

    def dataReceived(self, data: bytes) -> None:
        self.got += data
        if data.endswith(b"!"):
            self.transport.write(self.got.upper())
            self.transport.loseConnection()


class PortForwardTests(SessionCase):
    """Connections to the pod's ports."""

    async def port_forward(self, port: int) -> Any:
        first = messages.PortForwardInput(port=port)
        return await self.begun(self.stub.PortForward(timeout=30.0), first)

    async def received(self, call: Any) -> bytes:
        return b"".join([message.data async for message in call])

    async def listening(self, protocol: type[Protocol]) -> int:
        endpoint = TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1")
        port = await endpoint.listen(Factory.forProtocol(protocol))
        self.addCleanup(port.stopListening)
        return int(port.getHost().port)

    async def test_bytes_both_ways(self) -> None:
        call = await self.port_forward(await self.listening(Peer))
        for data in (b"one ", b"two!"):
            await call.send(messages.PortForwardInput(data=data))
        self.assertEqual(await self.received(call), b"ONE TWO!")

    async def test_the_end_of_the_requests_closes_the_writing_half(self) -> None:
        from twisted.internet.interfaces import IHalfCloseableProtocol
        from zope.interface import implementer

        @implementer(IHalfCloseableProtocol)
        class Sum(Peer):
            def dataReceived(self, data: bytes) -> None:
                self.got += data

            def readConnectionLost(self) -> None:
                self.transport.write(b"%d" % len(self.got))
                self.transport.loseConnection()

            def writeConnectionLost(self) -> None:
                """Do nothing when the writing side is closed."""

        call = await self.port_forward(await self.listening(Sum))
        for _ in range(64):
            await call.send(messages.PortForwardInput(data=b"x" * 65536))
        await call.done_sending()
        self.assertEqual(await self.received(call), b"%d" % (64 * 65536))

    async def test_a_server_that_ends_its_half_first_is_not_reset(self) -> None:
        lost: list[Failure] = []

        class First(Peer):
            def dataReceived(self, data: bytes) -> None:
                self.transport.write(b"all")
                self.transport.loseWriteConnection()

            def connectionLost(self, reason: Failure = connectionDone) -> None:
                lost.append(reason)

        call = await self.port_forward(await self.listening(First))
        await call.send(messages.PortForwardInput(data=b"x"))
        self.assertEqual(await self.received(call), b"all")
        await until(lambda: bool(lost), "the connection is over")
        self.assertTrue(lost[0].check(ConnectionDone), lost)

    async def test_a_connection_that_the_server_resets_ends_as_any_other(self) -> None:
        """Said as an error, kubectl would give up all connections of the forward."""

        class Resetting(Peer):
            def dataReceived(self, data: bytes) -> None:
                self.transport.write(b"part")
                reactor.callLater(0.1, self.transport.abortConnection)

        port = await self.listening(Resetting)
        other = await self.port_forward(await self.listening(Peer))
        call = await self.port_forward(port)
        await call.send(messages.PortForwardInput(data=b"x"))
        self.assertEqual(await self.received(call), b"part")
        await other.send(messages.PortForwardInput(data=b"on!"))
        self.assertEqual(await self.received(other), b"ON!")

    async def test_a_port_where_nothing_listens_is_named(self) -> None:
        import socket

        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
            call = await self.port_forward(port)
            said = await self.refused(Code.UNAVAILABLE, Deferred.fromCoroutine(self.received(call)))
        self.assertIn(f"port {port}", said)

    async def test_only_a_port(self) -> None:
        for first in (messages.PortForwardInput(port=70000), messages.PortForwardInput(data=b"x")):
            call = await self.begun(self.stub.PortForward(timeout=30.0), first)
            await self.refused(Code.INVALID_ARGUMENT, Deferred.fromCoroutine(self.received(call)))
