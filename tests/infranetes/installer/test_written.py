# SPDX-License-Identifier: Apache-2.0
"""The files that the installer writes, and what they were before an upgrade."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.installer import layout
from infranetes.installer.node import Files
from infranetes.installer.written import Written


class WrittenTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        (self.root / layout.HOME.lstrip("/")).mkdir(parents=True)
        self.written = Written(Files(self.root))

    def mode(self, path: str) -> int:
        return (self.root / path.lstrip("/")).stat().st_mode & 0o777

    def test_what_an_interrupted_upgrade_has_kept_stays_until_it_is_forgotten(self) -> None:
        paths = ("/etc/a", "/etc/none")
        self.written.write({"/etc/a": "old"})
        self.written.save_before(paths)
        self.written.write({"/etc/a": "new"})
        self.written.save_before(paths)
        self.assertEqual(self.written.before(), {"/etc/a": "old"})
        self.assertEqual(self.mode(f"{layout.HOME}/before.json"), 0o600)
        self.written.forget_before()
        self.written.forget_before()
        self.written.save_before(paths)
        self.assertEqual(self.written.before(), {"/etc/a": "new"})

    def test_secrets_are_roots_alone_and_only_what_differs_is_written(self) -> None:
        texts = {"/etc/x/a": "a", layout.CONFIGURATION: "b"}
        self.assertFalse(self.written.has(texts))
        self.assertTrue(self.written.write(texts))
        self.assertEqual((self.mode("/etc/x/a"), self.mode(layout.CONFIGURATION)), (0o644, 0o600))
        inode = (self.root / "etc/x/a").stat().st_ino
        self.assertTrue(self.written.has(texts))
        self.assertFalse(self.written.write(texts))
        self.assertTrue(self.written.write({**texts, layout.CONFIGURATION: "c"}))
        self.assertEqual((self.root / "etc/x/a").stat().st_ino, inode)

    def test_directories_that_were_made_go_if_they_are_empty_the_inner_ones_first(self) -> None:
        made = self.written.to_make(["/etc/x/y/a", f"{layout.HOME}/b"], ())
        self.written.write({"/etc/x/y/a": "a"})
        self.assertEqual(self.written.to_make(["/etc/x/y/a"], made), made)
        self.assertNotIn(layout.HOME, made)
        self.written.remove_directories(made)
        self.assertTrue((self.root / "etc/x/y/a").exists())
        self.written.delete(["/etc/x/y/a", "/etc/x/y/a", "/nowhere/a"])
        self.written.remove_directories(made)
        self.assertFalse((self.root / "etc").exists())
