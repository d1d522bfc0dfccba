# SPDX-License-Identifier: Apache-2.0
"""Copies that take no more of the disk than they have to, and directories that go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.guest import image as images
from infranetes.guest.image import GuestImage
from tests.support.disk_space import Scratch, copy, copy_image

ROOT = Path(__file__).resolve().parents[2]
HELD = (
    "import sys, time; from pathlib import Path; from tests.support.disk_space import Scratch; "
    "made = Scratch.make('held', Path(sys.argv[1])); print(made.path, flush=True); time.sleep(600)"
)


class Case(SynchronousTestCase):
    def setUp(self) -> None:
        self.place = Path(self.mktemp()).absolute()
        self.place.mkdir()


class CopyTests(Case):
    def image(self, name: str) -> GuestImage:
        """Write an image whose disk has a gigabyte of holes."""
        made = GuestImage(self.place / "images" / name, name, 0.0, "bookworm", "6.1", ())
        made.directory.mkdir(parents=True)
        for part in (made.kernel, made.initrd, made.disk):
            part.write_text(name)
        os.truncate(made.disk, 1 << 30)
        images.write(made)
        return made

    def test_what_a_disk_does_not_hold_takes_no_room_in_its_copy(self) -> None:
        disk = self.place / "disk.raw"
        with disk.open("wb") as file:
            file.write(b"first")
            file.seek(1 << 30)
            file.write(b"last")
        copy(disk, self.place / "copy")
        kept = (self.place / "copy").stat()
        self.assertEqual(kept.st_size, (1 << 30) + 4)
        self.assertLess(kept.st_blocks * 512, 1 << 20)

    def test_of_guest_images_only_the_one_in_use_is_copied(self) -> None:
        self.image("old")
        made = self.image("new")
        (made.directory.parent / images.CURRENT).symlink_to("new")
        copy_image(made.directory.parent, target := self.place / "there" / "guest")
        self.assertEqual(sorted(os.listdir(target)), [images.CURRENT, "new"])
        copied = images.current(target)
        self.assertEqual((copied.directory, copied.kernel.read_text()), (target / "new", "new"))
        self.assertLess(copied.disk.stat().st_blocks * 512, 1 << 20)


class ScratchTests(Case):
    def held(self) -> tuple[subprocess.Popen[str], Path]:
        """Start a process that has a directory; it ends with the test."""
        command = [sys.executable, "-c", HELD, str(self.place)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    def test_it_goes_with_all_that_is_in_it(self) -> None:
        made = Scratch.make("kind", self.place)
        (made.path / "directory").mkdir()
        (made.path / "directory" / "file").touch()
        made.remove()
        self.assertEqual(list(self.place.iterdir()), [])

    def test_what_a_killed_process_left_goes_when_the_next_one_is_made(self) -> None:
        process, left = self.held()
        (left / "file").touch()
        process.send_signal(signal.SIGKILL)
        process.wait()
        made = Scratch.make("held", self.place)
        self.assertEqual(list(self.place.iterdir()), [made.path])

    def test_what_a_process_has_and_what_is_of_another_kind_stays(self) -> None:
        _, there = self.held()
        (other := self.place / "infranetes-other-1").mkdir()
        (elsewhere := self.place / "elsewhere").mkdir()
        (link := self.place / "infranetes-held-1").symlink_to(elsewhere)
        made = Scratch.make("held", self.place)
        self.assertEqual(sorted(self.place.iterdir()), sorted((made.path, there, other, elsewhere, link)))

    def test_this_process_keeps_what_it_has_too(self) -> None:
        one, other = Scratch.make("kind", self.place), Scratch.make("kind", self.place)
        self.assertTrue(one.path.is_dir() and other.path.is_dir())
