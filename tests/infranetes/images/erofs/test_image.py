# SPDX-License-Identifier: Apache-2.0
"""Images as Linux mounts them have everything that is in the tar."""

from __future__ import annotations

import os
import stat
import tarfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.images.erofs import writer
from tests.harness.needs import needs_mounts, needs_programs
from tests.infranetes.images.erofs.support import (
    Member,
    check,
    converted,
    digest,
    member,
    mounted,
    shown,
    tar,
)

CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")  # net_bind_service=ep
ACL = bytes.fromhex(
    "02000000 01000600ffffffff 02000400e8030000 04000400ffffffff 10000400ffffffff 20000000ffffffff"
)


@needs_programs("fsck.erofs")
class ImageCase(SynchronousTestCase):
    def image(self, *members: Member, form: int = tarfile.PAX_FORMAT) -> Path:
        """Return the image of a tar, checked with fsck.erofs."""
        path = Path(self.mktemp()).absolute()
        converted(tar(members, form), path)
        check(path)
        return path


@needs_mounts
class MountTests(ImageCase):
    def test_files_of_all_sizes_have_their_content(self) -> None:
        sizes = (
            0,
            1,
            100,
            1023,
            1024,
            1025,
            3968,
            4031,
            4032,
            4033,
            4095,
            4096,
            4097,
            8192,
            1 << 20,
            3000001,
        )
        contents = {str(size): os.urandom(size) for size in sizes}
        image = self.image(*(member(f"d/{name}", content=data) for name, data in contents.items()))
        with mounted(image) as at:
            self.assertEqual({name: (at / "d" / name).read_bytes() for name in contents}, contents)

    def test_more_small_files_than_are_held_have_their_content(self) -> None:
        self.patch(writer, "SMALL_TOTAL", 20000)
        contents = {str(i): os.urandom(i) for i in range(500)}
        with mounted(self.image(*(member(name, content=data) for name, data in contents.items()))) as at:
            self.assertEqual({name: (at / name).read_bytes() for name in contents}, contents)

    def test_modes_owners_and_times_are_kept(self) -> None:
        image = self.image(
            member("suid", mode=0o6755, uid=1000, gid=4294967294, mtime=1700000000.123456789),
            member("tmp", tarfile.DIRTYPE, mode=0o1777, mtime=-5),
            member("late", mtime=1 << 40, mode=0),
        )
        with mounted(image) as at:
            suid, tmp, late = ((at / name).lstat() for name in ("suid", "tmp", "late"))
        self.assertEqual((suid.st_mode, suid.st_uid, suid.st_gid), (0o106755, 1000, 4294967294))
        self.assertEqual(suid.st_mtime_ns // 1000, 1700000000123456)
        self.assertEqual((tmp.st_mode, tmp.st_mtime), (0o041777, -5))
        self.assertEqual((late.st_mode, late.st_mtime), (0o100000, 1 << 40))

    def test_an_entry_for_the_root_describes_it_and_without_one_it_is_readable_for_all(self) -> None:
        with mounted(self.image(member("./", tarfile.DIRTYPE, mode=0o700, uid=7))) as at:
            self.assertEqual((at.stat().st_mode, at.stat().st_uid), (0o040700, 7))
        with mounted(self.image(member("a/b/c"))) as at:
            self.assertEqual([(at / p).stat().st_mode for p in ("", "a", "a/b")], [0o040755] * 3)

    def test_links_of_both_kinds_lead_where_they_should(self) -> None:
        image = self.image(
            member("a/one", content=b"data"),
            member("two", tarfile.LNKTYPE, linkname="a/one"),
            member("a/three", tarfile.LNKTYPE, linkname="./two"),
            member("soft", tarfile.SYMTYPE, linkname="a/one"),
            member("long", tarfile.SYMTYPE, linkname="x" * 4040),
            member("softer", tarfile.LNKTYPE, linkname="soft"),
        )
        with mounted(image) as at:
            self.assertEqual(
                {(at / p).stat().st_ino for p in ("a/one", "two", "a/three")}, {(at / "two").stat().st_ino}
            )
            self.assertEqual((at / "two").stat().st_nlink, 3)
            self.assertEqual((at / "soft").read_bytes(), b"data")
            self.assertEqual(os.readlink(at / "long"), "x" * 4040)
            self.assertEqual((os.readlink(at / "softer"), (at / "soft").lstat().st_nlink), ("a/one", 2))

    def test_devices_and_fifos_are_kept(self) -> None:
        image = self.image(
            member("null", tarfile.CHRTYPE, devmajor=1, devminor=3),
            member("disk", tarfile.BLKTYPE, devmajor=4095, devminor=1048575),
            member("fifo", tarfile.FIFOTYPE),
        )
        with mounted(image) as at:
            null, disk, fifo = ((at / name).lstat() for name in ("null", "disk", "fifo"))
        self.assertEqual((stat.S_IFMT(null.st_mode), null.st_rdev), (stat.S_IFCHR, os.makedev(1, 3)))
        self.assertEqual((stat.S_IFMT(disk.st_mode), disk.st_rdev), (stat.S_IFBLK, os.makedev(4095, 1048575)))
        self.assertTrue(stat.S_ISFIFO(fifo.st_mode))

    def test_extended_attributes_are_kept_large_ones_too(self) -> None:
        attributes = {
            "user.note": b"text",
            "user.empty": b"",
            "user.large": b"l" * 50000,
            "security.capability": CAPABILITY,
            "trusted.mine": b"t",
            "system.posix_acl_access": ACL,
        }
        image = self.image(
            member("f", content=b"c" * 500, xattrs=attributes),
            member("d", tarfile.DIRTYPE, xattrs={"user.d": b"x" * 3990}),
            member("d/inside", content=b"here"),
            member("l", tarfile.SYMTYPE, linkname="y" * 200, xattrs={"trusted.l": b"z" * 3900}),
        )
        with mounted(image) as at:
            self.assertEqual(shown(at / "f")["xattrs"], attributes)
            self.assertEqual((at / "f").read_bytes(), b"c" * 500)
            self.assertEqual(shown(at / "d")["xattrs"], {"user.d": b"x" * 3990})
            self.assertEqual((at / "d" / "inside").read_bytes(), b"here")
            self.assertEqual(os.readlink(at / "l"), "y" * 200)
            self.assertEqual(shown(at / "l")["xattrs"], {"trusted.l": b"z" * 3900})

    def test_attributes_that_mean_nothing_here_are_left_out(self) -> None:
        xattrs = {
            "com.apple.provenance": b"1",
            "trusted.overlay.redirect": b"/etc",
            "user.overlay.opaque": b"y",
        }
        with mounted(self.image(member("f", xattrs=xattrs))) as at:
            self.assertEqual(os.listxattr(at / "f"), [])

    def test_directories_of_many_names_list_and_find_them_all(self) -> None:
        names = [f"{i:05}-{'n' * (i % 200)}" for i in range(5000)] + ["x" * 255, "+", "-", "\udcff\udcfe"]
        image = self.image(
            *(member(f"many/{name}", content=name.encode("utf-8", "surrogateescape")) for name in names)
        )
        with mounted(image) as at:
            self.assertEqual(sorted(os.listdir(at / "many")), sorted(names))
            for name in names:
                self.assertEqual((at / "many" / name).read_bytes(), os.fsencode(name))

    def test_every_format_of_tar_is_read(self) -> None:
        long = "d" * 140 + "/" + "e" * 90
        for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
            names = [long] if form == tarfile.USTAR_FORMAT else [long, "/".join(["p" * 200] * 5)]
            links = [] if form == tarfile.USTAR_FORMAT else [member("l", tarfile.SYMTYPE, linkname="t" * 300)]
            image = self.image(*(member(name, content=b"x") for name in names), *links, form=form)
            with mounted(image) as at:
                self.assertTrue(all((at / name).read_bytes() == b"x" for name in names))
                self.assertTrue(all(os.readlink(at / "l") == "t" * 300 for _ in links))

    def test_a_directory_has_a_link_from_each_directory_in_it(self) -> None:
        with mounted(self.image(*(member(f"d/{i}", tarfile.DIRTYPE) for i in range(3)), member("d/f"))) as at:
            self.assertEqual([(at / p).stat().st_nlink for p in ("", "d", "d/0")], [3, 5, 2])


class SameBytesTests(ImageCase):
    def test_equal_tars_make_equal_images(self) -> None:
        members = [member(f"d{i % 7}/f{i}", content=bytes([i % 256]) * i) for i in range(3000)]
        first, second = (self.image(*members) for _ in range(2))
        self.assertEqual(first.read_bytes(), second.read_bytes())

    def test_the_bytes_stay_the_same_from_release_to_release(self) -> None:
        """Nodes identify layers' disks by their tars: if this has to change, change FORMAT in `disks`."""
        image = self.image(
            member("f", content=b"x" * 5000, mtime=1),
            member("s", tarfile.SYMTYPE, linkname="f", xattrs={"user.a": b"b"}),
        )
        self.assertEqual(len(image.read_bytes()), 4096 * 4)
        self.assertEqual(
            digest(image.read_bytes()),
            "sha256:06f44c8a21e3bf05d5859bc16e3b068890a6a4b4c16124df281c6517a4ef34c3",
        )
