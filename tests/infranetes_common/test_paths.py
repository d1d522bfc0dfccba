# SPDX-License-Identifier: Apache-2.0
"""No component of a path is ever a link that is followed, also where one is put in at that moment."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import InfranetesError, InvalidArgument
from infranetes_common.filesync.apply import Applier
from infranetes_common.filesync.manifest import DIRECTORY, FILE, Bounds, Change, Entry, Removed
from infranetes_common.filesync.scan import read, scan
from infranetes_common.filesync.tree import Tree
from infranetes_common.paths import make_directories, open_path, remove_tree, resolve

BOUNDS = Bounds(1_000_000, 1 << 40)
ROUNDS = 400


class PathCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.top = Path(os.path.realpath(self.mktemp()))
        self.outside = self.top / "outside"
        (self.outside / "inner").mkdir(parents=True)
        (self.outside / "inner" / "precious").write_text("precious")
        (self.outside / "inner" / "precious").chmod(0o600)
        self.volume = self.top / "volume"
        (self.volume / "middle" / "inner").mkdir(parents=True)

    def unharmed(self) -> None:
        self.assertEqual(os.listdir(self.outside), ["inner"])
        self.assertEqual(os.listdir(self.outside / "inner"), ["precious"])
        found = self.outside / "inner" / "precious"
        self.assertEqual((found.read_text(), found.stat().st_mode & 0o777), ("precious", 0o600))

    @contextlib.contextmanager
    def swapping(self, path: Path) -> Iterator[threading.Event]:
        """The directory at `path` is a link out of the volume, and itself again, in turn."""
        over, begun = threading.Event(), threading.Event()
        aside, link = path.with_name("aside"), path.with_name("link")

        def swap() -> None:
            link.symlink_to(self.outside)
            while not over.is_set():
                path.rename(aside)
                link.rename(path)
                begun.set()
                path.rename(link)
                aside.rename(path)

        thread = threading.Thread(target=swap, name="tests.swapping")
        thread.start()
        begun.wait()
        try:
            yield over
        finally:
            over.set()
            thread.join()


class RaceTests(PathCase):
    def write_all(self, tree: Tree, prefix: bytes) -> None:
        """Each kind of change, again and again; what fails, fails."""
        for _ in range(ROUNDS):
            for changes in cast(
                "list[list[Change]]",
                [
                    [Entry(prefix + b"precious", FILE, 0o777, 0, 0, 4), b"evil"],
                    [Entry(prefix + b"made", DIRECTORY, 0o777, 0, 0)],
                    [Removed(prefix + b"precious")],
                ],
            ):
                applier = Applier(tree, BOUNDS)
                with contextlib.suppress(InfranetesError):
                    applier.feed(changes)
                applier.abort()

    def test_a_link_in_the_middle_of_a_volumes_path(self) -> None:
        tree = Tree(self.volume / "middle" / "inner", file=False, setid=False)
        with self.swapping(self.volume / "middle"):
            self.write_all(tree, b"")
        self.unharmed()

    def test_a_link_in_the_middle_of_an_entrys_path(self) -> None:
        tree = Tree(self.volume, file=False, setid=True)
        with self.swapping(self.volume / "middle"):
            self.write_all(tree, b"middle/inner/")
        self.unharmed()

    def test_a_link_on_the_way_to_a_volume_that_is_a_file(self) -> None:
        (self.volume / "middle" / "inner" / "precious").write_text("")
        tree = Tree(self.volume / "middle" / "inner" / "precious", file=True, setid=False)
        with self.swapping(self.volume / "middle"):
            for _ in range(ROUNDS):
                applier = Applier(tree, BOUNDS)
                with contextlib.suppress(InfranetesError):
                    applier.feed([Entry(b"", FILE, 0o777, 0, 0, 4), b"evil"])
                applier.abort()
                with contextlib.suppress(InfranetesError):
                    for piece in read(tree, scan(tree, BOUNDS).values()):
                        self.assertNotEqual(piece, b"precious")
        self.unharmed()


class OpenTests(PathCase):
    def test_what_has_no_link_on_the_way_is_opened_and_made(self) -> None:
        made = self.volume / "a" / "b"
        for _ in range(2):
            make_directories(os.fsencode(made))
        descriptor = open_path(os.fsencode(made / "file"), os.O_WRONLY | os.O_CREAT)
        os.close(descriptor)
        os.close(open_path(b"/", os.O_RDONLY))
        self.assertTrue((made / "file").is_file())
        for path in (b"/nowhere/at/all", os.fsencode(made / "file" / "below")):
            self.assertRaises(OSError, open_path, path, os.O_RDONLY)

    def test_links_and_dots_are_refused_and_nothing_is_made_behind_them(self) -> None:
        (self.volume / "link").symlink_to(self.outside)
        for path in ("link/inner/precious", "link", "link/inner", "../outside/inner/precious"):
            whole = os.fsencode(self.volume) + b"/" + path.encode()
            error = self.assertRaises(OSError, open_path, whole, os.O_RDONLY)
            self.assertTrue(error.strerror)
        self.assertRaises(OSError, make_directories, os.fsencode(self.volume / "link" / "new"))
        self.unharmed()


class ResolveTests(PathCase):
    def test_links_are_followed_as_everywhere(self) -> None:
        (self.top / "absolute").symlink_to(self.volume)
        (self.volume / "up").symlink_to("../outside/./inner")
        (self.volume / "loop").symlink_to("loop")
        for path in ("absolute/up/precious", "absolute/middle/../up", "volume//inner", "absolute/new/er"):
            whole = f"{self.top}/{path}"
            self.assertEqual(resolve(whole), os.path.realpath(whole))
        self.assertRaises(OSError, resolve, str(self.volume / "loop"))

    def test_a_link_that_a_container_may_have_made_leads_to_its_own_volume_alone(self) -> None:
        volume = str(self.volume)
        (self.volume / "out").symlink_to(self.outside)
        (self.volume / "within").symlink_to("middle/inner")
        (self.top / "admins").symlink_to(self.volume)
        self.assertEqual(resolve(f"{self.top}/admins/within", [volume]), f"{volume}/middle/inner")
        for path in (f"{volume}/out", f"{self.top}/admins/out/inner/new"):
            error = self.assertRaises(InvalidArgument, resolve, path, [volume])
            self.assertIn(f"in {volume}, where a container may write", str(error))
        self.assertEqual(resolve(f"{volume}/out", [f"{volume}2"]), str(self.outside))


class RemovalTests(PathCase):
    """Whole directories that a container has made are deleted."""

    def test_it_may_be_deeper_than_a_path_and_the_stack(self) -> None:
        at = os.open(self.volume, os.O_RDONLY)
        for _ in range(5000):
            os.mkdir("d", dir_fd=at)
            os.symlink(self.outside, "link", dir_fd=at)
            below = os.open("d", os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = below
        os.close(at)
        remove_tree(self.volume)
        self.assertFalse(self.volume.exists())
        self.unharmed()

    def test_it_may_be_wide_and_have_files_of_any_kind(self) -> None:
        for number in range(30):
            (self.volume / f"{number}" / "inner").mkdir(parents=True)
            (self.volume / f"{number}" / "file").write_text("")
        os.mkfifo(self.volume / "fifo")
        (self.volume / "link").symlink_to(self.outside)
        remove_tree(self.volume)
        self.assertFalse(self.volume.exists())
        self.unharmed()

    def test_neither_a_link_nor_a_file_is_a_directory(self) -> None:
        (self.top / "link").symlink_to(self.outside)
        for path in (self.top / "link", self.outside / "inner" / "precious"):
            self.assertRaises(OSError, remove_tree, path)
        self.assertRaises(FileNotFoundError, remove_tree, self.top / "absent")
        self.unharmed()

    def test_a_directory_that_is_moved_meanwhile_leads_nowhere_else(self) -> None:
        """Somebody moves what is being deleted into another directory, whose content stays."""
        (self.volume / "a" / "b" / "c").mkdir(parents=True)
        rmdir = os.rmdir

        def moving(name: str, *, dir_fd: int | None = None) -> None:
            rmdir(name, dir_fd=dir_fd)
            if name == "c":
                (self.volume / "a" / "b").rename(self.outside / "b")

        self.patch(os, "rmdir", moving)
        self.assertRaises(OSError, remove_tree, self.volume)
        rmdir(self.outside / "b")
        self.unharmed()
