# SPDX-License-Identifier: Apache-2.0
"""A node's disks are taken out of images of registries, and of its own catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import Config
from infranetes.daemon.machine_disks import NodeDisks
from infranetes.images import Image
from infranetes.images.machine.catalogue import MachineCatalogue
from infranetes.images.machine.disk import BaseDisk, DiskFormat
from infranetes.images.machine.registry_disks import RegistryDisks
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition
from tests.infranetes.pods.fake_images import image


class Source:
    """Stands in for both sources of disks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[str] = []

    async def base(self, image: object) -> BaseDisk:
        return BaseDisk(self.name, Path("/nonexistent"), DiskFormat.RAW, 512)

    async def start(self) -> None:
        self.calls.append("start")

    async def stop(self) -> None:
        self.calls.append("stop")

    def reconfigure(self, images: object, config: object) -> None:
        self.calls.append("reconfigure")


class NodeDisksTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.registries, self.catalogue = Source("registry"), Source("catalogue")
        self.disks = self.made(self.registries)

    def made(self, registries: Source | None) -> NodeDisks:
        return NodeDisks(cast(RegistryDisks, registries), cast(MachineCatalogue, self.catalogue))

    def digest(self, image: Image) -> str:
        return self.successResultOf(start(self.disks.base(image))).digest

    def test_an_images_source_has_its_disk(self) -> None:
        self.assertEqual(self.digest(image()), "registry")
        self.assertEqual(self.digest(image(machine="old:1")), "catalogue")

    def test_beside_another_runtime_there_is_the_catalogue_alone(self) -> None:
        self.disks = self.made(None)
        self.assertEqual(self.digest(image(machine="old:1")), "catalogue")
        refused = self.failureResultOf(start(self.disks.base(image())), FailedPrecondition)
        self.assertIn("machine_images", str(refused.value))
        self.successResultOf(start(self.disks.start()))
        self.successResultOf(start(self.disks.stop()))

    def test_a_daemons_life(self) -> None:
        self.successResultOf(start(self.disks.start()))
        self.disks.reconfigure(Config())
        self.successResultOf(start(self.disks.stop()))
        self.assertEqual((self.registries.calls, self.catalogue.calls), (["start", "stop"], ["reconfigure"]))
