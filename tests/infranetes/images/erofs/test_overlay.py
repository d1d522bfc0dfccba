# SPDX-License-Identifier: Apache-2.0
"""Layers under overlayfs: what a layer removes is removed."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.images.erofs.limits import BadLayer, Incomplete, Limits
from tests.harness.needs import needs_mounts, needs_programs
from tests.infranetes.images.erofs.support import Member, check, converted, member, overlaid, shown, tar

DIR, LINK = tarfile.DIRTYPE, tarfile.LNKTYPE
BASE = (
    member("kept/file", content=b"base"),
    member("d/one", content=b"base"),
    member("d/two", content=b"base"),
    member("d/sub/deep", content=b"base"),
    member("gone", content=b"base"),
    member("link", tarfile.SYMTYPE, linkname="kept"),
)


@needs_mounts
@needs_programs("fsck.erofs")
class OverlayTests(SynchronousTestCase):
    def merged(self, *layers: tuple[Member, ...]) -> dict[str, bytes]:
        """Return all files of the merged layers, by path."""
        images = [Path(self.mktemp()).absolute() for _ in layers]
        for image, members in zip(images, layers, strict=True):
            converted(tar(members), image)
            check(image)
        with overlaid(images) as at:
            files = [Path(parent, name) for parent, _, names in os.walk(at) for name in names]
            return {str(path.relative_to(at)): path.read_bytes() for path in files if path.is_file()}

    def test_a_whiteout_removes_a_file_or_a_directory(self) -> None:
        found = self.merged(BASE, (member(".wh.gone"), member("d/.wh.sub"), member("d/.wh.one")))
        self.assertEqual(found, {"kept/file": b"base", "d/two": b"base"})

    def test_an_opaque_directory_shows_only_its_own(self) -> None:
        for upper in (
            (member("d", DIR), member("d/.wh..wh..opq"), member("d/new", content=b"new")),
            (member("d/new", content=b"new"), member("d/.wh..wh..opq"), member("d", DIR)),
            (member("d", DIR, xattrs={"trusted.overlay.opaque": b"y"}), member("d/new", content=b"new")),
            (member(".wh.d"), member("d", DIR), member("d/new", content=b"new")),
            (member("d", DIR), member("d/new", content=b"new"), member(".wh.d")),
            (member(".wh.d"), member("d/new", content=b"new")),
        ):
            found = self.merged(BASE, upper)
            self.assertEqual(found, {"kept/file": b"base", "gone": b"base", "d/new": b"new"})

    def test_a_file_of_this_layer_outlives_its_own_whiteout_in_any_order(self) -> None:
        new = member("gone", content=b"new")
        for upper in ((member(".wh.gone"), new), (new, member(".wh.gone"))):
            self.assertEqual(self.merged(BASE, upper)["gone"], b"new")

    def test_the_upper_layer_wins_and_a_third_brings_back(self) -> None:
        found = self.merged(
            BASE,
            (member("d/one", content=b"upper"), member(".wh.gone"), member("d/.wh.sub")),
            (member("gone", content=b"back"), member("d/sub/other", content=b"back")),
        )
        self.assertEqual(
            found,
            {
                "kept/file": b"base",
                "d/one": b"upper",
                "d/two": b"base",
                "d/sub/other": b"back",
                "gone": b"back",
            },
        )

    def test_what_aufs_kept_for_itself_is_not_there(self) -> None:
        aufs = (member(".wh..wh.aufs"), member(".wh..wh.plnk", DIR), member(".wh..wh.orph/a", content=b""))
        found = self.merged(BASE, (*aufs, member("new", content=b"new")))
        self.assertEqual(set(found), {"kept/file", "d/one", "d/two", "d/sub/deep", "gone", "new"})


class UpperCase(SynchronousTestCase):
    def image(self, members: Sequence[Member], below: Sequence[Path]) -> Path:
        image = Path(self.mktemp()).absolute()
        converted(tar(members), image, below=below)
        check(image)
        return image


@needs_mounts
@needs_programs("fsck.erofs")
class DirectoryTests(UpperCase):
    """Directories of the layers below for which a layer has files, but no entries."""

    BASE = (
        member("tmp", DIR, mode=0o1777),
        member("home", DIR, mode=0o750, uid=7, gid=8, mtime=12, xattrs={"user.a": b"b"}),
        member("home/own", DIR, mode=0o700, uid=9),
        member("usr/lib", DIR, mode=0o711),
        member("lib", tarfile.SYMTYPE, linkname="usr/lib"),
        member("gone", DIR, mode=0o700),
        member("file"),
    )

    def attributes(self, *layers: Sequence[Member]) -> dict[str, tuple[int, int, int]]:
        """Return mode, user and group of the merged layers' directories."""
        images: list[Path] = []
        for members in layers:
            images.append(self.image(members, images))
        with overlaid(images) as at:
            directories = [path for path in at.rglob("*") if path.is_dir() and not path.is_symlink()]
            found = {str(path.relative_to(at)): path.stat() for path in directories}
            self.attribute = [path for path in directories if "user.a" in os.listxattr(path)]
        return {name: (entry.st_mode & 0o7777, entry.st_uid, entry.st_gid) for name, entry in found.items()}

    def test_they_are_as_they_were(self) -> None:
        upper = (member("tmp/a"), member("home/own/b"), member("new/deep/c"), member("usr/lib/.wh.x"))
        found = self.attributes(self.BASE, upper, (member("./home/d"),))
        self.assertEqual(found["tmp"], (0o1777, 0, 0))
        self.assertEqual((found["home"], found["home/own"]), ((0o750, 7, 8), (0o700, 9, 0)))
        self.assertEqual((found["usr"], found["usr/lib"]), ((0o755, 0, 0), (0o711, 0, 0)))
        self.assertEqual((found["new"], found["new/deep"]), ((0o755, 0, 0), (0o755, 0, 0)))
        self.assertEqual([path.name for path in self.attribute], ["home"])

    def test_an_entry_before_or_after_the_file_counts(self) -> None:
        entry = member("tmp", DIR, mode=0o711)
        for upper in ((entry, member("tmp/a")), (member("tmp/a"), entry)):
            self.assertEqual(self.attributes(self.BASE, upper)["tmp"], (0o711, 0, 0))

    def test_those_that_are_hidden_or_no_directories_are_new(self) -> None:
        for upper in (
            (member(".wh.gone"), member("gone/a")),
            (member("gone/a"), member(".wh.gone")),
        ):
            self.assertEqual(self.attributes(self.BASE, upper)["gone"], (0o755, 0, 0))
        upper = (member("home/.wh..wh..opq"), member("home/own/a"))
        found = self.attributes(self.BASE, upper)
        self.assertEqual((found["home"], found["home/own"]), ((0o750, 7, 8), (0o755, 0, 0)))
        found = self.attributes(self.BASE, (member(".wh.gone"),), (member("gone/a"), member("lib/a")))
        self.assertEqual((found["gone"], found["lib"]), ((0o755, 0, 0), (0o755, 0, 0)))
        self.assertEqual(self.attributes(self.BASE, (member("file/a"),))["file"], (0o755, 0, 0))

    def test_without_the_layers_below_they_are_not_guessed(self) -> None:
        with self.assertRaises(Incomplete) as caught:
            converted(tar([member("a/b/c")]), Path(self.mktemp()).absolute(), below=None)
        self.assertIn("the directory 'a' has no entry", str(caught.exception))


