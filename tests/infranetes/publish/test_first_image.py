# SPDX-License-Identifier: Apache-2.0
"""The first guest image: on which nodes it is built."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.guest import image, reporting
from infranetes.guest.image import GuestImage
from infranetes.guest.reporting import Build
from infranetes.publish import command, first_image
from infranetes_common.errors import InfranetesError
from tests.harness.needs import needs_mounts
from tests.support.spaces import ROOT

# The command, with an archive that can't be reached. Arguments: the configuration's file.
_COMMAND = """
import sys
from infranetes.publish import command, first_image
from infranetes_common.errors import InfranetesError
def downloaded(progress):
    raise InfranetesError("the archive can't be reached")
first_image.downloaded = downloaded
sys.exit(command.main(["first-image", "--config", sys.argv[1]]))
"""


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


@needs_mounts
class ServiceTests(SynchronousTestCase):
    """The command in mounts like those of infranetes-guest.service."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.images = self.directory / "pods/images"
        self.images.parent.mkdir(parents=True)
        (self.directory / "infranetes.toml").write_text(f'[providers.qemu]\nimage_dir = "{self.images}"\n')

    def said(self, *mounts: str) -> str:
        """Run the command after these commands, and return why it fails."""
        command = " && ".join((*mounts, 'exec "$@"'))
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", command, "sh", sys.executable, "-c", _COMMAND,
             str(self.directory / "infranetes.toml")],
            capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
        self.assertEqual(done.returncode, 1, done.stderr)
        return done.stderr

    def read_only(self, *before: str) -> tuple[str, ...]:
        where = self.images.parent
        return (f"mount --bind {where} {where}", *before, f"mount -o remount,bind,ro {where}")

    def private_tmp(self) -> str:
        own = self.directory / "systemd-private-1-infranetes-guest.service-1/tmp"
        own.mkdir(parents=True)
        return f"mount --bind {own} {self.images.parent}"

    def test_a_directory_that_is_read_only(self) -> None:
        said = self.said(*self.read_only())
        self.assertIn(f"providers.qemu.image_dir: {self.images} is read-only", said)
        self.assertIn(f"`systemctl edit infranetes-guest` and add ReadWritePaths={self.images}", said)

    def test_a_directory_that_is_read_only_but_for_itself(self) -> None:
        self.images.mkdir()
        writable = self.read_only(f"mount --bind {self.images} {self.images}")
        self.assertIn("the archive can't be reached", self.said(*writable))

    def test_a_directory_in_the_services_own_tmp(self) -> None:
        said = self.said(self.private_tmp())
        self.assertIn(f"providers.qemu.image_dir: {self.images} is in a temporary directory", said)
        self.assertIn("`systemctl edit infranetes-guest` and add PrivateTmp=no", said)

    def test_a_directory_that_is_everybodys_in_the_services_own_tmp(self) -> None:
        others = self.directory / "others"
        others.mkdir()
        said = self.said(self.private_tmp(), f"mkdir {self.images}", f"mount --bind {others} {self.images}")
        self.assertIn("the archive can't be reached", said)
