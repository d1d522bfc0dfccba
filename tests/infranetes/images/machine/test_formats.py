# SPDX-License-Identifier: Apache-2.0
"""Disks' formats, told by their bytes and by what is said of them."""

from __future__ import annotations

import gzip
import lzma

import zstandard
from twisted.trial.unittest import SynchronousTestCase

from infranetes.images.machine.disk import DiskFormat
from infranetes.images.machine.formats import compression_of, format_of, format_said
from infranetes.images.machine.limits import BadDisk
from tests.infranetes.images.machine import builders


class FormatTests(SynchronousTestCase):
    def test_a_disk_is_what_its_bytes_say(self) -> None:
        for head, kind in (
            (b"QFI\xfb" + bytes(600), DiskFormat.QCOW2),
            (builders.iso(), DiskFormat.ISO),
            (builders.mbr(), DiskFormat.RAW),
            (bytes(40000), DiskFormat.RAW),
            (b"", DiskFormat.RAW),
        ):
            self.assertEqual(format_of(head, None), kind)

    def test_a_raw_disk_is_raw_although_a_guest_wrote_the_mark_of_qcow2_into_it(self) -> None:
        self.assertEqual(format_of(b"QFI\xfb" + bytes(600), DiskFormat.RAW), DiskFormat.RAW)
        self.assertEqual(format_of(builders.iso(), DiskFormat.RAW), DiskFormat.RAW)

    def test_what_is_said_and_is_not_so_is_refused(self) -> None:
        for said in (DiskFormat.QCOW2, DiskFormat.ISO):
            error = self.assertRaises(BadDisk, format_of, bytes(40000), said)
            self.assertIn(f"said to be {said.value}", str(error))

    def test_formats_of_others_are_refused_with_the_command_that_converts_them(self) -> None:
        for head, name in (
            (b"KDMV" + bytes(600), "vmdk"),
            (b"# Disk DescriptorFile\n", "vmdk"),
            (b"vhdxfile" + bytes(600), "vhdx"),
            (b"conectix" + bytes(600), "vpc"),
            (bytes(0x40) + b"\x7f\x10\xda\xbe", "vdi"),
            (b"QED\0" + bytes(600), "qed"),
        ):
            error = self.assertRaises(BadDisk, format_of, head, None)
            self.assertIn(f"qemu-img convert -f {name} -O qcow2", str(error))

    def test_a_tar_and_what_is_compressed_twice_are_no_disks(self) -> None:
        tar = bytes(257) + b"ustar\0" + bytes(300)
        self.assertIn("tar", str(self.assertRaises(BadDisk, format_of, tar, None)))
        self.assertIn("twice", str(self.assertRaises(BadDisk, format_of, gzip.compress(b"x"), None)))

    def test_names_say_a_format_and_img_says_none(self) -> None:
        for name, said in (
            ("a.qcow2", DiskFormat.QCOW2),
            ("A.RAW.gz", DiskFormat.RAW),
            ("a.iso.xz", DiskFormat.ISO),
            ("a.img", None),
            ("disk", None),
            ("a.qcow2.zst", DiskFormat.QCOW2),
        ):
            self.assertEqual(format_said(name), said, name)

    def test_compressions_are_told_by_their_marks(self) -> None:
        for data, compression in (
            (gzip.compress(b"x"), "gzip"),
            (lzma.compress(b"x"), "xz"),
            (zstandard.ZstdCompressor().compress(b"x"), "zstd"),
            (b"QFI\xfb", ""),
            (b"", ""),
        ):
            self.assertEqual(compression_of(data), compression)
