# SPDX-License-Identifier: Apache-2.0
"""The template's memory, which no VM can write to."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

from twisted.internet.defer import gatherResults
from twisted.trial.unittest import TestCase

from infranetes.providers.qemu.template import ram
from infranetes_common.concurrency import start
from infranetes_common.reactors import installed

reactor = installed()
MIB = 1 << 20


class RamTests(TestCase):
    """The template's memory."""

    def setUp(self) -> None:
        self.path = Path(self.mktemp())
        with self.path.open("wb") as file:
            file.truncate(8 * MIB)
            for offset in (0, 3 * MIB + 4096, 8 * MIB - 1):
                file.seek(offset)
                file.write(b"x")
            file.seek(5 * MIB)
            file.write(bytes(MIB))

    def memory(self) -> int:
        descriptor = ram.load(self.path)
        self.addCleanup(os.close, descriptor)
        return descriptor

    def test_it_is_the_same_and_zeros_take_no_memory(self) -> None:
        memory = self.memory()
        self.assertEqual(os.pread(memory, 9 * MIB, 0), self.path.read_bytes())
        self.assertLessEqual(os.fstat(memory).st_blocks * 512, 3 * 65536)

    def test_it_can_be_filled_and_stays_the_same(self) -> None:
        memory = self.memory()
        for _ in range(2):
            ram.thd_fill(memory)
            self.assertEqual(os.fstat(memory).st_blocks * 512, 8 * MIB)
        self.assertEqual(os.pread(memory, 9 * MIB, 0), self.path.read_bytes())

    def test_filling_it_without_the_kernels_help_is_the_same(self) -> None:
        """As before Linux 5.14."""
        self.patch(ram, "_MADV_POPULATE_READ", 9999)
        memory = self.memory()
        ram.thd_fill(memory)
        self.assertEqual(os.fstat(memory).st_blocks * 512, 8 * MIB)

    def test_nobody_writes_to_it_by_whatever_way(self) -> None:
        memory = self.memory()
        again = os.open(f"/proc/self/fd/{memory}", os.O_RDWR)  # QEMU opens it like this
        self.addCleanup(os.close, again)
        for descriptor in (memory, again):
            self.assertRaises(PermissionError, os.pwrite, descriptor, b"y", 0)
            self.assertRaises(PermissionError, os.ftruncate, descriptor, 0)
            self.assertRaises(PermissionError, os.ftruncate, descriptor, 9 * MIB)
            self.assertRaises(PermissionError, mmap.mmap, descriptor, MIB, mmap.MAP_SHARED)
            self.assertRaises(PermissionError, fcntl.fcntl, descriptor, fcntl.F_ADD_SEALS, 0)
            self.assertRaises(PermissionError, os.posix_fallocate, descriptor, 0, 9 * MIB)
        with mmap.mmap(again, MIB, mmap.MAP_PRIVATE) as private:
            private[:4] = b"mine"
        self.assertEqual(os.pread(memory, 4, 0), b"x\0\0\0")

    async def test_it_is_loaded_once_for_all_until_the_file_is_another(self) -> None:
        shared = ram.SharedRam(reactor)
        memories = [await shared.of(self.path) for _ in range(2)]
        memories += await gatherResults([start(shared.of(self.path)) for _ in range(2)])
        self.assertEqual(len({os.fstat(each.fileno()).st_ino for each in memories}), 1)
        other = self.path.with_name("other")
        other.write_bytes(b"other")
        other.replace(self.path)
        memory = await shared.of(self.path)
        self.assertEqual(os.pread(memory.fileno(), 9, 0), b"other")

    async def test_it_is_had_as_long_as_somebody_has_it(self) -> None:
        shared = ram.SharedRam(reactor)
        one = await shared.of(self.path)
        other = await shared.of(self.path)
        del one
        self.assertEqual(len(self.held()), 1)
        del other
        self.assertEqual(self.held(), [])
        again = await shared.of(self.path)
        self.assertEqual(os.pread(again.fileno(), 1, 0), b"x")

    async def test_a_file_that_is_not_there(self) -> None:
        shared = ram.SharedRam(reactor)
        with self.assertRaises(FileNotFoundError):
            await shared.of(self.path.with_name("none"))

    def test_of_one_that_can_not_be_loaded_no_memory_is_kept(self) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        self.patch(ram, "_copy", full)
        self.assertRaises(OSError, ram.load, self.path)
        self.assertRaises(FileNotFoundError, ram.load, self.path.with_name("none"))
        self.assertEqual(self.held(), [])

    def held(self) -> list[str]:
        """Return what is open of such memory, and of its file."""
        links = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
        files = [os.readlink(each) for each in links if os.path.exists(each)]
        return [each for each in files if ram.NAME in each or each == str(self.path)]
