# SPDX-License-Identifier: Apache-2.0
"""A file in pieces."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.internet.defer import CancelledError
from twisted.trial.unittest import TestCase

from infranetes.pods.images.file_chunks import CHUNK_BYTES, FileChunks
from infranetes_common import reactors
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition


class PiecesTests(TestCase):
    def setUp(self) -> None:
        self.file = Path(self.mktemp())
        self.content = os.urandom(3 * CHUNK_BYTES + 17)
        self.file.write_bytes(self.content)
        self.counted: list[int] = []

    def pieces(self, offset: int = 0) -> FileChunks:
        return FileChunks(reactors.installed(), self.file, offset, self.counted.append)

    def is_open(self) -> bool:
        """Whether this process has the file open."""
        named = [Path("/proc/self/fd") / each for each in os.listdir("/proc/self/fd")]
        return str(self.file.resolve()) in [os.readlink(each) for each in named if os.path.lexists(each)]

    async def test_all_of_it_in_bounded_pieces(self) -> None:
        pieces = [chunk async for chunk in self.pieces()]
        self.assertEqual(b"".join(pieces), self.content)
        self.assertEqual(max(map(len, pieces)), CHUNK_BYTES)
        self.assertEqual(sum(self.counted), len(self.content))

    async def test_after_its_end_nothing_is_counted_again(self) -> None:
        pieces = self.pieces()
        async for _ in pieces:
            pass
        for _ in range(2):
            with self.assertRaises(StopAsyncIteration):
                await anext(pieces)
        self.assertEqual(sum(self.counted), len(self.content))

    async def test_from_an_offset_on(self) -> None:
        found = b"".join([chunk async for chunk in self.pieces(CHUNK_BYTES + 5)])
        self.assertEqual(found, self.content[CHUNK_BYTES + 5 :])

    async def test_a_file_that_is_gone(self) -> None:
        self.file.unlink()
        with self.assertRaises(FailedPrecondition):
            await anext(self.pieces())

    async def test_it_is_closed_in_the_middle_and_twice_is_once(self) -> None:
        pieces = self.pieces()
        await anext(pieces)
        for _ in range(2):
            await pieces.aclose()
        self.assertFalse(self.is_open())

    async def test_it_is_closed_also_while_it_is_read(self) -> None:
        pieces = self.pieces()
        await anext(pieces)
        self.assertTrue(self.is_open())
        reading = start(anext(pieces))
        await pieces.aclose()
        await reading
        self.assertFalse(self.is_open())
        with self.assertRaises(StopAsyncIteration):
            await anext(pieces)

    async def test_a_reader_that_is_cancelled_closes_it_once_the_thread_has_ended(self) -> None:
        pieces = self.pieces()
        reading = start(anext(pieces))
        await pieces.aclose()
        reading.cancel()
        with self.assertRaises(CancelledError):
            await reading
        self.assertFalse(self.is_open())
