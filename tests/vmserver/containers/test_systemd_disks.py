# SPDX-License-Identifier: Apache-2.0
"""A pod's disk in containers that are units of a real systemd: nothing uses it once they have ended."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from twisted.trial.unittest import TestCase

from infranetes_common.wire import cri
from tests.vmserver.containers.test_systemd import SystemdCase


class SystemdDiskTests(SystemdCase, TestCase):
    async def setUp(self) -> None:
        await super().setUp()
        file = self.directory / "file"
        with file.open("wb") as made:
            made.truncate(16 << 20)
        self.call("mkfs.ext4", "-q", "-F", str(file))
        self.device = self.call("losetup", "--find", "--show", str(file)).strip()
        self.addCleanup(self.call, "losetup", "--detach", self.device)
        self.disk, self.place = self.directory / "disk", self.directory / "data"
        for path in (self.disk, self.place):
            path.mkdir()

    def call(self, *command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def inside(self, *command: str) -> str:
        """Run a command where systemd runs, which has a mount namespace of its own."""
        return self.call("nsenter", f"--target={self.systemd.pid}", "--mount", *command)

    def holders(self) -> set[str]:
        """Return the processes whose mounts include the disk."""
        number = os.stat(self.device).st_rdev
        words = f" {os.major(number)}:{os.minor(number)} "
        found = set()
        for table in (each / "mountinfo" for each in Path("/proc").glob("[0-9]*")):
            try:
                if words in table.read_text():
                    found.add(table.parent.name)
            except OSError:
                continue
        return found

    async def test_it_is_free_once_the_containers_that_mount_it_have_ended(self) -> None:
        self.inside("mount", self.device, str(self.disk))
        mounts = [cri.Mount(container_path=str(self.place), host_path=str(self.disk))]
        write = f"echo kept >{self.place}/file; exec sleep 1000"
        id = await self.run_container("sh", "-c", write, mounts=mounts)
        await self.run_container("sleep", "1000")  # has a mount namespace from a time when the disk was there

        async def there() -> bool:
            return self.inside("ls", str(self.disk)).split() == ["file", "lost+found"]

        await self.until(there, "it is written")
        await self.provider.remove(id)
        self.inside("umount", str(self.disk))
        self.assertEqual(self.holders(), set())
        self.inside("mount", self.device, str(self.disk))
        self.assertEqual(self.inside("cat", f"{self.disk}/file"), "kept\n")
        self.inside("umount", str(self.disk))
