# SPDX-License-Identifier: Apache-2.0
"""Layers under overlayfs: what a layer removes is removed."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.harness.needs import needs_programs
from tests.infranetes.images.erofs.support import Member, check, converted, member, overlaid, tar

DIR = tarfile.DIRTYPE
BASE = (
    member("kept/file", content=b"base"),
    member("d/one", content=b"base"),
    member("d/two", content=b"base"),
    member("d/sub/deep", content=b"base"),
    member("gone", content=b"base"),
    member("link", tarfile.SYMTYPE, linkname="kept"),
)


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
