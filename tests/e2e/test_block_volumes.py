# SPDX-License-Identifier: Apache-2.0
"""Raw volumes of real VMs: containers write to the disk itself, and the next pod finds what they wrote."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from infranetes.volumes import published_devices
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.published import PublishedVolume
from infranetes_common.wire import cri
from tests.e2e.pod_case import PodCase

_SIZE = 16 << 20
_OWNER = "0 6 660"  # Debian's group `disk`
_TEXT = "kept by the disk itself"


class BlockVolumeTests(PodCase):
    """With a volume that is published, and locked, as kubelet has it done."""

    def setUp(self) -> None:
        super().setUp()
        directory = self.root / "volumes"
        directory.mkdir(mode=0o700)
        self.config["providers"]["qemu"]["volumes_dir"] = str(directory)
        self.file = directory / "raw-1.raw"
        self.file.touch(mode=0o600)
        os.truncate(self.file, _SIZE)
        disk = self.root / "disk"  # of the node itself
        disk.write_bytes(bytes(_SIZE))
        self.node_device = self.loop(disk)
        self.config["providers"]["qemu"]["devices"] = [self.node_device]
        self.table = MountTable()
        self.addCleanup(self.table.close)

    def publish(self, pod: str, *, read_only: bool = False) -> Path:
        """Have the volume published for a pod, and hold kubelet's lock on it; return kubelet's link."""
        target = self.root / f"kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pv/{pod}"
        published_devices.publish(str(target), PublishedVolume("raw-1", "", read_only=read_only), self.table)
        link = self.root / f"kubelet/pods/{pod}/volumeDevices/kubernetes.io~csi/pv"
        link.parent.mkdir(parents=True)
        link.symlink_to(target)
        self.addCleanup(published_devices.unpublish, str(target), self.table)
        self.loop(target)
        return link

    def loop(self, path: Path) -> str:
        """Have a loop device of a file, or of another one, until the test ends."""
        command = ["losetup", "--find", "--show", str(path)]
        device = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        self.addCleanup(subprocess.run, ["losetup", "--detach", device], check=True)
        return device

    def unpublish(self, pod: str) -> None:
        """Have it free for the next pod; kubelet's lock goes later."""
        target = self.root / f"kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pv/{pod}"
        published_devices.unpublish(str(target), self.table)

    def with_device(self, link: Path, name: str, script: str, permissions: str = "mrw") -> Any:
        device = cri.Device(container_path="/dev/xvda", host_path=str(link), permissions=permissions)
        return self.box(name, script, devices=[device])

    async def test_what_is_written_to_the_device_outlives_the_pod_and_its_vm(self) -> None:
        await self.start()
        first = await self.run_pod()
        script = (
            f"echo '{_TEXT}' | dd of=/dev/xvda bs=512 seek=8 conv=notrunc 2>/dev/null && "
            "echo lent | dd of=/dev/node bs=512 2>/dev/null && "
            "test -b /dev/xvda && echo written; exec sleep 1000"
        )
        wanted = self.with_device(self.publish("first"), "main", script)
        wanted.devices.add(container_path="/dev/node", host_path=self.node_device, permissions="rw")
        await self.run_container(first, wanted)
        await self.until(lambda: self.lines("main") == ["written"], "it is written", seconds=60.0)
        await self.stop_pod(first)
        await self.remove_pod(first)
        self.assertIn(_TEXT.encode(), self.file.read_bytes())
        self.assertLess(self.file.stat().st_blocks * 512, _SIZE / 2, "no file system was made on it")
        self.assertEqual((self.root / "disk").read_bytes()[:4], b"lent")
        self.unpublish("first")

        second = await self.run_pod("web", attempt=1)
        script = (
            "stat -c '%u %g %a' /dev/xvda; "
            "dd if=/dev/xvda bs=512 skip=8 count=1 2>/dev/null | tr -d '\\000'; "
            "if echo lost | dd of=/dev/xvda bs=512 2>/dev/null; then echo written; else echo refused; fi; "
            "exec sleep 1000"
        )
        link = self.publish("second", read_only=True)
        await self.run_container(second, self.with_device(link, "second", script))
        await self.until(
            lambda: self.lines("second") == [_OWNER, _TEXT, "refused"],
            "the second pod, which may only read, sees it",
            seconds=60.0,
        )
        await self.stop_pod(second)
        self.assertNotIn(b"lost", self.file.read_bytes())
