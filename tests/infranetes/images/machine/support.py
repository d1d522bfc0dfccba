# SPDX-License-Identifier: Apache-2.0
"""What the tests of machines' disks share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infranetes.images import Image, ImageStore
from infranetes.images.machine.registry_disks import RegistryDisks
from tests.infranetes.images.machine import builders
from tests.infranetes.images.support import StoreCase, reactor
from tests.support import oci


class MachineCase(StoreCase):
    """A store with a registry, and the disks of its images."""

    async def begin(self) -> None:
        self.machines: list[RegistryDisks] = []
        self.store, self.machine = await self.new_machine()
        self.told: list[str] = []

    async def end(self) -> None:
        for machine in self.machines:
            await machine.stop()
        await super().end()

    async def new_machine(
        self, directory: Path | None = None, qemu_img: str = "qemu-img", **config: Any
    ) -> tuple[ImageStore, RegistryDisks]:
        store = await self.new_store(directory, **config)
        machine = RegistryDisks(reactor, store, qemu_img=qemu_img)
        self.machines.append(machine)
        await machine.start()
        return store, machine

    async def pulled(self, files: Mapping[str, bytes], name: str = "vm", **options: Any) -> Image:
        """Return an image with these files in one layer."""
        return await self.store.pull(self.registry.push(name, "1", oci.image([oci.layer(files)], **options)))

    def qcow2(self, content: bytes = builders.mbr(), size: int = 64 << 20, **options: str) -> bytes:
        return builders.qcow2(Path(self.mktemp()), content, size, **options)

    def files(self) -> set[str]:
        """Return the files of bases."""
        return set(os.listdir(self.directory / "machines")) - {"bases.json", "new"}

    def assert_no_unfinished(self) -> None:
        self.assertEqual(os.listdir(self.directory / "machines" / "new"), [])

    def script(self, text: str) -> str:
        """Return the path of a program in the place of qemu-img, which other users may execute."""
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        directory.chmod(0o755)
        program = directory / "qemu-img"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        return str(program)
