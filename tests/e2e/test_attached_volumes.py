# SPDX-License-Identifier: Apache-2.0
"""Volumes that are disks of real VMs: they outlive pods, follow them, and are free when a VM is killed."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path
from typing import Any

from infranetes.providers.qemu.process import pids_by_argument
from infranetes.volumes import published
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.published import PublishedVolume
from infranetes_common.wire import cri
from tests.e2e.pod_case import PodCase

_SIZE = 64 << 20
_GROUP = 4711


class AttachedVolumeTests(PodCase):
    """With a volume that is published as kubelet has it done."""

    def setUp(self) -> None:
        super().setUp()
        directory = self.root / "volumes"
        directory.mkdir(mode=0o700)
        self.config["providers"]["qemu"]["volumes_dir"] = str(directory)
        self.file = directory / "pvc-1.raw"
        self.file.touch(mode=0o600)
        os.truncate(self.file, _SIZE)
        self.table = MountTable()
        self.addCleanup(self.table.close)

    def publish(self, pod: str) -> Path:
        """Have the volume published for a pod; return where."""
        target = self.root / f"kubelet/pods/{pod}/volumes/kubernetes.io~csi/data/mount"
        volume = PublishedVolume("pvc-1", mount_flags=("noatime",), group=_GROUP)
        published.publish(str(target), volume, self.table)
        self.addCleanup(published.unpublish, str(target), self.table)
        return target

    def mounting(self, source: Path, name: str, script: str) -> Any:
        mount = cri.Mount(container_path="/data", host_path=str(source))
        return self.box(name, script, mounts=[mount])

    def is_free(self) -> bool:
        """Whether another VM could have the volume."""
        with self.file.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def qemu_of(self, sandbox: str) -> int:
        """The process of the sandbox's VM."""
        [directory] = (self.root / "state" / "qemu" / "vms").glob("[!.]*")
        [pids] = pids_by_argument([f"guest=infranetes-{directory.name}"]).values()
        return pids[0]

    async def test_what_is_written_outlives_the_pod_and_its_vm(self) -> None:
        await self.start()
        first = await self.run_pod()
        source = self.publish("first")
        script = "echo kept >/data/file; mkdir /data/part; sync; ls -ld /data; exec sleep 1000"
        await self.run_container(first, self.mounting(source, "main", script))
        await self.until(lambda: len(self.lines("main")) == 1, "it is written", seconds=60.0)
        self.assertRegex(self.lines("main")[0], rf"^drwxrws.* {_GROUP} ")
        self.assertLess(self.file.stat().st_blocks * 512, _SIZE / 2, "what is not written takes no room")
        await self.stop_pod(first)
        await self.remove_pod(first)

        second = await self.run_pod("web", attempt=1)
        reading = self.mounting(self.publish("second"), "second", "cat /data/file; exec sleep 1000")
        await self.run_container(second, reading)
        await self.until(lambda: self.lines("second") == ["kept"], "the second pod sees it", seconds=60.0)
        self.assertFalse(self.is_free(), "no other VM gets it")
        os.kill(self.qemu_of(second), signal.SIGKILL)
        await self.until(self.is_free, "it is free once the VM is gone")
