# SPDX-License-Identifier: Apache-2.0
"""Layers' files are read by what their first bytes are."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import zstandard
from twisted.trial.unittest import SynchronousTestCase

from infranetes.images.layers import compression_of, uncompressed


def tar(*names: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as file:
        for name in names:
            file.addfile(tarfile.TarInfo(name))
    return made.getvalue()


def of_v7(data: bytes) -> bytes:
    """Return a tar of one file in the oldest format, whose header has only a sum to be known by."""
    header = data[:257] + bytes(255)
    total = sum(header[:148] + b" " * 8 + header[156:])
    return header[:148] + b"%06o\0 " % total + header[156:] + data[512:]


class FirstBytesTests(SynchronousTestCase):
    def test_whatever_the_manifest_says(self) -> None:
        data, file = tar("file"), Path(self.mktemp())
        zstd = zstandard.ZstdCompressor().compress(data)
        skipped = b"\x5a\x2a\x4d\x18\x04\x00\x00\x00note"  # a frame that pzstd and others put first
        for compression, blob, content in (
            ("gzip", gzip.compress(data), data),
            ("zstd", zstd, data),
            ("zstd", skipped + zstd, data),
            ("", data, data),
            ("", of_v7(data), of_v7(data)),
            ("", tar(), tar()),
        ):
            file.write_bytes(blob)
            for said in ("gzip", "zstd", ""):
                self.assertEqual(compression_of(file, said), compression, said)
                with uncompressed(file, compression) as opened:
                    self.assertEqual(opened.read(), content)

    def test_what_they_do_not_tell_the_manifest_does(self) -> None:
        file = Path(self.mktemp())
        for blob in (
            b"",
            b"*M\x18",
            b"BZh91AY",
            b"x" * 512,
            tar("file")[:511],
            b"\x60\x2a\x4d\x18" + bytes(600),
        ):
            file.write_bytes(blob)
            for said in ("gzip", "zstd", ""):
                self.assertEqual(compression_of(file, said), said)
