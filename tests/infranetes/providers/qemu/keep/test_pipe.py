# SPDX-License-Identifier: Apache-2.0
"""The pipe by which a VM's state reaches a file: all of it, no more than it may, and nothing is left open."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path
from threading import Event

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import TestCase

from infranetes.providers.qemu.keep.pipe import StatePipe, as_error, drained
from infranetes_common.concurrency import start
from infranetes_common.errors import ResourceExhausted, Unavailable
from infranetes_common.reactors import installed
from tests.support.waiting import until

reactor = installed()


class PipeCase(TestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.path = self.directory / "memory"

    def is_open(self) -> bool:
        """Return whether this process has the file open."""
        numbers = Path("/proc/self/fd").iterdir()
        return any(os.path.realpath(each) == os.path.realpath(self.path) for each in numbers)


class StatePipeTests(PipeCase):
    """The end that the daemon reads."""

    def drain(self, content: bytes, most: int, unwanted: bool = False, keep: bool = False) -> int:
        made, event = StatePipe.make(), Event()
        self.reader = made.reader
        os.write(made.writer, content)
        if unwanted:
            event.set()
        if not keep:
            os.close(made.writer)
        try:
            return made.thd_drain(self.path, most, event)
        finally:
            if keep:
                os.close(made.writer)

    def check_closed(self) -> None:
        self.assertRaises(OSError, os.fstat, self.reader)
        self.assertFalse(self.is_open())

    def test_all_of_it_is_in_a_file_for_root_alone(self) -> None:
        self.assertEqual(self.drain(b"state" * 1000, 5000), 5000)
        self.assertEqual(self.path.read_bytes(), b"state" * 1000)
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), 0o600)
        self.check_closed()

    def test_more_than_it_may_have_is_refused(self) -> None:
        self.assertRaises(ResourceExhausted, self.drain, b"x" * 5001, 5000, keep=True)
        self.check_closed()

    def test_one_that_nobody_wants_any_more_ends_though_its_writer_does_not(self) -> None:
        self.assertRaises(Unavailable, self.drain, b"x", 5000, unwanted=True, keep=True)
        self.check_closed()

    def test_a_file_that_is_there_is_not_written_to(self) -> None:
        self.path.write_bytes(b"another's")
        error = self.assertRaises(Unavailable, self.drain, b"x", 5000)
        self.assertIn(str(self.path), str(error))
        self.assertEqual(self.path.read_bytes(), b"another's")
        self.check_closed()

    def test_a_full_disk_is_told_as_that_however_the_kernel_says_so(self) -> None:
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error = as_error(OSError(number, os.strerror(number)), "the state can't be written")
            self.assertIsInstance(error, ResourceExhausted)
            self.assertIn("make room", str(error))
        self.assertIs(type(as_error(OSError(errno.EIO, "broken"), "it")), Unavailable)


class DrainedTests(PipeCase):
    """The block in which QEMU has the other end."""

    async def test_it_ends_once_all_is_written(self) -> None:
        async with drained(reactor, self.path, 1 << 20) as writer:
            os.write(writer, b"state")
            os.close(writer)
        self.assertEqual(self.path.read_bytes(), b"state")
        self.assertFalse(self.is_open())

    async def test_an_error_of_the_block_is_told_and_the_file_is_let_go_of_first(self) -> None:
        with self.assertRaises(ZeroDivisionError):
            async with drained(reactor, self.path, 1 << 20) as writer:
                self.addCleanup(os.close, writer)  # QEMU has it still
                raise ZeroDivisionError
        self.assertFalse(self.is_open())

    async def test_where_there_is_no_room_that_is_told_in_place_of_what_qemu_says(self) -> None:
        with self.assertRaises(ResourceExhausted):
            async with drained(reactor, self.path, 4) as writer:
                os.write(writer, b"state")
                os.close(writer)
                await until(lambda: not self.is_open(), "the file is closed")
                raise Unavailable("QEMU could not write")

    async def test_what_else_goes_wrong_with_the_file_hides_no_error_of_the_block(self) -> None:
        self.path.mkdir()
        with self.assertRaisesRegex(Unavailable, "QEMU could not write"):
            async with drained(reactor, self.path, 1 << 20) as writer:
                os.close(writer)
                raise Unavailable("QEMU could not write")

    async def test_one_who_is_cancelled_waits_until_nobody_writes_to_the_file(self) -> None:
        begun: Deferred[int] = Deferred()

        async def write() -> None:
            async with drained(reactor, self.path, 1 << 20) as writer:
                begun.callback(writer)
                await Deferred()

        writing = start(write())
        self.addCleanup(os.close, await begun)
        writing.cancel()
        await self.assertFailure(writing, CancelledError)
        self.assertFalse(self.is_open())
