# SPDX-License-Identifier: Apache-2.0
"""Compressed disks, whole, in several parts, cut off, and bombs."""

from __future__ import annotations

import gzip
import itertools
import lzma
from collections.abc import Callable, Mapping

import zstandard
from twisted.trial.unittest import SynchronousTestCase

from infranetes.images.machine.decompress import CHUNK, decompressed
from infranetes.images.machine.limits import BadDisk

CONTENT = bytes(range(256)) * 3000 + bytes(100000)
COMPRESS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def whole(data: bytes, compression: str, piece: int = 1000) -> bytes:
    pieces = (data[at : at + piece] for at in range(0, len(data), piece))
    return b"".join(decompressed(pieces, compression))


class DecompressTests(SynchronousTestCase):
    def test_the_content_comes_out_whatever_pieces_it_comes_in(self) -> None:
        for compression, compress in COMPRESS.items():
            data = compress(CONTENT)
            for piece in (7, 1000, len(data)):
                self.assertEqual(whole(data, compression, piece), CONTENT, compression)

    def test_several_parts_are_one_after_the_other(self) -> None:
        for compression, compress in COMPRESS.items():
            data = compress(CONTENT) + compress(b"more")
            self.assertEqual(whole(data, compression), CONTENT + b"more", compression)

    def test_zeros_after_it_are_padding(self) -> None:
        for compression in ("gzip", "xz"):
            self.assertEqual(whole(COMPRESS[compression](CONTENT) + bytes(512), compression), CONTENT)

    def test_what_is_cut_off_is_refused(self) -> None:
        for compression, compress in COMPRESS.items():
            data = compress(CONTENT)
            for length in (8, len(data) // 2, len(data) - 1):
                error = self.assertRaises(BadDisk, whole, data[:length], compression)
                self.assertIn("cut off", str(error), compression)

    def test_what_is_damaged_or_followed_by_garbage_is_refused(self) -> None:
        for compression, compress in COMPRESS.items():
            data = compress(CONTENT)
            damaged = data[: len(data) // 2] + b"\xff\xff\xff\xff" + data[len(data) // 2 + 4 :]
            for wrong in (damaged, data + b"garbage" * 100):
                error = self.assertRaises(BadDisk, whole, wrong, compression)
                self.assertIn(f"not the {compression} file", str(error))

    def test_a_bomb_comes_in_pieces(self) -> None:
        for compression, compress in COMPRESS.items():
            bomb = compress(bytes(16 << 20))
            pieces = itertools.islice(decompressed(iter([bomb]), compression), 3)
            self.assertLessEqual(max(map(len, pieces)), CHUNK, compression)
