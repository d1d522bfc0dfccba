# SPDX-License-Identifier: Apache-2.0
"""What tests of volumes on real VMs share."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from infranetes.providers.qemu.process import pids_by_argument
from infranetes.volumes import published
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.published import PublishedVolume
from infranetes_common.wire import cri
from tests.e2e.pod_case import PodCase

GROUP = 4711


class VolumeCase(PodCase):
    """With a volume that is published as kubelet has it done.

    :ivar file: the volume. :ivar published: where it was published last.
    """

    size = 64 << 20
    filesystem = "ext4"

    def setUp(self) -> None:
        super().setUp()
        directory = self.make_volumes()
        self.config["providers"]["qemu"]["volumes_dir"] = str(directory)
        self.file = directory / "pvc-1.raw"
        self.file.touch(mode=0o600)
        os.truncate(self.file, self.size)
        self.table = MountTable()
        self.addCleanup(self.table.close)

    def make_volumes(self) -> Path:
        """The directory of volumes."""
        directory = self.root / "volumes"
        directory.mkdir(mode=0o700)
        return directory

    def publish(self, pod: str, *, group: int | None = None) -> Path:
        """Have the volume published for a pod; return where."""
        target = self.root / f"kubelet/pods/{pod}/volumes/kubernetes.io~csi/data/mount"
        volume = PublishedVolume("pvc-1", self.filesystem, mount_flags=("noatime",), group=group)
        published.publish(str(target), volume, self.table)
        self.addCleanup(published.unpublish, str(target), self.table)
        self.published = target
        return target

    def mounting(self, source: Path, name: str, script: str, **fields: Any) -> Any:
        """A container that has the volume at /data."""
        mount = cri.Mount(container_path="/data", host_path=str(source))
        return self.box(name, script, mounts=[mount], **fields)

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
