# SPDX-License-Identifier: Apache-2.0
"""A file that loses all data that was not flushed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.harness.needs import needs_mounts, needs_programs
from tests.support.power_loss import VolatileFile

SIZE = 1 << 20


@needs_mounts
@needs_programs("nbdkit")
class VolatileFileTests(SynchronousTestCase):
    def setUp(self) -> None:
        directory = Path(self.mktemp()).resolve()
        directory.mkdir()
        self.path = directory / "file"
        self.path.write_bytes(b"before" * 1000)
        os.truncate(self.path, SIZE)
        self.file = VolatileFile(self.path, directory / "work")
        self.addCleanup(self.file.end)

    def open(self) -> int:
        opened = os.open(self.path, os.O_RDWR)
        self.addCleanup(os.close, opened)
        return opened

    def test_it_is_the_file_and_what_was_written(self) -> None:
        opened = self.open()
        os.pwrite(opened, b"later", 70_000)
        again = self.open()
        self.assertEqual((os.pread(again, 6, 5994), os.pread(again, 5, 70_000)), (b"before", b"later"))
        self.assertEqual(os.fstat(again).st_size, SIZE)

    def test_what_was_flushed_is_kept_and_nothing_else(self) -> None:
        opened = os.open(self.path, os.O_RDWR)
        os.pwrite(opened, b"flushed", 100)
        os.pwrite(opened, b"too", 4_095)
        os.fsync(opened)
        os.pwrite(opened, b"not", 4_095)
        os.pwrite(opened, b"nor this", 500_000)
        self.file.fail()
        with self.assertRaises(OSError):
            os.fsync(opened)
        with self.assertRaises(OSError):
            os.pread(opened, 1, 600_000)
        with contextlib.suppress(OSError):
            os.close(opened)
        self.file.lose_power()
        content = self.path.read_bytes()
        self.assertEqual((content[100:107], content[4_095:4_098]), (b"flushed", b"too"))
        self.assertEqual((content[500_000:], len(content)), (bytes(SIZE - 500_000), SIZE))
        self.assertEqual(self.file.flushes, 1)

    def test_zeros_take_their_turn_among_the_writes(self) -> None:
        opened = os.open(self.path, os.O_RDWR)
        os.pwrite(opened, b"x" * 20_000, 8_192)
        os.pwrite(opened, bytes(8_192), 8_192)
        os.pwrite(opened, b"last", 8_192)
        os.fsync(opened)
        os.close(opened)
        self.file.lose_power()
        content = self.path.read_bytes()
        self.assertEqual(content[8_192:16_385], b"last" + bytes(8_188) + b"x")
