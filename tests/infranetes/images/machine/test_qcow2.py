# SPDX-License-Identifier: Apache-2.0
"""qcow2 from strangers: what names other files, is encrypted or malformed is refused; the rest is read."""

from __future__ import annotations

import contextlib
import random
import struct
import subprocess
import zlib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.images.machine.limits import BadDisk
from infranetes.images.machine.qcow2 import Qcow2
from tests.harness.needs import needs_programs
from tests.infranetes.images.machine import builders
from tests.infranetes.images.machine.builders import MIB, patched
from tests.infranetes.images.machine.test_boots import Disk

CLUSTER = 65536
SIZE_AT, ENCRYPTION_AT, L1_SIZE_AT, L1_AT, COUNTS_AT = 24, 32, 36, 40, 48
SNAPSHOTS_AT, FEATURES_AT, LENGTH_AT, EXTENSIONS_AT = 60, 72, 100, 112


def made(
    content: bytes = b"", size: int = 4 * CLUSTER, *, entry: int | None = None, extension: bytes = b""
) -> bytes:
    """Return a qcow2 file with one cluster of data, made here.

    :param entry: of the table, instead of one for the data."""
    header = struct.pack(
        ">4sIQIIQIIQQIIQQQQII",
        b"QFI\xfb", 3, 0, 0, 16, size, 0, 1, CLUSTER, 2 * CLUSTER, 1, 0, 0, 0, 0, 0, 4, 112,
    )  # fmt: skip
    l1 = struct.pack(">Q", 3 * CLUSTER | 1 << 63)
    l2 = struct.pack(">Q", 4 * CLUSTER | 1 << 63 if entry is None else entry)
    counts = struct.pack(">Q", 5 * CLUSTER)
    clusters = (header + bytes(8) + extension, l1, counts, l2, content, struct.pack(">6H", *[1] * 6))
    return b"".join(each.ljust(CLUSTER, b"\0") for each in clusters)


