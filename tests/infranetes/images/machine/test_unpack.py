# SPDX-License-Identifier: Apache-2.0
"""The one disk in an image's layers: what hides what, and what is no disk."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import os
import tarfile

import attrs
import zstandard
from twisted.trial.unittest import SynchronousTestCase

from infranetes.images.machine.limits import BadDisk, DiskLimits
from infranetes.images.machine.unpack import TarLayer, Unpacked, from_file, from_layers
from tests.support.oci import layer

MIB = 1 << 20
DISK = b"a disk" + bytes(200_000) + b"its end"
LIMITS = DiskLimits()


class UnpackCase(SynchronousTestCase):
    def file(self, data: bytes = b"") -> int:
        descriptor = os.memfd_create("test")
        self.addCleanup(os.close, descriptor)
        os.write(descriptor, data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def unpack(self, *layers: bytes, limits: DiskLimits = LIMITS) -> tuple[Unpacked, bytes]:
        """Return what was found in uncompressed layers, lowest first, and what was written."""
        target = self.file()
        found = from_layers([TarLayer(self.file(each), "") for each in layers], target, limits)
        return found, os.pread(target, 1 << 30, 0)

    def refused(self, *layers: bytes, limits: DiskLimits = LIMITS) -> str:
        return str(self.assertRaises(BadDisk, self.unpack, *layers, limits=limits))


class LayersTests(UnpackCase):
    def test_the_file_in_disk_is_the_disk(self) -> None:
        for name in ("disk/a.img", "./disk/a.img", "/disk//a.img"):
            found, written = self.unpack(layer({"etc/passwd": b"x", name: DISK, "disk2/b.img": b"no"}))
            self.assertEqual(written, DISK)
            self.assertEqual(found, Unpacked("a.img", "sha256:" + hashlib.sha256(DISK).hexdigest()))

    def test_layers_may_be_compressed(self) -> None:
        tar = layer({"disk/a.img": DISK})
        for compression, data in (
            ("gzip", gzip.compress(tar)),
            ("zstd", zstandard.ZstdCompressor().compress(tar)),
        ):
            target = self.file()
            from_layers([TarLayer(self.file(data), compression)], target, LIMITS)
            self.assertEqual(os.pread(target, MIB, 0), DISK)

    def test_a_disk_may_be_compressed_and_its_digest_is_that_of_the_images_file(self) -> None:
        for suffix, data in (
            (".gz", gzip.compress(DISK)),
            (".xz", lzma.compress(DISK)),
            (".zst", zstandard.ZstdCompressor().compress(DISK)),
            ("", gzip.compress(DISK)),
        ):
            found, written = self.unpack(layer({f"disk/a.img{suffix}": data}))
            self.assertEqual(written, DISK, suffix)
            self.assertEqual(found.digest, "sha256:" + hashlib.sha256(data).hexdigest())

    def test_a_higher_layer_replaces_the_disk(self) -> None:
        _, written = self.unpack(layer({"disk/a.img": b"old"}), layer({"disk/a.img": DISK}))
        self.assertEqual(written, DISK)

    def test_within_a_layer_the_last_of_one_name_counts(self) -> None:
        first, second = layer({"disk/a.img": DISK * 2}), layer({"disk/a.img": DISK})
        tar = _without_end(first) + second
        self.assertEqual(self.unpack(tar)[1], DISK)

    def test_whiteouts_hide_what_is_below_and_not_what_is_beside_them(self) -> None:
        below = layer({"disk/old.img": b"old"})
        for hiding in (
            {"disk/.wh.old.img": b""},
            {"disk/.wh..wh..opq": b""},
            {".wh.disk": b""},
            {".wh..wh..opq": b""},
        ):
            above = layer({**hiding, "disk/new.img": DISK})
            found, written = self.unpack(below, above)
            self.assertEqual((found.name, written), ("new.img", DISK), hiding)
            self.assertIn("no disk", self.refused(below, layer(dict(hiding))))

    def test_a_directory_hides_a_file_of_its_name(self) -> None:
        above = layer({"disk/old.img": ("dir", "755"), "disk/new.img": DISK})
        self.assertEqual(self.unpack(layer({"disk/old.img": b"old"}), above)[0].name, "new.img")

    def test_two_disks_are_refused_by_name_in_one_layer_and_in_two(self) -> None:
        for layers in (
            [layer({"disk/a.img": DISK, "disk/b.img": DISK})],
            [layer({"disk/a.img": DISK}), layer({"disk/b.img": DISK})],
        ):
            words = self.refused(*layers)
            self.assertIn("'a.img'", words)
            self.assertIn("'b.img'", words)
            self.assertIn("leave one", words)

    def test_an_image_without_a_disk_is_told_what_one_needs(self) -> None:
        for files in ({}, {"etc/passwd": b"x"}, {"a.img": DISK}, {"disk/sub/a.img": DISK}):
            self.assertIn("exactly one file in /disk", self.refused(layer(dict(files))))

    def test_links_and_files_in_the_place_of_the_directory_are_refused(self) -> None:
        self.assertIn("link or device", self.refused(layer({"disk/a.img": ("link", "/etc/shadow")})))
        self.assertIn("link or device", self.refused(layer({"disk/a.img": ("hard", "etc/a.img")})))
        self.assertIn("no directory", self.refused(layer({"disk": DISK})))
        self.assertIn("no directory", self.refused(layer({"disk": ("link", "images")})))

    def test_what_a_higher_layer_put_in_the_place_of_a_link_counts(self) -> None:
        _, written = self.unpack(layer({"disk": ("link", "x")}), layer({"disk/a.img": DISK}))
        self.assertEqual(written, DISK)

    def test_a_layer_that_is_no_tar_or_cut_off_is_refused(self) -> None:
        tar = layer({"disk/a.img": DISK})
        for data in (b"no tar" * 200, tar[:100_000]):
            self.assertIn("one of its layers can't be read", self.refused(data))

    def test_sparse_files_of_tars_keep_their_holes(self) -> None:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            member = tarfile.TarInfo("disk/a.img")
            member.size = 512
            member.pax_headers = {
                "GNU.sparse.size": str(64 * MIB),
                "GNU.sparse.numblocks": "1",
                "GNU.sparse.map": f"{32 * MIB},512",
                "GNU.sparse.major": "0",
                "GNU.sparse.minor": "1",
            }
            tar.addfile(member, io.BytesIO(b"x" * 512))
        target = self.file()
        from_layers([TarLayer(self.file(out.getvalue()), "")], target, LIMITS)
        status = os.fstat(target)
        self.assertEqual(status.st_size, 64 * MIB)
        self.assertLess(status.st_blocks * 512, MIB)
        self.assertEqual(os.pread(target, 513, 32 * MIB), b"x" * 512 + b"\0")


class FileTests(UnpackCase):
    def written(self, data: bytes, limits: DiskLimits = LIMITS) -> int:
        target = self.file()
        from_file(self.file(data), target, limits)
        return target

    def test_zeros_become_holes(self) -> None:
        content = b"begin" + bytes(8 * MIB) + b"middle" + bytes(3 * MIB + 77)
        for data in (content, gzip.compress(content)):
            target = self.written(data)
            self.assertEqual(os.pread(target, 1 << 30, 0), content)
            self.assertLess(os.fstat(target).st_blocks * 512, MIB)

    def test_a_file_that_is_only_zeros_or_empty_keeps_its_length(self) -> None:
        for size in (0, 3, MIB):
            self.assertEqual(os.fstat(self.written(bytes(size))).st_size, size)

    def test_more_data_than_may_be_stored_is_refused(self) -> None:
        limits = attrs.evolve(LIMITS, stored_bytes=MIB)
        for data in (b"x" * (2 * MIB), gzip.compress(b"x" * (2 * MIB))):
            error = self.assertRaises(BadDisk, self.written, data, limits)
            self.assertIn("images.max_layer_bytes", str(error))
        self.written(b"x" * MIB + bytes(MIB), limits)

    def test_a_bomb_of_zeros_is_refused_at_the_length_that_a_disk_may_have(self) -> None:
        limits = attrs.evolve(LIMITS, virtual_bytes=4 * MIB)
        error = self.assertRaises(BadDisk, self.written, gzip.compress(bytes(8 * MIB)), limits)
        self.assertIn("images.max_disk_bytes", str(error))

    def test_what_is_cut_off_is_refused(self) -> None:
        data = gzip.compress(DISK)
        self.assertIn("cut off", str(self.assertRaises(BadDisk, self.written, data[:-9])))


def _without_end(tar: bytes) -> bytes:
    """Return a tar without the zeros at its end, so that another may follow."""
    return tar.rstrip(b"\0").ljust(-(-len(tar.rstrip(b"\0")) // 512) * 512, b"\0")
