# SPDX-License-Identifier: Apache-2.0
"""Layers that no builder makes: each is refused with a clear reason, or becomes an image."""

from __future__ import annotations

import gzip
import os
import random
import subprocess
import tarfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.images.erofs.limits import BadLayer, Limits
from infranetes_common.concurrency import deferred
from infranetes_common.errors import FailedPrecondition
from tests.harness.needs import needs_mounts, needs_programs, repetitions
from tests.infranetes.images.erofs.support import (
    Member,
    check,
    converted,
    digest,
    member,
    mounted,
    tar,
)
from tests.infranetes.images.erofs.test_build import BuildCase

SMALL = Limits(
    max_bytes=1 << 20, entries=200, depth=10, header_bytes=4096, xattr_bytes=2000, held_bytes=65536
)
LINK, SYM, DIR = tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE


def header(**fields: bytes) -> bytes:
    """Return a header with these raw fields and the right checksum. `at_N` is put at byte N."""
    block = bytearray(tar([member("name", content=b"")], tarfile.USTAR_FORMAT)[:512])
    for name, value in fields.items():
        at = int(name.removeprefix("at_"))
        block[at : at + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(records: bytes) -> bytes:
    """Return a raw PAX header, and an entry after it."""
    size = b"%011o\0" % len(records)
    return header(at_124=size, at_156=b"x") + records + bytes(-len(records) % 512) + header()


class HostileCase(SynchronousTestCase):
    def refusal(self, data: bytes, limits: Limits = SMALL) -> str:
        """Return why it is refused."""
        try:
            converted(data, Path(self.mktemp()), limits)
        except BadLayer as e:
            return str(e)
        return "it is not refused"

    def refused(self, why: str, *members: Member, limits: Limits = SMALL) -> None:
        self.assertIn(why, self.refusal(tar(members), limits))


class EntryTests(HostileCase):
    def test_paths_that_lead_out_are_refused(self) -> None:
        for path in ("../x", "a/../../x", "a/..", "..", "/../x"):
            self.refused(f"its entry '{path}' can't be made: there is .. in '{path}'", member(path))

    @needs_mounts
    def test_an_absolute_path_begins_at_the_image_s_root(self) -> None:
        image = Path(self.mktemp()).absolute()
        converted(tar([member("/etc//./name", content=b"x")]), image)
        with mounted(image) as at:
            self.assertEqual((at / "etc" / "name").read_bytes(), b"x")

    @needs_programs("fsck.erofs")
    @needs_mounts
    def test_symbolic_links_in_a_path_lead_nowhere_but_through_the_image(self) -> None:
        image = Path(self.mktemp()).absolute()
        links = (
            member("up", SYM, linkname="../../.."),
            member("abs", SYM, linkname="/real"),
            member("chain", SYM, linkname="./up/abs/sub"),
        )
        files = (member("up/a", content=b"a"), member("abs/b", content=b"b"), member("chain/c", content=b"c"))
        converted(tar([*links, *files]), image)
        check(image)
        with mounted(image) as at:
            self.assertEqual((at / "a").read_bytes(), b"a")
            self.assertEqual((at / "real" / "b").read_bytes(), b"b")
            self.assertEqual((at / "real" / "sub" / "c").read_bytes(), b"c")

    def test_symbolic_links_in_a_circle_are_refused(self) -> None:
        self.refused(
            "too many symbolic links",
            member("a", SYM, linkname="b"),
            member("b", SYM, linkname="a"),
            member("a/x"),
        )

    def test_hard_links_lead_to_files_of_this_layer(self) -> None:
        for target in ("missing", "later", "gone", "d/missing", "up/missing"):
            members = (
                member("up", SYM, linkname="/"),
                member(".wh.gone"),
                member("l", LINK, linkname=target),
                member("later"),
            )
            self.refused(f"'{target}', which is not in this layer", *members)
        for target in ("d", ".", "/"):
            self.refused("which is a directory", member("d", DIR), member("l", LINK, linkname=target))
        self.refused("there is .. in", member("l", LINK, linkname="../x"))

    def test_what_is_below_a_file_is_refused(self) -> None:
        self.refused("'file' in its path is no directory", member("file"), member("file/x"))
        self.refused("no directory", member(".wh.d"), member(".wh.d/x"))

    def test_names_that_no_file_can_have_are_refused(self) -> None:
        self.refused("over 255 bytes", member("n" * 256))
        self.refused("over 255 bytes", member("n" * 256 + "/x"))
        self.refused("over 4095 bytes", member("/".join(["n" * 200] * 30)), limits=Limits())
        self.refused("directories deep", member("/".join("n" * 11)))
        for root in ("", "./", "/", "d/"):  # no whiteout of a directory's own names, or of the root
            for name in (".wh.", ".wh..", ".wh..."):
                self.refused("removes a file whose name", member(root + name))
        self.refused("the root is a directory", member("."))
        self.assertIn("zero byte", self.refusal(pax(b"12 path=a\0b\n")))

    @needs_programs("fsck.erofs")
    @needs_mounts
    def test_the_last_of_equal_names_is_there(self) -> None:
        image = Path(self.mktemp()).absolute()
        members = (
            *(member("f", content=b"first"), member("f", content=b"second" * 1000)),
            *(member("d/x"), member("d", content=b"no directory any more")),
            *(member("e", mode=0o600), member("e/", DIR), member("e/y"), member("e/", DIR, mode=0o700)),
            *(
                member("one", content=b"1"),
                member("two", LINK, linkname="one"),
                member("one", content=b"new"),
            ),
        )
        converted(tar(members), image)
        check(image)
        with mounted(image) as at:
            self.assertEqual((at / "f").read_bytes(), b"second" * 1000)
            self.assertEqual((at / "d").read_bytes(), b"no directory any more")
            self.assertEqual(((at / "e").stat().st_mode, os.listdir(at / "e")), (0o040700, ["y"]))
            self.assertEqual([(at / n).read_bytes() for n in ("one", "two")], [b"new", b"1"])
            self.assertEqual([(at / n).stat().st_nlink for n in ("one", "two")], [1, 1])

    def test_what_is_not_known_is_refused(self) -> None:
        self.assertIn("of an unknown type 'Z'", self.refusal(header(at_156=b"Z")))


class NumberTests(HostileCase):
    def test_sizes_that_can_t_be_are_refused(self) -> None:
        self.assertIn("-1 bytes", self.refusal(header(at_124=b"\xff" * 12)))
        self.assertIn("bytes; the limit is", self.refusal(header(at_124=b"\x80" + b"\x7f" * 11)))
        self.assertIn("bytes; the limit is", self.refusal(header(at_124=b"7" * 12)))
        self.assertIn("malformed size: '0x10", self.refusal(header(at_124=b"0x10")))
        self.assertIn("malformed size: '-5'", self.refusal(pax(b"11 size=-5\n")))
        self.assertIn("bytes; the limit is", self.refusal(pax(b"28 size=9999999999999999999\n")))
        self.assertIn("header of -1 bytes", self.refusal(header(at_124=b"\xff" * 12, at_156=b"x")))
        self.assertIn("header of 4097 bytes", self.refusal(header(at_124=b"%011o\0" % 4097, at_156=b"x")))
        self.assertIn("header of 5000 bytes", self.refusal(header(at_124=b"%011o\0" % 5000, at_156=b"L")))

    def test_owners_times_and_devices_that_can_t_be_are_refused(self) -> None:
        self.assertIn("user 4294967295", self.refusal(pax(b"18 uid=4294967295\n")))
        self.assertIn("user -1 ", self.refusal(header(at_108=b"\xff" * 8)))
        self.assertIn("time is out of range", self.refusal(header(at_136=b"\x80\x7f" + b"\0" * 10)))
        self.assertIn("malformed time", self.refusal(pax(b"13 mtime=1e9\n")))
        self.assertIn("device 4096:0", self.refusal(header(at_156=b"3", at_329=b"0010000\0")))

    def test_malformed_pax_headers_are_refused(self) -> None:
        cases = (
            "x",
            "5",
            "99 a=b\n",
            "0 a=b\n",
            "6 a=b\0",
            "6 =ab\n",
            "5 ab\n",
            "-6 a=b\n",
            "3 \n",
            "9" * 30 + " a=b\n",
        )
        for records in map(str.encode, cases):
            self.assertIn("malformed PAX header", self.refusal(pax(records)), records)

    def test_a_tar_that_ends_early_is_refused(self) -> None:
        whole = tar([member("a", content=b"x" * 600), member("b", content=b"y" * 5000)])
        for length in (1, 511, 513, 1000, 1023, 1100, 1600, 3000, 5000):
            self.assertIn("cut off", self.refusal(whole[:length]))


class BoundTests(HostileCase):
    def test_more_than_the_limits_is_refused(self) -> None:
        self.refused("over 200 files", *(member(f"f{i}") for i in range(201)))
        self.assertIn("more than 400 headers", self.refusal(header(at_156=b"x") * 401))
        self.refused("images.max_layer_bytes", *(member(f"f{i}", content=bytes(300000)) for i in range(4)))
        self.refused("have over 2000 bytes", member("f", xattrs={"user.a": b"x" * 2000}))
        self.refused(
            "links and attributes", *(member(f"f{i}", xattrs={"user.a": b"x" * 1900}) for i in range(50))
        )


class SparseTests(HostileCase):
    def with_map(self, numbers: bytes, stored: int = 512) -> str:
        """Return why a sparse file with this map is refused."""
        records = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n28 GNU.sparse.realsize=4096\n"
        whole = pax(records)[:-512] + header(at_124=b"%011o\0" % (512 + stored))
        return self.refusal(whole + numbers.ljust(512, b"\0") + bytes(stored))

    @needs_programs("fsck.erofs")
    @needs_mounts
    def test_what_gnu_tar_writes_is_read_in_each_form(self) -> None:
        directory = Path(self.mktemp()).absolute()
        directory.mkdir()
        with open(directory / "holes", "wb") as file:
            for i in range(40):  # more than one header holds
                file.seek(i * 65536 + 4096)
                file.write(bytes([i + 1]) * 5000)
            file.truncate(50 * 65536)
        (directory / "hole").touch()
        os.truncate(directory / "hole", 1 << 20)
        for form in ("--format=gnu", "--format=pax", "--sparse-version=0.1", "--sparse-version=1.0"):
            command = ["tar", "--create", "--sparse", form, f"--directory={directory}", "holes", "hole"]
            data = subprocess.run(command, check=True, capture_output=True).stdout
            self.assertLess(len(data), 500000)
            image = Path(self.mktemp()).absolute()
            converted(data, image)
            check(image)
            with mounted(image) as at:
                for name in ("holes", "hole"):
                    self.assertEqual((at / name).read_bytes(), (directory / name).read_bytes(), form)

    def test_malformed_maps_are_refused(self) -> None:
        for numbers in (
            *(b"", b"x\n", b"-1\n", b"1\n0\n", b"1\n0\n512", b"1\n0\n511\n", b"1\n3585\n512\n"),
            *(b"2\n256\n256\n0\n256\n", b"2\n0\n256\n255\n256\n", b"99999999999\n", b"9" * 512),
        ):
            said = self.with_map(numbers)
            self.assertTrue("malformed map" in said or "cut off" in said, (numbers, said))
        self.assertIn(
            "obsolete format", self.refusal(pax(b"22 GNU.sparse.major=2\n28 GNU.sparse.realsize=4096\n"))
        )
        self.assertIn("malformed map", self.refusal(header(at_156=b"S", at_386=b"z")))
        self.assertIn(
            "malformed map", self.refusal(header(at_156=b"S", at_386=b"\x80" * 12, at_398=b"7" * 11))
        )

    def test_holes_are_bounded(self) -> None:
        huge = header(at_156=b"S", at_483=b"%011o\0" % (1 << 30))
        self.assertIn("1073741824 bytes; the limit is", self.refusal(huge))
        self.assertIn("holes of over 1000 bytes", self.refusal(huge, Limits(hole_bytes=1000)))


@needs_programs("fsck.erofs")
class FuzzTests(HostileCase):
    SPARSE = header(
        at_156=b"S", at_124=b"%011o\0" % 512, at_386=b"%011o\0%011o\0" % (512, 512), at_483=b"%011o\0" % 2048
    )
    WHOLE = (
        SPARSE
        + b"s" * 512
        + tar(
            [
                member("d", DIR, mode=0o700, xattrs={"user.a": b"b"}),
                member("d/" + "f" * 120, content=b"content" * 300),
                member("d/l", LINK, linkname="d/" + "f" * 120),
                member("s", SYM, linkname="t" * 150),
                member("d/.wh.gone"),
                member("c", tarfile.CHRTYPE, devmajor=1, devminor=3),
                member("e/.wh..wh..opq"),
            ]
        )
    )

    def ends_well(self, data: bytes) -> None:
        """Check that it is refused with a message, or that the image is consistent."""
        image = Path(self.mktemp()).absolute()
        try:
            converted(data, image, SMALL)
        except BadLayer as e:
            self.assertLess(len(str(e)), 1200)
            self.assertTrue(str(e).isprintable(), str(e))
        else:
            check(image)
        image.unlink()

    @settings(max_examples=repetitions(30, 200), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=3000))
    def test_any_bytes(self, data: bytes) -> None:
        self.ends_well(data)

    def test_any_change_of_a_tar(self) -> None:
        for seed in range(600):
            chance, data = random.Random(seed), bytearray(self.WHOLE)  # noqa: S311
            for _ in range(chance.randint(1, 4)):
                block = chance.randrange(len(data) // 512) * 512
                at = block + chance.randrange(512)
                data[at] = chance.choice((0, 0x20, 0x2F, 0x30, 0x37, 0x80, 0xFF, chance.randrange(256)))
                if chance.random() < 0.9:  # then not the checksum alone is wrong
                    data[block + 148 : block + 156] = b" " * 8
                    data[block + 148 : block + 156] = b"%06o\0 " % sum(data[block : block + 512])
            self.ends_well(bytes(data))

    def test_any_number_of_inodes(self) -> None:
        """With the last inode ending anywhere in a block."""
        for count in range(1, 130):
            self.ends_well(tar([member(f"{n}", content=b"") for n in range(count)]))

    @needs_mounts
    @settings(max_examples=repetitions(20, 60), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def test_any_tree(self, data: st.DataObject) -> None:
        """The image has what tarfile finds in the tar."""
        names = st.text("ab.\udc80-", min_size=1, max_size=3).filter(lambda n: n not in (".", ".."))
        paths = st.lists(names, min_size=1, max_size=3).map("/".join)
        expected: dict[str, bytes | None] = {}
        members = []
        for path in data.draw(st.lists(paths, max_size=30, unique=True)):
            parents = ["/".join(path.split("/")[:i]) for i in range(1, path.count("/") + 1)]
            if any(expected.get(parent, b"") is not None for parent in parents if parent in expected):
                continue
            if path in expected:
                continue
            expected |= dict.fromkeys(parents)
            content = data.draw(st.none() | st.binary(max_size=5000))
            expected[path] = content
            members.append(member(path, DIR if content is None else b"0", content or b""))
        image = Path(self.mktemp()).absolute()
        converted(tar(members), image)
        check(image)
        with mounted(image) as at:
            found = {
                str(path.relative_to(at)): None if path.is_dir() else path.read_bytes()
                for path in at.rglob("*")
            }
        self.assertEqual(found, expected)
        image.unlink()


class BombTests(BuildCase):
    """In the child, within the limits of its own."""

    async def outcome(self, data: bytes, diff_id: str, limits: Limits) -> str:
        return await self.refused(FailedPrecondition, self.build(data, "gzip", diff_id, limits))

    @deferred
    async def test_a_small_layer_that_unpacks_to_much_is_refused_before_it_has(self) -> None:
        bomb = gzip.compress(bytes(64 << 20), 9)
        said = await self.outcome(bomb, digest(b""), Limits(max_bytes=1 << 20))
        self.assertIn("unpacks to more than 1048576 bytes", said)

    @deferred
    async def test_a_layer_that_needs_too_much_memory_is_refused(self) -> None:
        large = tar([member(f"f{i}", xattrs={"user.large": b"x" * 60000}) for i in range(3000)])
        limits = Limits(memory_bytes=200 << 20)
        said = await self.outcome(gzip.compress(large, 1), digest(large), limits)
        self.assertIn("of memory", said)
