# SPDX-License-Identifier: Apache-2.0
"""Whether a template on disk can be used."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.guest.image import GuestImage
from infranetes.providers.qemu.program.command_line import CommandLine, Fd
from infranetes.providers.qemu.program.open_files import OpenFiles
from infranetes.providers.qemu.template.template import PARTS, Template, last_used
from tests.harness.needs import needs_root

COMMAND_LINE = CommandLine("/usr/bin/qemu-system-x86_64", "QEMU 7.2", "tcg", 1024, 8192, 4)


@needs_root
class TemplateTests(SynchronousTestCase):
    """Whether a template on disk can be used."""

    def setUp(self) -> None:
        root = Path(self.mktemp())
        root.mkdir()
        image = GuestImage(root / "image", "key", 0.0, "bookworm", "6.1", ())
        self.template = Template(root / "template", COMMAND_LINE, image)
        for part in (image.disk, image.kernel, image.initrd, *map(self.template.directory.joinpath, PARTS)):
            part.parent.mkdir(exist_ok=True)
            part.write_text("content")
        self.template.seal(self.template.directory)

    def test_as_it_was_made(self) -> None:
        self.assertTrue(self.template.intact())
        with contextlib.closing(OpenFiles()) as files:
            self.template.open_for_clone(files)
            self.assertTrue(self.template.intact(), "use does not change it")

    def test_whatever_is_touched_or_missing_makes_it_unusable(self) -> None:
        for part in (*PARTS, "manifest.json"):
            path = self.template.directory / part
            path.unlink()
            self.assertFalse(self.template.intact(), part)
            path.write_text("content")
            self.assertFalse(self.template.intact(), part)
            self.template.seal(self.template.directory)
            self.assertTrue(self.template.intact())
        for path in (self.template.image.disk, self.template.directory / "ram"):
            with path.open("r+b") as file:
                file.write(b"C")
            self.assertFalse(self.template.intact(), str(path))
            self.template.seal(self.template.directory)

    def test_when_it_was_used_last_is_known(self) -> None:
        self.assertEqual(last_used(self.template.directory), 0.0, "never")
        self.template.mark_used()
        os.utime(self.template.directory / "used", (1000.0, 1000.0))
        self.assertEqual(last_used(self.template.directory), 1000.0)
        self.template.mark_used()
        self.assertGreater(last_used(self.template.directory), 1000.0)

    def test_no_file_of_it_stays_open(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        self.template.seal(self.template.directory)
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)

    def test_its_images_belong_to_it(self) -> None:
        template = attrs.evolve(self.template, command_line=attrs.evolve(COMMAND_LINE, preload="key"))
        self.assertFalse(template.intact())
        (template.directory / "images").write_text("content")
        template.seal(template.directory)
        self.assertTrue(template.intact())
        with contextlib.closing(OpenFiles()) as files:
            template.open_for_clone(files)
            self.assertIn(Fd.IMAGES, files.by_number())
        (template.directory / "images").unlink()
        self.assertFalse(template.intact())

    def test_its_ram_is_for_the_daemon_alone_and_nothing_else_can_be_written(self) -> None:
        modes = {part: (self.template.directory / part).stat().st_mode & 0o777 for part in PARTS}
        self.assertEqual(modes.pop("ram"), 0o600)
        self.assertEqual(set(modes.values()), {0o644})
