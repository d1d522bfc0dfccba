# SPDX-License-Identifier: Apache-2.0
"""The record that a VM sleeps, and its memory's file."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.keep.hardware import Disk, Hardware, Piece
from infranetes.providers.qemu.sleep import record as records
from infranetes.providers.qemu.sleep.record import SleepRecord, SleptVolume, Stage

RECORD = SleepRecord(
    Stage.SAVING,
    "boot",
    "/usr/bin/qemu",
    "QEMU 7.2",
    ("-machine", "q35"),
    ((3, "/images/disk"), (4, "/kept/ram")),
    Hardware(
        "7.2", "tcg", "image", "template", 64, 1 << 30, "1", (1, 2),
        (Piece("dimm0", "more", 1 << 32, 0, 128),), (Disk("layer", 0, 1, 4096, "/layers/1"),),
    ),
    (SleptVolume("vol", "serial", 5, True),),
)  # fmt: skip


class RecordTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.memory = self.directory / records.MEMORY

    def test_it_is_read_as_it_was_written_and_by_root_alone(self) -> None:
        self.assertIsNone(records.thd_read(self.directory))
        for record in (RECORD, attrs.evolve(RECORD, stage=Stage.ASLEEP, memory=(4096, 7, 9))):
            records.thd_write(self.directory, record)
            self.assertEqual(records.thd_read(self.directory), record)
            mode = (self.directory / records.RECORD).stat().st_mode
            self.assertEqual(stat.S_IMODE(mode), 0o600)

    def test_the_size_of_memory_that_is_not_whole_is_none(self) -> None:
        self.assertEqual(RECORD.size, 0)
        self.assertEqual(attrs.evolve(RECORD, memory=(4096, 7, 9)).size, 4096)

    def test_whatever_else_is_in_its_place_is_an_error_with_its_path(self) -> None:
        for content in ("", "[]", "{}", '{"stage": "asleep"}', '{"stage": "never"}', "null", '{"stage": []}'):
            (self.directory / records.RECORD).write_text(content)
            self.assertRaises(ValueError, records.thd_read, self.directory)
        (self.directory / records.RECORD).unlink()
        (self.directory / records.RECORD).mkdir()
        error = self.assertRaises(ValueError, records.thd_read, self.directory)
        self.assertIn(str(self.directory / records.RECORD), str(error))

    def test_memory_that_was_replaced_or_changed_is_told(self) -> None:
        self.memory.write_bytes(b"memory")
        before = records.thd_memory(self.directory)
        self.assertEqual(records.thd_memory(self.directory), before)
        other = self.directory / "other"
        other.write_bytes(b"MEMORY")
        other.rename(self.memory)
        replaced = records.thd_memory(self.directory)
        self.assertEqual((replaced[0], replaced[1] == before[1]), (6, False))
        changed = self.memory.stat()
        while records.thd_memory(self.directory)[2] == replaced[2]:  # the kernel's clock has a tick
            os.utime(self.memory, ns=(changed.st_atime_ns, changed.st_mtime_ns))
        self.assertNotEqual(records.thd_memory(self.directory), replaced)

    def test_the_record_goes_before_the_memory_and_all_of_it_as_often_as_one_likes(self) -> None:
        records.thd_write(self.directory, RECORD)
        self.memory.mkdir()  # so that it can't be removed
        self.assertRaises(OSError, records.thd_remove, self.directory)
        self.assertIsNone(records.thd_read(self.directory))
        self.memory.rmdir()
        self.memory.write_bytes(b"memory")
        for _ in range(2):
            records.thd_remove(self.directory)
            self.assertEqual(list(self.directory.iterdir()), [])