@needs_mounts
@needs_programs("fsck.erofs")
class LinkTests(UpperCase):
    """Hard links to files of the layers below."""

    BASE = (
        member("small", content=b"small", mode=0o4750, uid=7, gid=8, mtime=12, xattrs={"user.a": b"b"}),
        member("d/large", content=bytes(range(256)) * 40),
        member("d/holes", content=bytes(3 << 20) + b"end"),
        member("d/empty"),
        member("s", tarfile.SYMTYPE, linkname="d/large"),
        member("bin", tarfile.SYMTYPE, linkname="d/"),
        member("many/up", tarfile.SYMTYPE, linkname="/./d/../many"),
        member("fifo", tarfile.FIFOTYPE),
        member("null", tarfile.CHRTYPE, devmajor=1, devminor=3),
        member("gone", content=b"gone"),
        *(member(f"many/{index:04d}", content=b"%d" % index) for index in range(700)),
    )

    def test_they_are_what_they_lead_to(self) -> None:
        images = [self.image(self.BASE, ())]
        second = (
            member("d/second", content=b"second"),
            member(".wh.gone"),
            member("s2", LINK, linkname="s"),
        )
        images.append(self.image(second, images))
        targets = (
            "small",
            "d/large",
            "d/holes",
            "d/empty",
            "s",
            "bin/large",
            "fifo",
            "null",
            "s2",
            "d/second",
        )
        upper = [
            member(f"links/{index}", LINK, linkname=target)
            for index, target in enumerate((*targets, *(f"many/{n}" for n in ("0000", "up/up/0350", "0699"))))
        ]
        upper += [member("again", LINK, linkname="small"), member("own", LINK, linkname="links/0")]
        images.append(self.image(upper, images))
        with overlaid(images) as at:
            for index, target in enumerate(targets):
                found, wanted = shown(at / f"links/{index}"), shown(at / target)
                for one in (found, wanted):
                    del one["links"]
                self.assertEqual(found, wanted, target)
            several = [(at / f"links/{index}").read_bytes() for index in (10, 11, 12)]
            self.assertEqual(several, [b"0", b"350", b"699"])
            self.assertTrue((at / "own").samefile(at / "again"))
            self.assertEqual((at / "own").stat().st_nlink, 3)
        self.assertLess(images[2].stat().st_blocks * 512, 1 << 20)  # holes stay holes

    def refused(
        self, words: str, *members: Member, below: Sequence[Path], limits: Limits | None = None
    ) -> None:
        with self.assertRaises(BadLayer) as caught:
            converted(tar(members), Path(self.mktemp()).absolute(), limits, below)
        self.assertIn(words, str(caught.exception))

    def test_those_to_what_is_not_seen_are_refused(self) -> None:
        circle = (member("a", tarfile.SYMTYPE, linkname="b"), member("b", tarfile.SYMTYPE, linkname="a"))
        below = [
            self.image((*self.BASE, *circle), ()),
        ]
        below.append(self.image((member(".wh.gone"), member("new", DIR)), below[:1]))
        for target in ("missing", "gone", "new/x", "d/missing", "fifo/x", "../../etc/passwd/x"):
            words = "there is .." if ".." in target else "or in those below"
            self.refused(words, member("l", LINK, linkname=target), below=below)
        self.refused("which is a directory", member("l", LINK, linkname="d"), below=below)
        self.refused("too many symbolic links", member("l", LINK, linkname="a/x"), below=below)
        for hidden in (member(".wh.d"), member("d/.wh..wh..opq"), member("d"), member("d/.wh.large")):
            self.refused("not in this layer", hidden, member("l", LINK, linkname="d/large"), below=below)
        few = Limits(hole_bytes=1000)
        self.refused("holes of over", member("l", LINK, linkname="d/large"), below=below, limits=few)
        few = Limits(max_bytes=10_300)  # of which each tar and each file take 10,240
        two = [member(name, LINK, linkname=name.replace("_", "/")) for name in ("d_large", "many_0000")]
        self.refused("over 10300 bytes", *two, member("l", LINK, linkname="d/holes"), below=below, limits=few)
