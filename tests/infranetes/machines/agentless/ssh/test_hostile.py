# SPDX-License-Identifier: Apache-2.0
"""Guests whose SSH server is hostile, broken or gone: calls end, in bounded time and memory, and say why.

That no message of theirs keeps the reactor is what the tests' guard looks at.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random
from typing import Any

from twisted.conch.ssh import connection
from twisted.conch.ssh.common import NS
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from infranetes.machines.agentless.ssh.access import SshAccess
from infranetes.machines.agentless.ssh.channel import WINDOW
from infranetes.machines.agentless.ssh.commands import BEGIN_SECONDS
from infranetes.machines.agentless.ssh.connections import CONNECT_SECONDS, KEEPALIVE_SECONDS, OPEN_SECONDS
from infranetes.machines.agentless.ssh.keys import fingerprint, key_blob, make_key
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    NotOffered,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver
from tests.contract.container_sessions import resident
from tests.infranetes.machines.agentless.ssh.server import Flood, PlainServer, Server, Session
from tests.support.virtual_time import VirtualTime
from tests.support.waiting import until

reactor = installed()
MIB = 1024 * 1024
GROWTH = 12 * MIB


def answers(session: Session, line: bytes) -> None:
    """Answer every command with "ok"."""
    session.write(b"ok\n")
    session.exit()


def hangs(session: Session, line: bytes) -> None:
    """Never end, whatever the command."""


class HostileCase(TestCase):
    """Helpers."""

    timeout = 60.0
    reactor = reactor

    def serve(self, run: Callable[[Session, bytes], None] = answers) -> Server:
        server = Server(self.reactor, run)
        self.addCleanup(lambda: Deferred.fromCoroutine(server.stop()))
        return server

    def access(self, server: Server | PlainServer, **options: Any) -> SshAccess:
        access = SshAccess(self.reactor, options.pop("login", None) or server.login, "sandbox 1", **options)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.close(access)))
        return access

    async def close(self, access: SshAccess) -> None:
        await access.close()
        await until(lambda: not access._connections._links, "the connections are gone")

    def run_in(self, access: SshAccess, seconds: int = 0, stdin: bytes = b"") -> Deferred[Any]:
        """Run a command."""
        return Deferred.fromCoroutine(access.run(["x"], seconds, 3600, 1000, stdin))

    async def refused(self, kind: type[InfranetesError], work: Deferred[Any]) -> str:
        try:
            await work
        except InfranetesError as error:
            self.assertIs(type(error), kind, str(error))
            self.assertTrue(str(error).isprintable())
            self.assertLess(len(str(error)), 1000)
            return str(error)
        raise AssertionError(f"no {kind.__name__}")

    async def is_over_for(self, server: Server) -> None:
        """Check that the connection is given up."""
        await until(lambda: all(each.gone for each in server.connections), "it is given up")


class BeforeTheKeysTests(HostileCase):
    """What a server says before it has proved anything."""

    async def refused_by(self, say: Callable[[Any], None], kind: type[InfranetesError] = Unavailable) -> str:
        server = PlainServer(reactor, say)
        self.addCleanup(lambda: Deferred.fromCoroutine(server.stop()))
        before = resident()
        said = await self.refused(kind, self.run_in(self.access(server)))
        self.assertLess(resident() - before, GROWTH)
        self.assertIn("the guest of sandbox 1 at 127.0.0.1:", said)
        return said

    async def test_an_endless_line_is_no_ssh_server(self) -> None:
        said = await self.refused_by(lambda tcp: Flood(tcp, lambda: tcp.write(b"x" * 65536)))  # type: ignore[arg-type,return-value]
        self.assertIn("no SSH server", said)

    async def test_endless_lines_are_no_ssh_server(self) -> None:
        said = await self.refused_by(lambda tcp: Flood(tcp, lambda: tcp.write(b"hi\r\n" * 9999)))  # type: ignore[arg-type,return-value]
        self.assertIn("no SSH server", said)

    async def test_a_version_without_an_end_is_no_ssh_server(self) -> None:
        await self.refused_by(lambda tcp: Flood(tcp, lambda: tcp.write(b"SSH-2.0-x" * 9999)))  # type: ignore[arg-type,return-value]

    async def test_another_server_that_hangs_up(self) -> None:
        def say(tcp: Any) -> None:
            tcp.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            tcp.loseConnection()

        await self.refused_by(say)

    async def test_one_that_hangs_up_at_once(self) -> None:
        await self.refused_by(lambda tcp: tcp.loseConnection())

    async def test_one_that_is_too_old(self) -> None:
        self.assertIn("too old", await self.refused_by(lambda tcp: tcp.write(b"SSH-1.5-Old\n")))

    async def test_garbage_instead_of_keys(self) -> None:
        for garbage in (
            b"\0" * 64,
            b"\xff" * 64,
            b"\0\0\1\4\0" + b"\x14" * 300,
            b"\0\0\0\x0c\x0a\x14" + b"\0" * 10,
        ):
            await self.refused_by(lambda tcp, garbage=garbage: tcp.write(b"SSH-2.0-x\r\n" + garbage))  # type: ignore[misc]

    async def test_nobody_listens(self) -> None:
        server = PlainServer(reactor, lambda tcp: None)
        login = server.login
        await server.stop()
        await self.refused(Unavailable, self.run_in(self.access(server, login=login)))


class HostKeyTests(HostileCase):
    """Who the server is."""

    async def test_another_host_key_is_told_and_nothing_is_said_to_it(self) -> None:
        server = self.serve()
        login, another = server.login, make_key()
        server.set_host_key(another)
        access = self.access(server, login=login)
        for _ in range(2):
            said = await self.refused(FailedPrecondition, self.run_in(access))
            for line in (login.host_key, another.public):
                self.assertIn(fingerprint(key_blob(line)), said)
        await self.refused(FailedPrecondition, Deferred.fromCoroutine(access.answers(5)))
        self.assertEqual(server.logins, [])

    async def test_a_key_that_it_shows_and_does_not_have(self) -> None:
        server = self.serve()
        server.set_host_key(server.host_key, proved_by=make_key())
        await self.refused(Unavailable, self.run_in(self.access(server)))
        self.assertEqual(server.logins, [])

    async def test_the_first_key_is_learned_and_pinned(self) -> None:
        server, learned = self.serve(), list[str]()
        login = server.login
        unknown = type(login)(login.host, login.user, login.key, "", login.port)
        access = self.access(server, login=unknown, learned=learned.append)
        for _ in range(2):
            self.assertEqual((await self.run_in(access)).stdout, b"ok\n")
        self.assertEqual([key_blob(line) for line in learned], [key_blob(login.host_key)])
        server.set_host_key(make_key())
        server.connections[0].transport.abortConnection()
        await until(lambda: not access._connections._links, "the loss is noticed")
        await self.refused(FailedPrecondition, self.run_in(access))
        self.assertEqual(len(learned), 1)

    async def test_a_key_that_it_does_not_have_is_not_learned(self) -> None:
        server, learned = self.serve(), list[str]()
        login = server.login
        server.set_host_key(server.host_key, proved_by=make_key())
        unknown = type(login)(login.host, login.user, login.key, "", login.port)
        await self.refused(
            Unavailable, self.run_in(self.access(server, login=unknown, learned=learned.append))
        )
        self.assertEqual(learned, [])

    async def test_a_key_that_can_t_be_kept_is_not_trusted(self) -> None:
        def keep(line: str) -> None:
            raise ResourceExhausted("the disk is full")

        server = self.serve()
        login = server.login
        unknown = type(login)(login.host, login.user, login.key, "", login.port)
        access = self.access(server, login=unknown, learned=keep)
        for _ in range(2):
            self.assertIn("disk is full", await self.refused(ResourceExhausted, self.run_in(access)))
        await self.is_over_for(server)

    async def test_a_user_who_is_not_let_in_tries_nothing_else(self) -> None:
        server = self.serve()
        server.lets_in = False
        said = await self.refused(Unavailable, self.run_in(self.access(server)))
        self.assertIn("root", said)
        self.assertEqual(server.logins, [(b"root", b"publickey")])


class CommandTests(HostileCase):
    """What a server says once it has commands to run."""

    async def broken_by(self, run: Callable[[Session, bytes], None]) -> str:
        """Check that a command's end is that the connection is lost, and that the next has a new one."""
        server = self.serve(run)
        access = self.access(server)
        said = await self.refused(Unavailable, self.run_in(access))
        server.run = answers
        self.assertEqual((await self.run_in(access)).stdout, b"ok\n")
        self.assertEqual(len(server.connections), 2)
        return said

    async def test_a_connection_that_is_lost_meanwhile(self) -> None:
        def run(session: Session, line: bytes) -> None:
            session.tcp.abortConnection()

        await self.broken_by(run)

    async def test_a_connection_that_is_ended_says_why(self) -> None:
        def run(session: Session, line: bytes) -> None:
            session.conn.transport.sendDisconnect(2, b"go \x1b[2J away\n" + b"x" * 9999)

        self.assertIn("go ?[2J away?xxx", await self.broken_by(run))

    async def test_more_data_than_there_is_room_for(self) -> None:
        def run(session: Session, line: bytes) -> None:
            for _ in range(2 * WINDOW // 32768):
                session.conn.sendData(session, bytes(32768))

        server = self.serve(run)
        call = self.access(server).session()
        await call.send(vmserver.SessionInput(start=vmserver.SessionStart(command=["x"], stdout=True)))
        await self.is_over_for(server)
        call.cancel()

    async def test_messages_that_are_too_long(self) -> None:
        for size in (100_000, 1_000_000):

            def run(session: Session, line: bytes, size: int = size) -> None:
                session.conn.transport.sendIgnore(bytes(size))

            self.assertIn("too long", await self.broken_by(run))

    async def test_data_in_messages_that_are_too_long(self) -> None:
        def run(session: Session, line: bytes) -> None:
            session.send(connection.MSG_CHANNEL_DATA, NS(bytes(40_000)))

        await self.broken_by(run)

    async def test_messages_that_are_none(self) -> None:
        for message, payload in (
            (connection.MSG_CHANNEL_DATA, b""),
            (connection.MSG_CHANNEL_DATA, b"\xff\xff\xff\xffx"),
            (connection.MSG_CHANNEL_REQUEST, NS(b"exit-status") + b"\0"),
            (connection.MSG_CHANNEL_REQUEST, b"\0\0\xff\xff"),
            (connection.MSG_CHANNEL_OPEN_CONFIRMATION, b""),
            (connection.MSG_CHANNEL_OPEN_CONFIRMATION, struct.pack(">3L", 0, 1000, 1)),
            (21, b""),
            (6, NS(b"ssh-connection")),
        ):

            def run(session: Session, line: bytes, message: int = message, payload: bytes = payload) -> None:
                session.send(message, payload)

            await self.broken_by(run)

    async def test_a_flood_of_channels_that_nobody_asked_for(self) -> None:
        def run(session: Session, line: bytes) -> None:
            for number in range(100):
                session.conn.transport.sendPacket(
                    connection.MSG_CHANNEL_OPEN, NS(b"x11") + struct.pack(">3L", number, 9, 9)
                )

        server = self.serve(run)
        said = await self.refused(FailedPrecondition, self.run_in(self.access(server)))
        self.assertIn("channels", said)
        await self.is_over_for(server)

    async def test_a_few_channels_that_nobody_asked_for_are_refused(self) -> None:
        refused = []

        def refusal(packet: bytes) -> None:
            refused.append(packet[:4])

        def run(session: Session, line: bytes) -> None:
            # Conch's own looks for the channel among those that it has opened itself.
            session.conn.ssh_CHANNEL_OPEN_FAILURE = refusal  # type: ignore[method-assign]
            for number in range(3):
                session.conn.transport.sendPacket(
                    connection.MSG_CHANNEL_OPEN,
                    NS(b"auth-agent@openssh.com") + struct.pack(">3L", number, 9, 9),
                )
            answers(session, line)

        self.assertEqual((await self.run_in(self.access(self.serve(run)))).stdout, b"ok\n")
        await until(lambda: len(refused) == 3, "each is refused")
        self.assertEqual(refused, [struct.pack(">L", number) for number in range(3)])

    async def test_an_end_without_an_exit_status(self) -> None:
        def run(session: Session, line: bytes) -> None:
            session.loseConnection()

        server = self.serve(run)
        access = self.access(server)
        self.assertIn("without saying how", await self.refused(Unavailable, self.run_in(access)))
        server.run = answers
        self.assertEqual((await self.run_in(access)).stdout, b"ok\n")
        self.assertEqual(len(server.connections), 1)

    async def test_the_first_of_several_exit_statuses_counts_whatever_it_is(self) -> None:
        for name, data, code in (
            (b"exit-status", struct.pack(">L", 2**32 - 1), -1),
            (b"exit-status", struct.pack(">L", 2**31 - 1), 2**31 - 1),
            (b"exit-signal", NS(b"TERM"), 143),
            (b"exit-signal", NS(b"sig\xff\0"), 255),
            (b"exit-signal", NS(b"x" * 9999), 255),
        ):

            def run(session: Session, line: bytes, name: bytes = name, data: bytes = data) -> None:
                session.tell(name, data)
                session.exit(3)

            self.assertEqual((await self.run_in(self.access(self.serve(run)))).exit_code, code)

    async def test_other_requests_and_streams_are_ignored(self) -> None:
        def run(session: Session, line: bytes) -> None:
            session.tell(b"\xff\xfe", b"x")
            session.writeExtended(77, bytes(100_000))
            session.conn.sendGlobalRequest(b"hostkeys-00@openssh.com", b"x", wantReply=1).addErrback(
                lambda _: None
            )
            answers(session, line)

        result = await self.run_in(self.access(self.serve(run)))
        self.assertEqual((result.stdout, result.stderr, result.exit_code), (b"ok\n", b"", 0))

    async def test_a_refused_command_and_a_refused_terminal(self) -> None:
        server = self.serve()
        server.consents = lambda: False
        access = self.access(server)
        await self.refused(FailedPrecondition, self.run_in(access))
        call = access.session()
        start = vmserver.SessionStart(command=["x"], stdout=True, tty=True)
        await call.send(vmserver.SessionInput(start=start))
        with self.assertRaisesRegex(FailedPrecondition, "terminal"):
            async for _ in call:
                pass

    async def test_output_that_never_ends_is_dropped_until_the_command_is_killed(self) -> None:
        floods: list[Flood] = []

        def run(session: Session, line: bytes) -> None:
            if b"INFRANETES_COMMAND=$1" in line:
                answers(session, line)

            def more() -> None:
                if session.remoteWindowLeft >= 32768:
                    session.write(bytes(32768))
                else:
                    session.conn.transport.sendIgnore(b"x" * 20000)

            session.tcp.unregisterProducer()
            floods.append(Flood(session.tcp, more))

        server = self.serve(run)
        before = resident()
        await self.refused(DeadlineExceeded, self.run_in(self.access(server), seconds=3))
        self.assertGreater(floods[0].written, 2 * WINDOW // 32768)
        self.assertLess(resident() - before, GROWTH)
        await until(lambda: b"signal" in server.sessions[0].requests, "it is killed")

    async def test_output_that_nobody_reads_stays_in_the_guest(self) -> None:
        def run(session: Session, line: bytes) -> None:
            session.write(bytes(8 * WINDOW))

        server = self.serve(run)
        call = self.access(server).session()
        await call.send(vmserver.SessionInput(start=vmserver.SessionStart(command=["x"], stdout=True)))
        await until(lambda: server.sessions and server.sessions[0].buf, "it has begun")
        await until(lambda: not server.sessions[0].remoteWindowLeft, "it has no room any more")
        left = 8 * WINDOW - len(server.sessions[0].buf)
        self.assertLess(left, 3 * WINDOW)
        call.cancel()

    async def test_a_flood_of_questions_by_one_who_reads_no_answers(self) -> None:
        floods: list[Flood] = []

        def run(session: Session, line: bytes) -> None:
            question = NS(b"x" * 100) + b"\1"

            def more() -> None:
                for _ in range(50):
                    session.conn.transport.sendPacket(connection.MSG_GLOBAL_REQUEST, question)

            session.tcp.unregisterProducer()
            session.tcp.pauseProducing()
            floods.append(Flood(session.tcp, more))

        server = self.serve(run)
        access = self.access(server)
        before = resident()
        await self.refused(DeadlineExceeded, self.run_in(access, seconds=1))
        self.assertGreater(floods[0].written, 10)
        self.assertLess(resident() - before, GROWTH)

    async def test_input_that_is_not_taken_waits(self) -> None:
        server = self.serve(hangs)
        server.window = 0
        access = self.access(server)
        await self.refused(DeadlineExceeded, self.run_in(access, seconds=1, stdin=bytes(MIB)))
        self.assertEqual(server.sessions[0].received, b"")

    async def test_input_comes_in_pieces_as_the_server_takes_them(self) -> None:
        server = self.serve(hangs)
        server.window, server.max_packet = 5000, 1000
        running = self.run_in(self.access(server), stdin=bytes(range(250)) * 100)
        await until(lambda: server.sessions and server.sessions[0].ended, "all has come")
        self.assertEqual(server.sessions[0].received, bytes(range(250)) * 100)
        server.sessions[0].exit()
        await running

    async def test_more_sessions_than_a_connection_takes_have_several(self) -> None:
        server = self.serve(hangs)
        server.most = 2
        access = self.access(server)
        running = [self.run_in(access) for _ in range(7)]
        await until(lambda: sum(each.begun for each in server.sessions) == 7, "all run")
        for session in server.sessions:
            session.exit()
        for each in running:
            await each
        await until(lambda: sum(not each.gone for each in server.connections) == 1, "one is left")

    async def test_a_server_without_sessions_is_told(self) -> None:
        server = self.serve()
        server.most = 0
        await self.refused(FailedPrecondition, self.run_in(self.access(server)))

    async def test_more_commands_than_a_guest_may_have_are_refused(self) -> None:
        server = self.serve(hangs)
        server.most = 1
        access = self.access(server)
        running = [self.run_in(access) for _ in range(8)]
        await until(lambda: sum(each.begun for each in server.sessions) == 8, "all run")
        await self.refused(ResourceExhausted, self.run_in(access))
        for each in running:
            each.addErrback(lambda _: None)
            each.cancel()

    async def test_what_linux_alone_has_is_not_offered_by_another_guest(self) -> None:
        access = self.access(self.serve())
        await self.refused(NotOffered, Deferred.fromCoroutine(access.usage()))

    async def test_any_messages_at_all(self) -> None:
        random = Random(1)  # noqa: S311 - the same ones each time
        for _ in range(40):
            messages = [
                (random.choice((random.randrange(1, 256), random.randrange(80, 101))), self.payload(random))
                for _ in range(random.randrange(1, 10))
            ]

            def run(session: Session, line: bytes, messages: list[tuple[int, bytes]] = messages) -> None:
                for message, payload in messages:
                    session.conn.transport.sendPacket(message, payload)
                session.tcp.loseConnection()

            await self.refused_in_some_way(self.access(self.serve(run)))

    def payload(self, random: Random) -> bytes:
        """Return any payload; many begin with a channel that there is."""
        return bytes(random.randrange(9)) + random.randbytes(random.randrange(60))

    async def refused_in_some_way(self, access: SshAccess) -> None:
        with self.assertRaises((Unavailable, FailedPrecondition)):
            await self.run_in(access)
        await access.close()


class SilentTests(HostileCase):
    """Servers that say nothing, in virtual time."""

    def setUp(self) -> None:
        self.time = VirtualTime(reactor)
        self.reactor = self.time.reactor  # type: ignore[misc]

    async def late(self, work: Deferred[Any], seconds: float, tolerance: float = 2.0) -> str:
        """Check that a call fails as the guest can't be reached, once it has waited so long."""
        began = self.time.seconds()
        ended: list[float] = []

        def note(result: Any) -> Any:
            ended.append(self.time.seconds())
            return result

        work.addBoth(note)
        await self.time.until(lambda: ended)
        self.assertApproximates(ended[0] - began, seconds, tolerance)
        return await self.refused(Unavailable, work)

    async def connected(self, server: Server) -> SshAccess:
        """Log in, and run a command."""
        access, run = self.access(server), server.run
        server.run = answers
        await self.works(access)
        server.run = run
        return access

    async def works(self, access: SshAccess) -> None:
        """Check that a command runs. Time stands still, since logging in computes."""
        working = self.run_in(access)

        def is_done() -> bool:
            self.time.advance(0)
            return bool(working.called)

        await until(is_done, "it has run")
        self.assertEqual((await working).stdout, b"ok\n")

    async def test_one_that_says_nothing_at_all(self) -> None:
        server = PlainServer(reactor, lambda tcp: None)
        self.addCleanup(lambda: Deferred.fromCoroutine(server.stop()))
        await self.late(self.run_in(self.access(server)), CONNECT_SECONDS)

    async def test_asking_whether_it_answers_ends_when_it_is_to(self) -> None:
        server = PlainServer(reactor, lambda tcp: None)
        self.addCleanup(lambda: Deferred.fromCoroutine(server.stop()))
        await self.late(Deferred.fromCoroutine(self.access(server).answers(3)), 3)

    async def test_one_that_opens_no_session(self) -> None:
        server = self.serve()
        access = await self.connected(server)
        server.answers_open = False
        # Once on that connection, and once on a new one.
        await self.late(self.run_in(access), 2 * OPEN_SECONDS, CONNECT_SECONDS)
        server.answers_open = True
        await self.works(access)

    async def test_one_that_answers_no_request(self) -> None:
        server = self.serve()
        access = await self.connected(server)
        server.consents = Deferred
        await self.late(self.run_in(access), BEGIN_SECONDS)

    async def test_one_that_hangs_while_a_command_runs(self) -> None:
        def run(session: Session, line: bytes) -> None:
            reactor.callLater(0, session.tcp.pauseProducing)

        access = await self.connected(self.serve(run))
        said = await self.late(self.run_in(access), 2 * KEEPALIVE_SECONDS)
        self.assertIn("has not answered", said)

    async def test_one_that_closes_no_session(self) -> None:
        server = self.serve()
        access = await self.connected(server)
        server.closes = False
        running = self.run_in(access)
        await self.time.until(lambda: running.called)
        self.assertEqual((await running).exit_code, 0)
        await self.time.after(3 * KEEPALIVE_SECONDS)
        await self.is_over_for(server)

    async def test_one_that_answers_may_run_a_command_for_hours(self) -> None:
        server = self.serve(hangs)
        running = self.run_in(await self.connected(server))
        await self.time.after(600)
        self.assertFalse(running.called)
        server.sessions[1].exit(5)
        await self.time.until(lambda: running.called)
        self.assertEqual((await running).exit_code, 5)
