# SPDX-License-Identifier: Apache-2.0
"""The contract of every ContainerProvider's live sessions: exec with its streams, and attach."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from zope.interface.verify import verifyObject

from infranetes_common.errors import FailedPrecondition, NotFound
from tests.contract.container_provider_case import ContainerProviderCase, reactor
from tests.harness.durations import slow
from vmserver.containers.interface import ISession, Streams

ALL = Streams(stdin=True, stdout=True, stderr=True)
TERMINAL = Streams(tty=True, stdin=True, stdout=True)
MIB = 1024 * 1024
STREAMED = 100 * MIB
GROWTH = 8 * MIB  # by how much this process's memory may grow while that much passes through it


def living(*words: str) -> list[int]:
    """Return this machine's processes whose command line has all of `words`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if all(word.encode() in line for word in words):
                found.append(int(entry.name))
    return found


def resident() -> int:
    """Return this process's resident memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


class Heard:
    """Reads a session's output as it arrives."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.said = {"stdout": bytearray(), "stderr": bytearray()}
        self.over = Deferred.fromCoroutine(self._read())

    async def _read(self) -> int:
        async for stream, data in self.session.output:
            self.said[stream] += data
        return int(await self.session.ended())

    @property
    def out(self) -> bytes:
        return bytes(self.said["stdout"])

    @property
    def err(self) -> bytes:
        return bytes(self.said["stderr"])


