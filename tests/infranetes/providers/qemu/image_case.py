# SPDX-License-Identifier: Apache-2.0
"""The QEMU provider with VMs that boot images: real ones, whose guests are a sector long."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from inspect import isawaitable
from pathlib import Path
from typing import Any

from infranetes.providers.hypervisor import IHypervisor
from infranetes.providers.interface import Instance, InstanceSpec
from infranetes.providers.machine_images import BaseDisk, DiskFormat, ImageBoot
from infranetes.providers.qemu.provider import QemuProvider
from infranetes.providers.qemu.vm import hypervisors
from tests.contract.pod_provider_case import reactor
from tests.infranetes.providers.qemu.stand_in_case import StandInCase
from tests.support import boot_sector

MEMORY = 32 << 20


class ImageCase(StandInCase):
    """Like `StandInCase`, with an image. :ivar base: the image's disk. :ivar disk: its file."""

    def setUp(self) -> Any:
        done = super().setUp()
        self.disk = boot_sector.write(self.state_dir / "image.raw")
        self.base = BaseDisk("sha256:0", self.disk, DiskFormat.RAW, boot_sector.SIZE, boots_by_bios=True)
        self.settings |= {"memory": 256 << 20, "console_size": 16384}
        self.patch(hypervisors, "_SECONDS", 0.2)
        return done

    async def image_provider(self) -> QemuProvider:
        provider = await self.started()
        assert isinstance(provider, QemuProvider)
        return provider

    def image_spec(self, token: str | None = None, **fields: Any) -> InstanceSpec:
        """Return the specification of a VM. :param fields: those of its ImageBoot."""
        return self.spec(token=token, boot=ImageBoot(**{"base": self.base, **fields}))

    async def prepared_vm(self, provider: QemuProvider, **fields: Any) -> Instance:
        return await self.running(provider, self.image_spec(**fields))


class HypervisorCase(ImageCase):
    """The hooks of `HypervisorContract`."""

    console_size = 16384

    async def prepared(self) -> IHypervisor:
        self.provider = await self.image_provider()
        self.instance = await self.prepared_vm(self.provider)
        return self.provider.hypervisor(self.instance.id)

    async def next_daemon(self, hypervisor: IHypervisor, meanwhile: Callable[[], object]) -> IHypervisor:
        await self.within(self.provider.stop())
        waiting = meanwhile()
        if isawaitable(waiting):
            await waiting
        self.provider = await self.image_provider()
        return self.provider.hypervisor(self.instance.id)

    async def killed(self, hypervisor: IHypervisor) -> None:
        [pid] = self.pids(self.instance)
        os.kill(pid, signal.SIGKILL)
        await self.until(lambda: not self.pids(self.instance), "it is gone")

    async def inserted(self, hypervisor: IHypervisor) -> list[bytes]:
        """Return what QEMU has in its drives, read by the files that it has open."""
        vm: Any = self.provider._find(self.instance.id)
        monitor = await vm.monitor(reactor)
        blocks = await monitor.qmp.execute("query-block")
        drives = {each["qdev"]: each for each in blocks if each.get("qdev", "").startswith("drive")}
        nodes = [
            drives[name]["inserted"]["node-name"] for name in sorted(drives) if "inserted" in drives[name]
        ]
        files: dict[str, bytes] = {}
        [pid] = self.pids(self.instance)
        for each in Path(f"/proc/{pid}/fd").iterdir():
            if ".cd" in os.readlink(each):
                content = each.read_bytes()
                files.setdefault(hashlib.sha256(content).hexdigest(), content)
        self.assertEqual(len(files), len(nodes), "QEMU has no file open that is in no drive")
        by_label = {content[0x8028 : 0x8028 + 32].rstrip(): content for content in files.values()}
        labels = [b"cidata", b"config-2"]
        return [by_label[label] for label in labels if label in by_label]

    async def destroy(self, hypervisor: IHypervisor) -> None:
        await self.within(self.provider.destroy(self.instance.id))
