# SPDX-License-Identifier: Apache-2.0
"""A container's stdin is found among the files of its conmon, and nothing else is written to."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from twisted.trial.unittest import TestCase

from infranetes_common.concurrency import start, within
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import installed
from tests.support.waiting import until
from vmserver.containers.oci import stdin
from vmserver.containers.oci.stdin import ContainerStdin

reactor = installed()
NULL = subprocess.DEVNULL


class StdinTests(TestCase):
    """A child process in conmon's place holds the writing end of a pipe, which the test reads."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="stdin-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.open = {self.reader, self.writer}
        self.addCleanup(self.close_all)

    def close_all(self) -> None:
        for each in self.open:
            os.close(each)

    def close(self, descriptor: int) -> None:
        self.open.remove(descriptor)
        os.close(descriptor)

    def conmon(self, script: str = "", stderr: int = NULL) -> subprocess.Popen[bytes]:
        """Start it; of the pipe only its own writing end is left. It reads from another one."""
        made = subprocess.Popen(
            ["sh", "-c", f"{script} exec sleep 600"],
            stdin=subprocess.PIPE,
            stdout=self.writer,
            stderr=stderr,
        )
        self.addCleanup(made.communicate)
        self.addCleanup(made.kill)
        self.close(self.writer)
        return made

    def found(self, conmon: int) -> ContainerStdin:
        made = ContainerStdin(reactor, conmon)
        self.addCleanup(made.close)
        return made

    def read(self) -> bytes | None:
        """Return what has come; b"" once nobody has the pipe open for writing."""
        try:
            return os.read(self.reader, 1 << 20)
        except BlockingIOError:
            return None

    async def received(self, expected: bytes) -> None:
        """Wait until this has come."""
        found = bytearray()

        def whole() -> bool:
            found.extend(self.read() or b"")
            return len(found) >= len(expected)

        await until(whole, "it comes")
        self.assertEqual(bytes(found), expected)

    async def over(self) -> None:
        """Wait until nobody has the pipe open for writing."""
        await until(lambda: self.read() == b"", "its end")

    async def test_what_is_written_comes_in_its_order_and_the_pipe_ends_with_conmon(self) -> None:
        conmon = self.conmon()
        pipe = self.found(conmon.pid)
        for _ in range(2):
            pipe.write(b"one ")
            pipe.write(b"two")
            await self.received(b"one two")
        conmon.kill()
        await self.over()

    async def test_whoever_finishes_is_told_once_all_is_written(self) -> None:
        pipe, told = self.found(self.conmon().pid), list[int]()
        pipe.finish(lambda: told.append(1))
        self.assertEqual(told, [1], "there is nothing to write")
        pipe.write(b"x" * 100_000)  # more than fits into the pipe
        pipe.finish(lambda: told.append(2))
        self.assertEqual(told, [1])
        await self.received(b"x" * 100_000)
        await until(lambda: told == [1, 2], "it is told")

    async def test_a_container_that_does_not_read_lets_the_writer_wait(self) -> None:
        pipe = self.found(self.conmon().pid)
        pipe.write(b"x" * 1_000_000)
        waiting = start(pipe.gate.wait())
        self.assertFalse(waiting.called)
        await self.received(b"x" * 1_000_000)
        await within(reactor, 20.0, waiting, "the writer")

    async def test_what_nobody_reads_any_longer_is_dropped(self) -> None:
        pipe, told = self.found(self.conmon().pid), list[int]()
        pipe.write(b"x" * 1_000_000)
        pipe.finish(lambda: told.append(1))
        self.close(self.reader)
        await until(lambda: told, "it is told")
        await within(reactor, 20.0, start(pipe.gate.wait()), "the writer")
        pipe.write(b"more")
        await within(reactor, 20.0, start(pipe.gate.wait()), "the next writer")

    async def test_what_is_written_after_the_last_reader_has_gone_is_dropped_too(self) -> None:
        pipe = self.found(self.conmon().pid)
        self.close(self.reader)
        for _ in range(2):
            pipe.write(b"x" * 1_000_000)
            await within(reactor, 20.0, start(pipe.gate.wait()), "the writer")

    async def test_once_closed_it_writes_nothing_more_and_lets_the_pipe_end(self) -> None:
        conmon = self.conmon()
        pipe = self.found(conmon.pid)
        pipe.write(b"x" * 1_000_000)
        waiting = start(pipe.gate.wait())
        for _ in range(2):
            pipe.close()
        await within(reactor, 20.0, waiting, "the writer")
        pipe.write(b"more")
        conmon.kill()
        await self.over()

    async def test_where_conmon_has_closed_it_all_is_dropped(self) -> None:
        conmon = self.conmon("exec >/dev/null;")
        await self.over()
        pipe, told = self.found(conmon.pid), list[int]()
        pipe.write(b"x" * 1_000_000)
        await within(reactor, 20.0, start(pipe.gate.wait()), "the writer")
        pipe.finish(lambda: told.append(1))
        self.assertEqual(told, [1])

    async def test_what_comes_after_conmon_has_closed_it_is_dropped(self) -> None:
        conmon = self.conmon("read x; exec >&-;")
        pipe = self.found(conmon.pid)
        assert conmon.stdin is not None
        conmon.stdin.write(b"\n")
        conmon.stdin.flush()
        await self.over()
        for _ in range(2):
            pipe.write(b"x" * 1_000_000)
            await within(reactor, 20.0, start(pipe.gate.wait()), "the writer")

    async def test_the_pipe_that_reported_the_creation_is_not_taken_for_it(self) -> None:
        conmon = self.conmon("exec 3>&1 >/dev/null;")
        at = Path(f"/proc/{conmon.pid}/fd/1")
        await until(lambda: os.readlink(at) == "/dev/null", "it has only that one")
        pipe = self.found(conmon.pid)
        pipe.write(b"x")
        self.assertIsNone(self.read())

    async def written_to_what_took_its_place(self, other: Path) -> None:
        """Write after conmon has closed the pipe and has opened another file."""
        conmon = self.conmon(f"read x; exec >{other};")
        pipe = self.found(conmon.pid)
        assert conmon.stdin is not None
        conmon.stdin.write(b"\n")
        conmon.stdin.flush()
        at = Path(f"/proc/{conmon.pid}/fd/1")
        await until(lambda: os.readlink(at) == str(other), "it is another file")
        told = list[int]()
        pipe.write(b"x")
        pipe.finish(lambda: told.append(1))
        await until(lambda: told, "it is dropped")

    async def test_a_file_that_conmon_has_opened_in_its_place_is_not_written_to(self) -> None:
        other = self.directory / "file"
        await self.written_to_what_took_its_place(other)
        self.assertEqual(other.read_bytes(), b"")

    async def test_another_pipe_in_its_place_is_not_written_to_either(self) -> None:
        other = self.directory / "fifo"
        os.mkfifo(other)
        reader = os.open(other, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        await self.written_to_what_took_its_place(other)
        self.assertRaises(BlockingIOError, os.read, reader, 10)

    def test_of_two_pipes_it_is_not_told_which_one_it_is(self) -> None:
        other, writer = os.pipe()
        self.addCleanup(os.close, other)
        conmon = self.conmon(stderr=writer)
        os.close(writer)
        with self.assertRaises(Unavailable) as caught:
            ContainerStdin(reactor, conmon.pid)
        self.assertIn("2 pipes", str(caught.exception))

    def test_a_file_of_the_same_number_is_not_taken_for_it(self) -> None:
        file = self.directory / "file"
        with file.open("wb") as opened:
            inode = file.stat().st_ino
            self.assertFalse(stdin._is_pipe(opened.fileno(), inode))
        inode = os.fstat(self.writer).st_ino
        self.assertTrue(stdin._is_pipe(self.writer, inode))
        self.assertFalse(stdin._is_pipe(self.writer, inode + 1))

    async def test_a_file_that_conmon_closes_meanwhile_is_passed_over(self) -> None:
        conmon, readlink = self.conmon(), os.readlink

        def closed(path: Path) -> str:
            if path.name == "0":
                raise FileNotFoundError
            return readlink(path)

        self.patch(os, "readlink", closed)
        self.found(conmon.pid).write(b"one")
        await self.received(b"one")

    def test_a_conmon_that_is_gone_is_named(self) -> None:
        conmon = self.conmon()
        conmon.kill()
        conmon.wait()
        with self.assertRaises(Unavailable) as caught:
            ContainerStdin(reactor, conmon.pid)
        self.assertIn(f"conmon {conmon.pid}", str(caught.exception))
