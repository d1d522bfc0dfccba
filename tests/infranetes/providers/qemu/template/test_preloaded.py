# SPDX-License-Identifier: Apache-2.0
"""Images that a VM has from its beginning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import TestCase

from infranetes.guest.image import GuestImage
from infranetes.images.preload import Preload
from infranetes.providers.interface import Progress, ProviderContext, ReadOnlyDisk
from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes.providers.qemu.template.preloaded import PreloadedImages
from infranetes.providers.qemu.vm.paths import ProviderPaths
from infranetes.providers.qemu.vm.record import VmRecord
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.errors import InfranetesError, Unavailable

LAYERS = [ReadOnlyDisk("a" * 64, Path("/layers/a"))]
ARCHIVE = Preload("key", Path("/archives/one.tar"))
RECORD = VmRecord("5" * 32, "sandbox", "c", "n", "10.0.0.2", 0.0)


class PreloadedTests(TestCase):
    """As layers that are shown as disks, or as an archive that the template loads."""

    def setUp(self) -> None:
        self.context = ProviderContext(
            Path("/x"), Path("/x"), "c", "n", preload=self.archive, preload_disks=self.disks
        )
        self.shown: list[tuple[Vm, Sequence[ReadOnlyDisk]]] = []
        self.refuses: InfranetesError | None = None
        self.vm = Vm(RECORD, ProviderPaths(Path("/x"), Path("/x")).of_vm(RECORD, QemuUser(0, 0)))

    async def archive(self, progress: Progress) -> Preload:
        return ARCHIVE

    async def disks(self, progress: Progress) -> Sequence[ReadOnlyDisk]:
        return LAYERS

    async def show(self, vm: Vm, disks: Sequence[ReadOnlyDisk]) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.shown.append((vm, disks))

    async def gathered(self, *providers: str) -> PreloadedImages:
        images = PreloadedImages(self.context, self.show)
        image = GuestImage(Path("/images/one"), "key", 0.0, "bookworm", "6.1", (), providers)
        await images.gather(image, lambda words: None)
        return images

    async def test_a_guest_that_takes_layers_is_shown_them_and_needs_no_archive(self) -> None:
        images = await self.gathered("oci")
        self.assertIsNone(images.archive)
        await images.show(self.vm)
        self.assertEqual(self.shown, [(self.vm, LAYERS)])

    async def test_any_other_has_an_archive_and_is_shown_nothing(self) -> None:
        images = await self.gathered("docker", "oci")
        self.assertEqual(images.archive, ARCHIVE)
        await images.show(self.vm)
        self.assertEqual(self.shown, [])

    async def test_where_the_configuration_names_none_there_is_nothing(self) -> None:
        self.context = attrs.evolve(self.context, preload=None, preload_disks=None)
        for provider in ("oci", "docker"):
            images = await self.gathered(provider)
            await images.show(self.vm)
            self.assertIsNone(images.archive)
        self.assertEqual(self.shown, [])

    async def test_a_vm_that_can_not_be_shown_them_starts_all_the_same(self) -> None:
        self.refuses = Unavailable("QEMU has no room for a disk")
        images = await self.gathered("oci")
        with capturedLogs() as events:
            await images.show(self.vm)
        [warning] = [formatEvent(event) for event in events]
        self.assertIn("no room for a disk", warning)
        self.assertIn(self.vm.record.id, warning)
