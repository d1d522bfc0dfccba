# SPDX-License-Identifier: Apache-2.0
"""A realistic tar: this machine's own files, written by GNU tar; at night also Python's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.images.erofs.convert import convert
from infranetes.images.erofs.limits import Limits
from tests.harness.durations import slow
from tests.harness.needs import needs_mounts, needs_programs, repetitions
from tests.infranetes.images.erofs.support import check, mounted, shown

TREES = ("etc", "usr/bin/passwd", "usr/bin/perl", "usr/share/perl", "usr/share/zoneinfo", "usr/lib/python3")[
    : repetitions(5, nightly=6)
]


@needs_mounts
@needs_programs("mkfs.erofs")
class RealTests(SynchronousTestCase):
    timeout = 300

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="erofs-real-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.tar, self.image = self.directory / "tar", self.directory / "image"
        options = [
            "--create",
            "--xattrs",
            "--xattrs-include=*",
            "--format=pax",
            "--sort=name",
            "--ignore-failed-read",
        ]
        self.run_("tar", *options, f"--file={self.tar}", "--directory=/", *TREES)

    def run_(self, *command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    @slow(5, "thousands of files are converted, extracted and compared")
    def test_what_tar_extracts_is_what_the_image_has(self) -> None:
        self.assertGreater(self.tar.stat().st_size, 16 << 20)
        diff_id = "sha256:" + self.run_("sha256sum", str(self.tar)).split()[0]
        with open(self.tar, "rb") as layer, open(self.image, "wb") as image:
            convert(layer.fileno(), image.fileno(), "", diff_id, Limits(), ())
        check(self.image)
        extracted = self.directory / "extracted"
        extracted.mkdir(mode=0o755)
        options = ["--extract", "--xattrs", "--xattrs-include=*", "--same-owner", "--same-permissions"]
        self.run_("tar", *options, f"--file={self.tar}", f"--directory={extracted}")
        with mounted(self.image) as at:
            self.compare(extracted, at)

    def compare(self, extracted: Path, at: Path) -> None:
        count = 0
        for parent, directories, files in os.walk(extracted):
            self.assertEqual(
                sorted(directories + files), sorted(os.listdir(at / Path(parent).relative_to(extracted)))
            )
            for name in directories + files:
                path = Path(parent, name)
                relative = path.relative_to(extracted)
                if str(relative) in ("usr", "usr/bin", "usr/lib", "usr/share"):  # not in the tar
                    continue
                self.assertEqual(shown(at / relative), shown(path), relative)
                count += 1
        self.assertGreater(count, 2000)
