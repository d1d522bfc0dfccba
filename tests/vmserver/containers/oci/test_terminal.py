# SPDX-License-Identifier: Apache-2.0
"""Terminals are read to their end, written to no faster than they take it, and handed over once."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import shutil
import socket
import struct
import tempfile
import termios
import tty
from pathlib import Path

from twisted.trial.unittest import TestCase

from infranetes_common.concurrency import start, within
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import installed
from tests.support.waiting import until
from vmserver.containers.oci import terminal as module
from vmserver.containers.oci.terminal import ConsoleSocket, Terminal
from vmserver.containers.sessions import WriteGate

reactor = installed()
_TIOCSPTLCK = 0x40045431  # ioctl_tty(2); termios has no name for it


class TerminalTests(TestCase):
    """The test has the end that a command has."""

    def setUp(self) -> None:
        self.descriptor, self.command = os.openpty()
        tty.setraw(self.command)
        os.set_blocking(self.command, False)
        self.heard, self.ends = bytearray(), 0
        self.gate = WriteGate()
        self.terminal = Terminal(reactor, self.descriptor, self.gate, self.heard.extend, self.over)
        self.addCleanup(self.terminal.hang_up)
        self.addCleanup(self.leave)

    def over(self) -> None:
        self.ends += 1

    def leave(self) -> None:
        """Let no process have the terminal open. Idempotent."""
        if self.command >= 0:
            os.close(self.command)
            self.command = -1

    def size(self) -> tuple[int, ...]:
        """Return its rows and columns."""
        return struct.unpack("HHHH", fcntl.ioctl(self.command, termios.TIOCGWINSZ, bytes(8)))[:2]

    async def test_it_is_read_until_nobody_has_it_open(self) -> None:
        os.write(self.command, b"one")
        await until(lambda: self.heard == b"one", "it is heard")
        os.write(self.command, b" two")
        self.leave()
        await until(lambda: self.ends, "its end")
        self.assertEqual((self.heard, self.ends), (b"one two", 1))
        self.terminal.resumeProducing()
        self.assertNotIn(self.terminal, reactor.getReaders())

    def test_a_reactor_that_reads_what_was_hung_up_is_told_its_end_too(self) -> None:
        self.leave()
        for _ in range(2):
            self.terminal.doRead()
        self.assertEqual((self.heard, self.ends), (b"", 1))

    async def test_the_rest_is_read_although_it_ended_while_something_was_written(self) -> None:
        self.terminal.pauseProducing()
        os.write(self.command, b"last words")
        self.terminal.write(b"x" * 200_000)
        self.leave()
        await within(reactor, 20.0, start(self.gate.wait()), "the writer")
        self.terminal.write(b"x" * 200_000)
        await within(reactor, 20.0, start(self.gate.wait()), "the next writer")
        self.assertEqual((self.heard, self.ends), (b"", 0))
        self.terminal.resumeProducing()
        await until(lambda: self.ends, "its end")
        self.assertEqual(self.heard, b"last words")

    async def test_while_it_is_paused_it_is_not_read(self) -> None:
        self.terminal.pauseProducing()
        os.write(self.command, b"later")
        self.assertNotIn(self.terminal, reactor.getReaders())
        self.terminal.resumeProducing()
        await until(lambda: self.heard == b"later", "it is heard")

    async def test_a_command_that_does_not_read_lets_the_writer_wait(self) -> None:
        self.terminal.write(b"x" * 70_000)
        waiting = start(self.gate.wait())
        self.assertFalse(waiting.called)
        found = bytearray()

        def read() -> bool:
            with contextlib.suppress(BlockingIOError):
                found.extend(os.read(self.command, 65536))
            return waiting.called

        await until(read, "the writer")
        await until(lambda: read() and len(found) == 70_000, "all of it")

    async def test_the_writer_waits_no_longer_once_it_is_hung_up(self) -> None:
        self.terminal.write(b"x" * 200_000)
        waiting = start(self.gate.wait())
        for _ in range(2):
            self.terminal.hang_up()
        await within(reactor, 20.0, waiting, "the writer")
        self.assertRaises(OSError, os.fstat, self.descriptor)
        self.assertNotIn(self.terminal, reactor.getReaders())

    def test_its_size_is_set_and_one_that_it_can_not_have_is_not(self) -> None:
        self.terminal.resize(132, 43)
        self.assertEqual(self.size(), (43, 132))
        for width, height in ((-1, 5), (5, -1), (65536, 5), (5, 65536)):
            self.terminal.resize(width, height)
        self.assertEqual(self.size(), (43, 132))
        self.terminal.hang_up()
        self.terminal.resize(1, 1)
        self.terminal.notice_end()

    def test_one_whose_other_end_can_not_be_opened_any_more_is_no_failure(self) -> None:
        def hung_up(descriptor: int) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        self.patch(module, "open_peer", hung_up)
        self.terminal.notice_end()
        self.assertEqual(self.ends, 0)

    async def test_the_end_of_one_that_no_process_had_open_is_noticed(self) -> None:
        descriptor = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
        fcntl.ioctl(descriptor, _TIOCSPTLCK, bytes(4))
        ends = list[int]()
        made = Terminal(reactor, descriptor, WriteGate(), self.heard.extend, lambda: ends.append(1))
        self.addCleanup(made.hang_up)
        self.assertRaises(BlockingIOError, os.read, descriptor, 1)
        made.notice_end()
        await until(lambda: ends, "its end")


class ConsoleSocketTests(TestCase):
    """The test hands over, in crun's place."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="console-"))
        self.addCleanup(shutil.rmtree, self.directory)

    def console(self) -> ConsoleSocket:
        made = ConsoleSocket(reactor, self.directory)
        self.addCleanup(made.close)
        return made

    def hand_over(self, console: ConsoleSocket, count: int = 1) -> int:
        """Send the writing end of a new pipe, some times. Return the reading end, which does not block."""
        reader, writer = os.pipe()
        self.addCleanup(os.close, reader)
        os.set_blocking(reader, False)
        with socket.socket(socket.AF_UNIX) as crun:
            crun.connect(str(console.path))
            for _ in range(count):
                crun.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writer]))])
        os.close(writer)
        return reader

    def ended(self, reader: int) -> bool:
        """Return whether nobody has the pipe open for writing."""
        try:
            return os.read(reader, 1) == b""
        except BlockingIOError:
            return False

    async def test_what_is_handed_over_is_the_callers_and_the_socket_is_gone(self) -> None:
        console = self.console()
        self.assertEqual(console.path.stat().st_mode & 0o777, 0o600)
        reader = self.hand_over(console)
        descriptor = await within(reactor, 20.0, console.received, "the terminal")
        os.write(descriptor, b"y")
        self.assertEqual(os.read(reader, 10), b"y")
        os.close(descriptor)
        await until(lambda: not console.path.exists(), "the socket is gone")
        await until(lambda: self.ended(reader), "nobody else has it")

    async def test_of_several_that_are_handed_over_the_others_are_closed(self) -> None:
        console = self.console()
        first, second = self.hand_over(console), self.hand_over(console, 2)
        descriptor = await within(reactor, 20.0, console.received, "the terminal")
        await until(lambda: self.ended(second), "they are closed")
        self.assertFalse(self.ended(first))
        os.close(descriptor)

    async def test_one_that_is_closed_is_not_connected_to(self) -> None:
        console = self.console()
        for _ in range(2):
            console.close()
        await until(lambda: not console.path.exists(), "the socket is gone")
        self.assertNotIn(True, [isinstance(each, socket.socket) for each in reactor.getReaders()])

    async def test_a_directory_whose_path_is_too_long_is_named(self) -> None:
        top = self.directory
        self.directory = top / ("x" * (107 - len(str(top)) - len("/") - len("/0123456789ab.tty")))
        self.directory.mkdir()
        console = self.console()
        self.assertEqual(len(str(console.path)), 107)
        console.close()
        await until(lambda: not console.path.exists(), "the socket is gone")
        self.directory = self.directory.with_name(f"{self.directory.name}x")
        with self.assertRaises(Unavailable) as caught:
            self.console()
        self.assertIn(str(self.directory), str(caught.exception))
