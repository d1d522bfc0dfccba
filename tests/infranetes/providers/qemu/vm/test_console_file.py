# SPDX-License-Identifier: Apache-2.0
"""A console's file: its bytes keep their numbers."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.vm import console_file

SIZE = 64 << 10


class ConsoleFileTests(SynchronousTestCase):
    """What is forgotten, and what is read."""

    def setUp(self) -> None:
        self.path = Path(self.mktemp())
        self.path.touch()

    def append(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)

    def test_an_empty_one_begins_where_it_ends(self) -> None:
        self.assertEqual(console_file.begin_of(self.path), 0)
        self.assertEqual(console_file.read(self.path, 0, 10), b"")
        self.assertIsNone(console_file.read(self.path, 1, 10))
        console_file.forget(self.path, SIZE)

    def test_what_has_room_is_kept(self) -> None:
        self.append(b"x" * SIZE)
        console_file.forget(self.path, SIZE)
        self.assertEqual(console_file.begin_of(self.path), 0)
        self.assertEqual(console_file.read(self.path, 0, 10), b"x" * 10)

    def test_what_is_forgotten_takes_no_room_and_the_rest_has_its_numbers(self) -> None:
        lines = b"".join(b"%07d\n" % number for number in range(SIZE // 8 + 1))
        self.append(lines)
        console_file.forget(self.path, SIZE)
        begin = console_file.begin_of(self.path)
        self.assertGreater(begin, 0)
        self.assertLessEqual(begin, len(lines) - SIZE // 2)
        self.assertIsNone(console_file.read(self.path, begin - 1, 10))
        self.assertEqual(console_file.read(self.path, begin, 8), lines[begin : begin + 8])
        self.assertEqual(console_file.read(self.path, len(lines) - 3, 100), lines[-3:])
        self.assertLess(os.stat(self.path).st_blocks * 512, len(lines))
        self.append(b"more")
        self.assertEqual(console_file.read(self.path, len(lines), 100), b"more")

    def test_a_flood_never_takes_much_more_than_the_size(self) -> None:
        begins = []
        for _ in range(20):
            self.append(b"x" * SIZE)
            console_file.forget(self.path, SIZE)
            begins.append(console_file.begin_of(self.path))
            self.assertLessEqual(os.stat(self.path).st_size - begins[-1], SIZE)
        self.assertEqual(begins, sorted(begins))
        self.assertEqual(console_file.read(self.path, 20 * SIZE - 1, 10), b"x")

    def test_zeros_that_the_guest_has_written_are_no_hole(self) -> None:
        self.append(bytes(SIZE))
        self.assertEqual(console_file.begin_of(self.path), 0)
        self.assertEqual(console_file.read(self.path, 0, 4), bytes(4))

    def test_one_that_is_not_there_is_an_error(self) -> None:
        self.path.unlink()
        for call in (
            lambda: console_file.begin_of(self.path),
            lambda: console_file.read(self.path, 0, 1),
            lambda: console_file.forget(self.path, SIZE),
        ):
            self.assertRaises(FileNotFoundError, call)
