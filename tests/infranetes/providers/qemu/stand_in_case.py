# SPDX-License-Identifier: Apache-2.0
"""The QEMU provider with a program in QEMU's place, and so without a guest image or a boot."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from infranetes.guest import image as images
from infranetes.guest.image import GuestImage
from infranetes.providers.interface import Instance
from infranetes.providers.qemu.vm import record
from infranetes_common.wire import vmserver
from tests.e2e.qemu_case import QemuCase
from tests.infranetes.providers.qemu.stand_in_qemu import SILENT

PROGRAM = Path(__file__).with_name("stand_in_qemu.py")
BRIDGE = "inftest8"


class StandInCase(QemuCase):
    """Like `QemuCase`, in seconds. All tests of a class share a template, as making one takes three."""

    bridge = BRIDGE
    pod_cidr = "10.208.0.0/24"
    other_cidr = "10.209.0.0/24"
    start_timeout = 60.0
    timeout = 300.0
    place: ClassVar[Path]
    images: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        # The user of a VM can enter no home directory, which this tree may be in.
        cls.place = Path(tempfile.mkdtemp(prefix="infranetes-"))
        cls.place.chmod(0o755)
        cls.qemu = str(shutil.copy(PROGRAM, cls.place / "qemu"))
        Path(cls.qemu).chmod(0o755)
        cls.images = cls.place / "images"
        make_image(cls.images)

    @classmethod
    def tearDownClass(cls) -> None:
        shutil.rmtree(cls.place)
        super().tearDownClass()

    def setUp(self) -> Any:
        done = super().setUp()
        self.settings |= {
            "image_dir": str(self.images),
            "template_dir": str(self.place / "templates"),
            "qemu": self.qemu,
            "user": "nobody",
            "accelerator": "tcg",
            "memory": 256 << 20,
            "max_memory": 4 << 30,
            "max_cpus": 2,
        }
        return done

    def silence_agents(self) -> None:
        """Let agents that get an identity from now on never answer."""
        silent = self.place / SILENT
        silent.touch()
        self.addCleanup(silent.unlink)

    async def agent_info(self, instance: Instance) -> vmserver.InfoResponse:
        """Return what the guest has written to its console of the identity that it took."""
        console = self.vms() / instance.token / record.CONSOLE
        said = [json.loads(line) for line in console.read_text().splitlines()]
        [seen] = [each for each in said if "sandbox_id" in each]
        return vmserver.InfoResponse(
            sandbox_id=seen["sandbox_id"], boot_id=seen["boot_id"], agent_id=seen["boot_id"]
        )


def make_image(directory: Path, containers: str = "oci") -> None:
    """Make a guest image of empty files, and let it be the current one. :param containers: what runs them."""
    image = GuestImage(directory / "stand-in", "stand-in", 0.0, "bookworm", "6.1", (), (containers,))
    image.directory.mkdir(parents=True)
    for file in (image.kernel, image.initrd):
        file.write_bytes(b"")
    with image.disk.open("wb") as disk:
        disk.truncate(1 << 20)
    images.write(image)
    (directory / images.CURRENT).symlink_to(image.directory)
