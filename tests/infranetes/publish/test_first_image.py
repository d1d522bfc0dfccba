# SPDX-License-Identifier: Apache-2.0
"""The first guest image: on which nodes it is built."""

from __future__ import annotations

import time
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.guest import image, reporting
from infranetes.guest.image import GuestImage
from infranetes.guest.reporting import Build
from infranetes.publish import command, first_image
from infranetes_common.errors import InfranetesError


class FirstImageTests(SynchronousTestCase):
    """`infranetes-guest first-image`."""

    def setUp(self) -> None:
        self.images = Path(self.mktemp()).absolute()
        self.file = Path(self.mktemp()).absolute()
        self.begun = 0

        def downloaded(progress: object) -> object:
            self.begun += 1
            raise InfranetesError("the archive can't be reached")

        self.patch(first_image, "downloaded", downloaded)

    def run_command(self, text: str) -> int:
        self.file.write_text(text)
        return command.main(["first-image", "--config", str(self.file)])

    def test_a_node_of_qemu_without_one_gets_one(self) -> None:
        qemu = f'[providers.qemu]\nimage_dir = "{self.images}"\n'
        self.assertEqual(self.run_command(qemu), 1)
        self.assertEqual(self.begun, 1)
        self.assertEqual(reporting.read(self.images), Build(False, "the archive can't be reached"))

    def test_nor_do_handlers_of_qemu_go_without(self) -> None:
        text = (
            'provider = "simulated"\n[handlers.vm]\nprovider = "qemu"\n'
            f'[providers.qemu]\nimage_dir = "{self.images}"\n'
        )
        self.assertEqual((self.run_command(text), self.begun), (1, 1))

    def test_other_providers_need_none(self) -> None:
        self.assertEqual((self.run_command('provider = "simulated"\n'), self.begun), (0, 0))

    def test_one_that_is_there_is_left_as_it_is(self) -> None:
        made = GuestImage(self.images / "one", "key", time.time(), "bookworm", "6.1.0", ())
        made.directory.mkdir(parents=True)
        for part in (made.disk, made.kernel, made.initrd):
            part.touch()
        image.write(made)
        (self.images / image.CURRENT).symlink_to("one")
        qemu = f'[providers.qemu]\nimage_dir = "{self.images}"\n'
        self.assertEqual((self.run_command(qemu), self.begun), (0, 0))
