# SPDX-License-Identifier: Apache-2.0
"""Attaching to a container that conmon runs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface.verify import verifyObject

from infranetes_common.concurrency import sleep, start, within
from infranetes_common.errors import FailedPrecondition, Unavailable
from tests.contract.container_sessions import resident
from tests.support.crun import configuration, write_bundle
from tests.support.waiting import until
from tests.vmserver.containers.oci.case import CrunCase, Made, reactor
from vmserver.containers.interface import ISession, Streams
from vmserver.containers.oci import attach as attaching
from vmserver.containers.oci.attach import attach
from vmserver.containers.oci.conmon import Monitored
from vmserver.containers.oci.control import Control

MIB = 1024 * 1024
ALL = Streams(stdin=True, stdout=True, stderr=True)


def processor_ticks(pid: int) -> int:
    """Return how long a process has run on a processor, in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


class Heard:
    """Reads a session's output as it arrives."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.out, self.err = bytearray(), bytearray()
        self.over = Deferred.fromCoroutine(self._read())

    async def _read(self) -> int:
        async for stream, data in self.session.output:
            (self.out if stream == "stdout" else self.err).extend(data)
        return int(await self.session.ended())


class ConnectTests(SynchronousTestCase):
    """Connecting to a conmon with more clients than it has accepted yet."""

    def setUp(self) -> None:
        self.bundle = Path(self.mktemp())
        self.bundle.mkdir()
        at = os.open(self.bundle, os.O_PATH | os.O_DIRECTORY)
        self.addCleanup(os.close, at)
        self.path = f"/proc/self/fd/{at}/attach"  # the path of a socket has at most 107 bytes
        self.conmon = self.socket()
        self.conmon.bind(self.path)
        self.conmon.listen(1)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.socket().connect(self.path)
        self.clock = Clock()
        self.descriptors = len(os.listdir("/proc/self/fd"))
        self.connecting = start(attaching._connect(self.clock, self.bundle))

    def socket(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self.addCleanup(made.close)
        return made

    def test_a_client_waits_for_its_turn(self) -> None:
        self.clock.pump([0.2] * 3)
        self.assertNoResult(self.connecting)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.addCleanup(self.conmon.accept()[0].close)
        self.clock.pump([0.2])
        self.successResultOf(self.connecting).close()

    def test_it_does_not_wait_for_ever(self) -> None:
        self.clock.pump([0.2] * int(attaching.CONNECT_SECONDS / 0.2 - 1))
        self.assertNoResult(self.connecting)
        self.clock.pump([0.2] * 5)
        self.assertIn("can't be reached", str(self.failureResultOf(self.connecting, Unavailable).value))
        self.assertEqual(len(os.listdir("/proc/self/fd")), self.descriptors)

    def test_another_failure_says_what_it_is_at_once(self) -> None:
        self.connecting.addErrback(lambda _: None).cancel()
        bundle = Path(self.mktemp())
        bundle.write_text("")
        failure = self.failureResultOf(start(attaching._connect(self.clock, bundle)), Unavailable)
        self.assertIn("Not a directory", str(failure.value))


class PacketTests(TestCase):
    """A connection to conmon, whose end the test has."""

    def setUp(self) -> None:
        ours, self.conmon = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self.addCleanup(self.conmon.close)
        self.packets, self.ends = list[bytes](), list[int]()
        self.connection = attaching._Packets(reactor, ours, self.packets.append, lambda: self.ends.append(1))
        self.addCleanup(self.connection.connectionLost, Failure(ConnectionDone()))

    async def test_packets_come_one_by_one_and_the_end_after_them(self) -> None:
        for packet in (b"one", b"two" * 1000):
            self.conmon.send(packet)
        self.conmon.close()
        await until(lambda: self.ends, "the end")
        self.assertEqual(self.packets, [b"one", b"two" * 1000])

    async def test_one_who_reads_no_more_is_still_read(self) -> None:
        self.connection.pauseProducing()
        self.conmon.send(b"last")
        self.conmon.shutdown(socket.SHUT_RD)
        self.connection.write(b"x" * 1_000_000)
        await within(reactor, 20.0, start(self.connection.gate.wait()), "the writer")
        self.assertEqual((self.packets, self.ends), ([], []))
        self.connection.resumeProducing()
        await until(lambda: self.packets == [b"last"], "it is read")

    async def test_after_all_is_written_conmon_sees_the_end(self) -> None:
        self.connection.write(b"x" * 100_000)
        self.connection.finish()
        found = bytearray()

        def whole() -> bool:
            with contextlib.suppress(BlockingIOError):
                while packet := self.conmon.recv(65536):
                    found.extend(packet)
                return True
            return False

        await until(whole, "the end")
        self.assertEqual(len(found), 100_000)
        self.conmon.send(b"still")
        await until(lambda: self.packets == [b"still"], "it is read")

    async def test_one_that_is_lost_is_lost_once_and_lets_the_writer_go(self) -> None:
        self.connection.write(b"x" * 1_000_000)
        waiting = start(self.connection.gate.wait())
        for _ in range(2):
            self.connection.connectionLost(Failure(ConnectionDone()))
        await within(reactor, 20.0, waiting, "the writer")
        self.connection.pauseProducing()
        self.connection.resumeProducing()
        self.assertNotIn(self.connection, reactor.getReaders())


class AttachTests(CrunCase):
    async def attached(self, made: Made, streams: Streams = ALL) -> Any:
        """Attach to a container. Return the session."""

        control = Control(reactor, made.container.bundle)
        session = await attach(reactor, made.container, made.process, control, streams, made.exit_code)
        self.addCleanup(session.close)
        return session

    async def heard(self, made: Made, streams: Streams = ALL) -> Heard:
        """Attach to a container and read the session's output."""
        return Heard(await self.attached(made, streams))

    async def over(self, heard: Heard) -> int:
        """Return the session's exit code once it is over."""
        return await within(reactor, self.seconds, heard.over, "the session")

    async def up(self, made: Made) -> None:
        """Wait until the container has written something."""
        await self.until(made.container.log.read_bytes, "it has written")

    async def test_both_streams_from_now_on_and_the_exit_code(self) -> None:
        script = "echo before; while read x; do echo out $x; echo err $x >&2; [ $x = end ] && exit 4; done"
        made = await self.started("sh", "-c", script, stdin=True)
        await self.up(made)
        heard, other = await self.heard(made), await self.heard(made, Streams(stderr=True))
        verifyObject(ISession, heard.session)
        await heard.session.write(b"one\n")
        await heard.session.write(b"end\n")
        self.assertEqual([await self.over(heard), await self.over(other)], [4, 4])
        self.assertEqual((heard.out, heard.err), (b"out one\nout end\n", b"err one\nerr end\n"))
        self.assertEqual((other.out, other.err), (b"", b"err one\nerr end\n"))
        await heard.session.write(b"too late")
        heard.session.close_stdin()
        await heard.session.resize(80, 24)

    async def test_who_leaves_lets_stdin_go_on(self) -> None:
        made = await self.started("sh", "-c", "while read x; do echo got $x; done", stdin=True)
        for number in range(3):
            heard = await self.heard(made)
            await heard.session.write(b"%d\n" % number)
            await self.until(lambda heard=heard, n=number: heard.out == b"got %d\n" % n, "its answer")
            heard.session.close_stdin()
            await heard.session.write(b"dropped\n")
            heard.session.close()

    async def test_stdin_ends_where_that_was_asked_for(self) -> None:
        made = await self.started("sh", "-c", "cat; exit 5", stdin=True, stdin_once=True)
        heard = await self.heard(made)
        await heard.session.write(b"line\n")
        for _ in range(2):
            heard.session.close_stdin()
        self.assertEqual((await self.over(heard), heard.out), (5, b"line\n"))

    async def test_a_container_that_has_closed_its_stdin_costs_conmon_nothing(self) -> None:
        made = await self.started("sh", "-c", "exec <&-; echo up; exec sleep 600", stdin=True)
        await self.up(made)
        heard = await self.heard(made)
        before = processor_ticks(made.process.conmon)
        for _ in range(20):
            await heard.session.write(b"x" * 65536)
        await sleep(reactor, 0.5)
        self.assertLess(processor_ticks(made.process.conmon) - before, 10)
        heard.session.close_stdin()

    async def test_what_it_has_not_read_when_it_closes_its_stdin_is_dropped(self) -> None:
        script = "read x; echo $x; read x; exec <&-; echo closed; exec sleep 600"
        made = await self.started("sh", "-c", script, stdin=True, stdin_once=True)
        heard = await self.heard(made)
        await heard.session.write(b"one\n")
        await self.until(lambda: heard.out == b"one\n", "it reads")
        before = processor_ticks(made.process.conmon)
        writing = Deferred.fromCoroutine(self.written(heard, b"two\n" + b"x" * 4 * MIB))
        await self.until(lambda: heard.out == b"one\nclosed\n", "it reads no more")
        await within(reactor, self.seconds, writing, "the rest")
        heard.session.close_stdin()
        await sleep(reactor, 0.5)
        self.assertLess(processor_ticks(made.process.conmon) - before, 10)

    async def written(self, heard: Heard, data: bytes) -> None:
        """Write data to the session in pieces."""
        for at in range(0, len(data), 65536):
            await heard.session.write(data[at : at + 65536])

    async def test_where_its_pipe_can_not_be_told_conmon_passes_stdin_on(self) -> None:
        made = await self.started("sh", "-c", "read x; echo $x; exit 2", stdin=True)
        for descriptor in (*os.pipe(), *os.pipe(), *os.pipe()):
            self.addCleanup(os.close, descriptor)
        made.process = attrs.evolve(made.process, conmon=os.getpid())  # a process with more than one
        heard = await self.heard(made)
        await heard.session.write(b"hello\n")
        self.assertEqual((await self.over(heard), heard.out), (2, b"hello\n"))

    async def test_sockets_of_any_name_may_be_on_the_machine(self) -> None:
        for name in ("caf\udce9", "a\fb", "a\nb c d e f g h i", "a\n1 2 3 10000 5 02 x name"):
            odd = socket.socket(socket.AF_UNIX)
            self.addCleanup(odd.close)
            odd.bind(os.fsencode(self.directory / name))
        heard = await self.heard(await self.started("sh", "-c", "sleep 0.2; exit 2"))
        self.assertEqual(await self.over(heard), 2)

    async def test_one_whose_first_process_has_just_ended_is_read_to_its_end(self) -> None:
        made = await self.started("sh", "-c", "read x; echo $x; exit 2", stdin=True)
        gone = subprocess.Popen(["true"])
        gone.wait()
        made.process = attrs.evolve(made.process, pid=gone.pid)
        heard = await self.heard(made)
        await heard.session.write(b"hello\n")
        self.assertEqual((await self.over(heard), heard.out), (2, b"hello\n"))

    async def test_what_is_not_written_yet_is_dropped_with_its_client(self) -> None:
        made = await self.started("sleep", "600", stdin=True)
        heard = await self.heard(made)
        writing = Deferred.fromCoroutine(self.written(heard, b"x" * MIB))
        await sleep(reactor, 0.1)
        self.assertFalse(writing.called)
        heard.session.close()
        await within(reactor, self.seconds, writing, "the writer")

    async def test_its_stdin_ends_with_the_first_of_two_who_leaves(self) -> None:
        made = await self.started("sh", "-c", "cat; exit 5", stdin=True, stdin_once=True)
        first, second = await self.heard(made), await self.heard(made)
        await second.session.write(b"line\n")
        await self.until(lambda: first.out == b"line\n", "it is read")
        first.session.close_stdin()
        self.assertEqual(await self.over(second), 5)
        await second.session.write(b"too late")
        self.assertEqual(second.out, b"line\n")

    async def test_without_stdin_what_is_written_is_dropped(self) -> None:
        made = await self.started("sh", "-c", "sleep 0.5; cat; exit 6")
        heard = await self.heard(made)
        for _ in range(20):
            await heard.session.write(b"x" * 65536)
        heard.session.close_stdin()
        self.assertEqual((await self.over(heard), heard.out), (6, b""))

    async def test_much_comes_through_whole_and_in_little_memory(self) -> None:
        made = await self.created("sh", "-c", f"head -c {100 * MIB} /dev/zero; echo end >&2")
        session = await self.attached(made)
        before = resident()
        await self.crun.start(made.container.id)
        size, said = 0, b""
        async for stream, data in session.output:
            if stream == "stdout":
                size += len(data)
            else:
                said += data
        self.assertEqual((size, said, await session.ended()), (100 * MIB, b"end\n", 0))
        self.assertLess(resident() - before, 8 * MIB)

    async def test_a_reader_who_does_not_read_lets_the_container_wait(self) -> None:
        made = await self.created("sh", "-c", f"head -c {32 * MIB} /dev/zero; exit 7")
        session = await self.attached(made)
        await self.crun.start(made.container.id)
        await self.until(lambda: session.output.paused, "the writer waits")
        before = made.container.log.stat().st_size
        await sleep(reactor, 0.5)
        self.assertLess(made.container.log.stat().st_size - before, 2 * MIB)
        self.assertEqual(made.exits, [])
        heard = Heard(session)
        self.assertEqual((await self.over(heard), len(heard.out)), (7, 32 * MIB))

    async def test_a_reader_who_does_not_read_can_not_hide_the_containers_end(self) -> None:
        made = await self.created("sh", "-c", "cat /dev/zero")
        session = await self.attached(made)
        await self.crun.start(made.container.id)
        await self.until(lambda: session.output.paused, "the writer waits")
        await sleep(reactor, 0.2)
        os.kill(made.process.pid, signal.SIGKILL)
        self.assertEqual((await self.end(made)).code, 137)
        heard = Heard(session)
        self.assertEqual(await self.over(heard), 137)
        self.assertLess(len(heard.out), 8 * MIB)

    async def test_much_goes_in_and_a_container_that_does_not_read_lets_the_writer_wait(self) -> None:
        script = "sleep 1; wc -c"
        made = await self.started("sh", "-c", script, stdin=True, stdin_once=True)
        heard = await self.heard(made)
        before = resident()
        waited = False
        for _ in range(16 * MIB // 65536):
            written = heard.session.write(b"x" * 65536)
            waited = waited or not written.called
            await within(reactor, self.seconds, written, "stdin")
        heard.session.close_stdin()
        self.assertEqual((await self.over(heard), heard.out.strip()), (0, b"%d" % (16 * MIB)))
        self.assertTrue(waited)
        self.assertLess(resident() - before, 8 * MIB)

    async def test_a_terminal_and_its_size(self) -> None:
        script = "stty -echo; echo up; read x; stty size; read x; echo got $x; exit 3"
        made = await self.started("sh", "-c", script, terminal=True, stdin=True)
        await self.up(made)
        first = await self.heard(made)
        await first.session.resize(101, 37)
        await first.session.write(b"\n")
        await self.until(lambda: first.out == b"37 101\r\n", "its size")
        first.session.close_stdin()
        first.session.close()
        heard = await self.heard(made)
        await heard.session.write(b"more\n")
        self.assertEqual((await self.over(heard), heard.out, heard.err), (3, b"got more\r\n", b""))

    async def test_a_session_begins_once_conmon_knows_of_it(self) -> None:
        self.patch(attaching, "ACCEPT_SECONDS", 600.0)
        made = await self.started("sh", "-c", "read x; echo $x", stdin=True)
        os.kill(made.process.conmon, signal.SIGSTOP)
        attached = [start(self.attached(made)) for _ in range(3)]
        attached[1].cancel()
        with self.assertRaises(CancelledError):
            await attached[1]
        await sleep(reactor, 0.2)
        self.assertFalse(attached[0].called or attached[2].called)
        os.kill(made.process.conmon, signal.SIGCONT)
        first, last = Heard(await attached[0]), Heard(await attached[2])
        await last.session.write(b"hello\n")
        self.assertEqual([await self.over(first), await self.over(last)], [0, 0])
        self.assertEqual((first.out, last.out), (b"hello\n", b"hello\n"))

    async def test_a_conmon_that_does_not_answer_is_not_waited_for_long(self) -> None:
        self.patch(attaching, "ACCEPT_SECONDS", 0.1)
        made = await self.started("sleep", "600", stdin=True)
        os.kill(made.process.conmon, signal.SIGSTOP)
        try:
            session = await self.attached(made)
        finally:
            os.kill(made.process.conmon, signal.SIGCONT)
        session.close()

    async def test_a_conmon_that_is_killed_ends_the_session(self) -> None:
        made = await self.started("sleep", "600", stdin=True)
        heard = await self.heard(made)
        os.kill(made.process.conmon, signal.SIGKILL)
        self.assertEqual(await self.over(heard), 137)

    async def test_only_to_a_container_that_runs(self) -> None:
        made = await self.started("true")
        await self.end(made)
        with self.assertRaises(FailedPrecondition):
            await self.attached(made)

    async def test_however_long_the_path_is(self) -> None:
        made = self.monitored("sh", "-c", "read x; echo $x")
        bundle = self.directory / ("long" * 30) / made.id
        write_bundle(bundle, configuration(made.id, self.rootfs, ["sh", "-c", "read x; echo $x"]))
        long = Monitored(made.id, bundle, bundle / "log", stdin=True)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.conmon.discard(long)))
        running = Made(long, await self.conmon.create(long))
        running.watch = self.conmon.watch(long, running.process, running.over)
        await self.crun.start(long.id)
        heard = await self.heard(running)
        await heard.session.write(b"hello\n")
        self.assertEqual((await self.over(heard), heard.out), (0, b"hello\n"))

    async def test_ten_at_once(self) -> None:
        made = await self.started("sh", "-c", "read x; echo $x", stdin=True)
        every = [await self.heard(made) for _ in range(12)]
        await every[7].session.write(b"hello\n")
        for heard in every:
            self.assertEqual((await self.over(heard), heard.out), (0, b"hello\n"))