class SessionContract(ContainerProviderCase):
    """exec_session and attach_session."""

    async def setUp(self) -> None:
        self.listening: list[Heard] = []
        await super().setUp()

    async def all_heard(self) -> None:
        for heard in self.listening:
            heard.session.close()
            with contextlib.suppress(Exception):
                await heard.over

    def listen(self, session: Any) -> Heard:
        """Read a session's output, for at most as long as a call may take."""
        heard = Heard(session)
        heard.over.addTimeout(self.call_seconds, reactor)
        self.listening.append(heard)
        return heard

    async def opened(self, streams: Streams, *command: str, id: str = "") -> Any:
        id = id or await self.run_container("sleep", "600")
        session = await self.provider.exec_session(id, command, streams)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.closed(session)))
        return session

    async def closed(self, session: Any) -> None:
        """Close a session, and wait until its command has ended."""
        session.close()
        ended = session.ended()
        if not ended.called:
            await ended.addTimeout(self.call_seconds, reactor)

    async def heard(self, streams: Streams, *command: str, id: str = "") -> Heard:
        return self.listen(await self.opened(streams, *command, id=id))

    async def attached(self, id: str, streams: Streams = ALL) -> Heard:
        session = await self.provider.attach_session(id, streams)
        self.addCleanup(session.close)
        return self.listen(session)

    async def test_a_session_provides_the_whole_interface(self) -> None:
        id = await self.run_container("sleep", "600")
        verifyObject(ISession, await self.opened(ALL, "true", id=id))
        verifyObject(ISession, (await self.attached(id)).session)

    async def test_both_streams_and_the_exit_code(self) -> None:
        heard = await self.heard(ALL, "sh", "-c", "echo out; echo err >&2; exit 3")
        self.assertEqual(await heard.over, 3)
        self.assertEqual((heard.out, heard.err), (b"out\n", b"err\n"))

    async def test_only_the_streams_that_are_wanted(self) -> None:
        heard = await self.heard(Streams(stderr=True), "sh", "-c", "echo out; echo err >&2")
        self.assertEqual(await heard.over, 0)
        self.assertEqual((heard.out, heard.err), (b"", b"err\n"))

    async def test_what_goes_in_comes_out_and_the_end_of_stdin_is_seen(self) -> None:
        heard = await self.heard(ALL, "cat")
        await heard.session.write(b"hello \x00\xff\n")
        await self.until(lambda: heard.out == b"hello \x00\xff\n", "the echo")
        await heard.session.write(b"again")
        for _ in range(2):
            heard.session.close_stdin()
        self.assertEqual(await heard.over, 0)
        self.assertEqual(heard.out, b"hello \x00\xff\nagain")
        await heard.session.write(b"too late")

    async def test_a_command_that_is_not_there_says_so(self) -> None:
        heard = await self.heard(ALL, "/no/such/program")
        self.assertIn(await heard.over, (126, 127))
        self.assertTrue(heard.out + heard.err)

    async def test_killed_by_a_signal(self) -> None:
        heard = await self.heard(ALL, "sh", "-c", "kill -9 $$")
        self.assertEqual(await heard.over, 137)

    async def test_a_terminal_and_its_size(self) -> None:
        heard = await self.heard(TERMINAL, "sh", "-c", "read x; stty size; test -t 0; exec cat >&2")
        await heard.session.resize(100, 30)
        await heard.session.write(b"go\n")
        await self.until(lambda: b"30 100" in heard.out, "its size")
        await heard.session.write(b"typed\n")
        await self.until(lambda: heard.out.count(b"typed") == 2, "echoed by the terminal and by cat")
        heard.session.close_stdin()
        self.assertEqual(await heard.over, 0)
        self.assertEqual(heard.err, b"")
        await heard.session.resize(10, 10)

    async def test_the_last_bytes_of_a_terminal_come_before_the_end_of_the_command(self) -> None:
        """It is closed with its last process, when the kernel may still have what was written to it."""
        for size in (3, 100_000, 1_000_000):
            heard = await self.heard(
                TERMINAL, "sh", "-c", f"yes | tr -d '\\n' | head -c {size}; echo END; exit 7"
            )
            self.assertEqual(await heard.over, 7)
            self.assertTrue(heard.out == b"y" * size + b"END\r\n", (size, len(heard.out)))

    async def test_a_terminal_whose_stdin_ends_early_loses_none_of_its_output(self) -> None:
        heard = await self.heard(TERMINAL, "sh", "-c", "cat; yes | tr -d '\\n' | head -c 200000; exit 3")
        heard.session.close_stdin()
        self.assertEqual(await heard.over, 3)
        self.assertEqual(heard.out.count(b"y"), 200_000)

    async def test_no_key_of_a_terminal_is_swallowed(self) -> None:
        heard = await self.heard(TERMINAL, "sh", "-c", "stty raw -echo; echo ready; head -c 4 | od -An -tx1")
        await self.until(lambda: b"ready" in heard.out, "raw mode")
        for key in (b"\x10", b"\x11", b"\x10\x11"):
            await heard.session.write(key)
        self.assertEqual(await heard.over, 0)
        self.assertIn(b"10 11 10 11", heard.out)

    async def test_much_both_ways(self) -> None:
        heard = await self.heard(ALL, "cat")
        piece = bytes(range(256)) * 256
        for _ in range(160):
            await heard.session.write(piece)
        heard.session.close_stdin()
        self.assertEqual(await heard.over, 0)
        self.assertTrue(heard.out == piece * 160, len(heard.out))

    async def test_a_reader_who_does_not_read_lets_the_command_wait(self) -> None:
        session = await self.opened(ALL, "sh", "-c", f"head -c {STREAMED} /dev/zero; echo done >&2")
        await self.until(lambda: session.output.paused, "the writer waits")
        before = resident()
        await self.pause(0.5)
        self.assertLess(resident() - before, GROWTH)
        size, said = 0, b""
        async for stream, data in session.output:
            if stream == "stdout":
                size += len(data)
            else:
                said += data
        self.assertEqual((size, said, await session.ended()), (STREAMED, b"done\n", 0))
        self.assertLess(resident() - before, GROWTH)

    async def test_a_command_that_does_not_read_lets_the_writer_wait(self) -> None:
        session = await self.opened(ALL, "sleep", "600")
        before = resident()
        written = 0
        waiting: Any = None
        while written < STREAMED:
            waiting = session.write(b"x" * 65536)
            written += 65536
            if not waiting.called:
                await self.pause(0.3)
            if not waiting.called:
                break
        self.assertLess(written, 16 * MIB)
        self.assertLess(resident() - before, GROWTH)
        session.close()
        await waiting

    async def test_much_input_takes_no_memory(self) -> None:
        heard = await self.heard(ALL, "wc", "-c")
        before = resident()
        piece = bytes(65536)
        for _ in range(STREAMED // len(piece)):
            await heard.session.write(piece)
        heard.session.close_stdin()
        self.assertEqual(await heard.over, 0)
        self.assertEqual(heard.out.strip(), b"%d" % STREAMED)
        self.assertLess(resident() - before, GROWTH)

    async def test_closing_kills_the_command_and_what_it_started(self) -> None:
        for streams in (ALL, TERMINAL):
            marker = str(600000 + os.getpid() % 100000 + streams.tty)
            session = await self.opened(streams, "sh", "-c", f"sleep {marker} & sleep {marker}; true")
            await self.sleepers(marker, 2)
            for _ in range(2):
                session.close()
            await self.sleepers(marker, 0)

    @slow(10, "what is left is waited for, twice")
    async def test_a_process_left_behind_does_not_hold_the_session(self) -> None:
        marker = str(700000 + os.getpid() % 100000)
        for streams, end in ((ALL, b"\n"), (TERMINAL, b"\r\n")):
            heard = await self.heard(streams, "sh", "-c", f"sleep {marker} & echo left")
            self.assertEqual(await heard.over, 0)
            self.assertEqual(heard.out, b"left" + end)
            for pid in living("sleep", marker):
                os.kill(pid, 9)

    async def test_ten_at_once(self) -> None:
        id = await self.run_container("sleep", "600")
        every = [await self.heard(ALL, "cat", id=id) for _ in range(10)]
        for number, heard in enumerate(every):
            await heard.session.write(b"%d" % number)
            heard.session.close_stdin()
        self.assertEqual([await heard.over for heard in every], [0] * 10)
        self.assertEqual([heard.out for heard in every], [b"%d" % number for number in range(10)])

    async def test_only_in_a_container_that_runs(self) -> None:
        ended = await self.run_container("true")
        await self.ended(ended)
        for id in (ended, await self.create("sleep", "600")):
            await self.refused(FailedPrecondition, self.provider.exec_session(id, ["true"], ALL))
            await self.refused(FailedPrecondition, self.provider.attach_session(id, ALL))
        unknown = "b" * 32
        await self.refused(NotFound, self.provider.exec_session(unknown, ["true"], ALL))
        await self.refused(NotFound, self.provider.attach_session(unknown, ALL))

    async def sleepers(self, seconds: str, count: int) -> None:
        """Wait until `count` processes run `sleep` with this argument."""
        await self.until(lambda: len(living("sleep", seconds)) == count, f"{count} processes are there")

    async def said(self, heard: Heard, words: bytes) -> None:
        """Wait until the session has written `words`."""
        await self.until(lambda: words in heard.out, f"{words!r} is written")

    # ---- attach

    async def test_attached_sees_what_comes_and_how_it_ends(self) -> None:
        script = "echo before; while read x; do echo out $x; echo err $x >&2; [ $x = end ] && exit 4; done"
        id = await self.run_container("sh", "-c", script, stdin=True)
        await self.until(lambda: self.logged(id, b"before"), "it runs")
        heard, other = await self.attached(id), await self.attached(id, Streams(stdout=True))
        await heard.session.write(b"one\n")
        await self.until(lambda: b"out one\n" in heard.out and b"err one\n" in heard.err, "both streams")
        self.assertNotIn(b"before", heard.out)
        await heard.session.write(b"end\n")
        self.assertEqual([await heard.over, await other.over], [4, 4])
        self.assertEqual((other.out, other.err), (b"out one\nout end\n", b""))

    async def logged(self, id: str, line: bytes) -> bool:
        return any(record.line == line for record in await self.lines(id))

    async def test_detaching_lets_the_container_and_its_stdin_go_on(self) -> None:
        id = await self.run_container("sh", "-c", "while read x; do echo got $x; done", stdin=True)
        for number in range(2):
            heard = await self.attached(id)
            await heard.session.write(b"%d\n" % number)
            await self.said(heard, b"got %d\n" % number)
            heard.session.close_stdin()
            heard.session.close()

    async def test_the_first_who_attached_ends_stdin_where_that_was_asked_for(self) -> None:
        id = await self.run_container("sh", "-c", "cat; exit 5", stdin=True, stdin_once=True)
        heard = await self.attached(id)
        await heard.session.write(b"line\n")
        heard.session.close_stdin()
        self.assertEqual((await heard.over, heard.out), (5, b"line\n"))

    async def test_without_stdin_what_is_written_is_dropped(self) -> None:
        id = await self.run_container("sh", "-c", "sleep 0.5; cat; exit 6")
        heard = await self.attached(id)
        await heard.session.write(b"x" * 65536)
        heard.session.close_stdin()
        self.assertEqual((await heard.over, heard.out), (6, b""))

    async def pause(self, seconds: float) -> None:
        from twisted.internet.task import deferLater

        await deferLater(reactor, seconds, lambda: None)