class HeaderTests(SynchronousTestCase):
    def refused(self, data: bytes) -> str:
        return str(self.assertRaises(BadDisk, Qcow2, Disk(data)))

    def test_a_sound_one_is_read(self) -> None:
        disk = Qcow2(Disk(made(b"content")))
        self.assertEqual(disk.size, 4 * CLUSTER)
        self.assertEqual(disk.read(0, 9), b"content\0\0")
        self.assertEqual(disk.read(CLUSTER, CLUSTER), bytes(CLUSTER))
        self.assertEqual(disk.read(4 * CLUSTER - 1, 10), b"\0")
        self.assertEqual(disk.read(5 * CLUSTER, 10), b"")

    def test_a_backing_file_is_refused_with_the_command_that_makes_it_whole(self) -> None:
        for name in (b"/etc/shadow", b'json:{"file.driver":"nbd"}', b"nbd://10.0.0.1/x"):
            header = struct.pack(">QI", 1000, len(name))
            words = self.refused(patched(patched(made(), 8, header), 1000, name))
            self.assertIn("backing file", words)
            self.assertIn("qemu-img convert", words)
            self.assertNotIn("shadow", words)

    def test_half_of_a_backing_files_name_is_one(self) -> None:
        for header in (struct.pack(">QI", 1000, 0), struct.pack(">QI", 0, 7)):
            self.assertIn("backing file", self.refused(patched(made(), 8, header)))

    def test_a_data_file_is_refused_by_flag_and_by_name(self) -> None:
        flagged = patched(made(), FEATURES_AT, struct.pack(">Q", 1 << 2))
        named = made(extension=struct.pack(">II8s", 0x44415441, 8, b"/dev/sda"))
        named = patched(named, EXTENSIONS_AT, struct.pack(">II8s", 0x44415441, 8, b"/dev/sda"))
        for data in (flagged, named):
            self.assertIn("another file", self.refused(data))

    def test_encryption_is_refused(self) -> None:
        luks = struct.pack(">IIQQ", 0x0537BE77, 16, CLUSTER, 4096)
        for data in (
            patched(made(), ENCRYPTION_AT, struct.pack(">I", 1)),
            patched(made(), ENCRYPTION_AT, struct.pack(">I", 2)),
            patched(made(), EXTENSIONS_AT, luks),
        ):
            self.assertIn("encrypted", self.refused(data))

    def test_tables_out_of_range_are_refused(self) -> None:
        for words, at, new in (
            ("first-level table", L1_AT, struct.pack(">Q", 1 << 60)),
            ("first-level table", L1_SIZE_AT, struct.pack(">I", 1 << 31)),
            ("table of reference counts", COUNTS_AT, struct.pack(">QI", 1 << 40, 1)),
            ("table of reference counts", COUNTS_AT, struct.pack(">QI", CLUSTER, 1 << 31)),
            ("table of snapshots", SNAPSHOTS_AT, struct.pack(">IQ", 3, 1 << 50)),
            ("table of snapshots", SNAPSHOTS_AT, struct.pack(">IQ", 1 << 31, CLUSTER)),
            ("does not cover", L1_SIZE_AT, struct.pack(">I", 0)),
            ("does not cover", SIZE_AT, struct.pack(">Q", (1 << 64) - 512)),  # 16 EiB
        ):
            self.assertIn(words, self.refused(patched(made(), at, new)))

    def test_bitmaps_out_of_range_are_refused_and_others_taken(self) -> None:
        def bitmaps(count: int, size: int, at: int) -> bytes:
            return patched(made(), EXTENSIONS_AT, struct.pack(">IIIIQQ", 0x23852875, 24, count, 0, size, at))

        for count, size, at in ((1, 64, 1 << 50), (1, 1 << 40, 0), (1 << 20, 64, CLUSTER)):
            self.assertIn("bitmaps", self.refused(bitmaps(count, size, at)))
        Qcow2(Disk(bitmaps(1, 64, CLUSTER)))

    def test_extensions_that_reach_beyond_the_header_are_refused(self) -> None:
        long = patched(made(), EXTENSIONS_AT, struct.pack(">II", 0x6803F857, 1 << 31))
        self.assertIn("out of range", self.refused(long))

    def test_what_is_not_known_here_is_refused(self) -> None:
        for words, at, new in (
            ("version 1", 4, struct.pack(">I", 1)),
            ("features", FEATURES_AT, struct.pack(">Q", 1 << 9)),
            ("corrupt", FEATURES_AT, struct.pack(">Q", 1 << 1)),
            ("clusters have 2^63", 20, struct.pack(">I", 63)),
            ("header says", LENGTH_AT, struct.pack(">I", 1 << 20)),
            ("header says", LENGTH_AT, struct.pack(">I", 0)),
        ):
            self.assertIn(words, self.refused(patched(made(), at, new)))
        compressed = patched(made(), FEATURES_AT, struct.pack(">Q", 1 << 3))
        self.assertIn("compressed in a way", self.refused(patched(compressed, 104, b"\7")))

    def test_a_header_that_is_cut_off_is_said_to_be_truncated(self) -> None:
        for length in (4, 50, 100):
            self.assertIn("truncated", self.refused(made()[:length]))

    def test_a_table_behind_the_files_end_is_told_when_it_is_read(self) -> None:
        disk = Qcow2(Disk(patched(made(), CLUSTER, struct.pack(">Q", 1 << 40))))
        self.assertIn("out of range", str(self.assertRaises(BadDisk, disk.read, 0, 512)))

    def test_a_bomb_of_a_cluster_gives_no_more_than_a_cluster(self) -> None:
        deflate = zlib.compressobj(9, zlib.DEFLATED, -12)
        bomb = deflate.compress(b"A" * (8 << 20)) + deflate.flush()
        sectors = CLUSTER // 512 - 1
        entry = 1 << 62 | sectors << 54 | 4 * CLUSTER
        disk = Qcow2(Disk(made(bomb[:CLUSTER], entry=entry)))
        self.assertEqual(disk.read(0, 2 * CLUSTER), b"A" * CLUSTER + bytes(CLUSTER))

    def test_a_compressed_cluster_may_be_larger_than_it_is(self) -> None:
        """Its way of compression is zlib's unless a flag says otherwise."""
        content = random.Random(7).randbytes(CLUSTER)  # noqa: S311
        deflate = zlib.compressobj(0, zlib.DEFLATED, -12)
        stored = deflate.compress(content) + deflate.flush()
        self.assertGreater(len(stored), CLUSTER)
        data = bytearray(made(entry=1 << 62 | (len(stored) // 512) << 54 | 6 * CLUSTER))
        disk = Qcow2(Disk(patched(bytes(data) + stored, 104, b"\1")))
        self.assertEqual(disk.read(0, CLUSTER), content)

    def test_a_compressed_cluster_that_is_none_or_too_short_is_corrupt(self) -> None:
        deflate = zlib.compressobj(9, zlib.DEFLATED, -12)
        short = deflate.compress(b"A") + deflate.flush()
        for content in (b"\xff" * 600, short):
            disk = Qcow2(Disk(made(content, entry=1 << 62 | 1 << 54 | 4 * CLUSTER)))
            self.assertIn("compressed cluster", str(self.assertRaises(BadDisk, disk.read, 0, 512)))

    @given(st.integers())
    @settings(max_examples=50)
    def test_nothing_but_bad_disk_comes_out_of_damaged_files(self, seed: int) -> None:
        chosen = random.Random(seed)  # noqa: S311
        data = bytearray(made(b"content"))
        for _ in range(chosen.randrange(1, 12)):
            at = chosen.choice([0, CLUSTER, 3 * CLUSTER]) + chosen.randrange(150)
            data[at] = chosen.randrange(256)
        with contextlib.suppress(BadDisk):
            disk = Qcow2(Disk(bytes(data)))
            disk.read(0, MIB)
            disk.read(max(disk.size - 512, 0), 512)


@needs_programs("qemu-img")
class ReadTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = Path(self.mktemp())
        chosen = random.Random(5)  # noqa: S311
        self.content = b"".join(
            (bytes(5000), chosen.randbytes(70000), bytes(200000), b"text " * 30000, chosen.randbytes(3))
        )

    def assert_reads(self, data: bytes, size: int = 64 * MIB) -> None:
        disk = Qcow2(Disk(data))
        self.assertEqual(disk.size, size)
        self.assertEqual(disk.read(0, len(self.content)), self.content)
        self.assertEqual(disk.read(66000, 9000), self.content[66000:75000])
        self.assertEqual(disk.read(len(self.content), 100000), bytes(100000))

    def test_what_qemu_writes_is_read(self) -> None:
        for options in (
            "compat=1.1",
            "compat=0.10",
            "cluster_size=512",
            "cluster_size=2M",
            "extended_l2=on,cluster_size=128k",
        ):
            self.assert_reads(builders.qcow2(self.path, self.content, options=options))

    def test_compressed_clusters_are_read(self) -> None:
        for kind in ("zlib", "zstd"):
            raw = Path(self.mktemp())
            raw.write_bytes(self.content.ljust(MIB, b"\0"))
            words = ["-c", "-f", "raw", "-O", "qcow2", "-o", f"compression_type={kind}"]
            subprocess.run(["qemu-img", "convert", *words, str(raw), str(self.path)], check=True)
            self.assert_reads(self.path.read_bytes(), MIB)

    def test_a_disk_with_snapshots_and_bitmaps_of_its_own_is_read(self) -> None:
        builders.qcow2(self.path, self.content)
        for words in (["snapshot", "-c", "before"], ["bitmap", "--add", "-f", "qcow2"]):
            last = ["changed"] if words[0] == "bitmap" else []
            subprocess.run(["qemu-img", *words, str(self.path), *last], check=True)
        self.assert_reads(self.path.read_bytes())
