# SPDX-License-Identifier: Apache-2.0
"""The state directory's disk is full: what runs can still be inspected, stopped and removed."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from infranetes_common.wire import cri
from tests.harness.needs import needs_mounts
from tests.infranetes.daemon.case import DaemonCase


@needs_mounts
class FullDiskTests(DaemonCase):
    """The state directory is on a small file system of its own."""

    def setUp(self) -> None:
        super().setUp()
        self.state = self.root / "state"
        self.state.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(self.state)], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(self.state)], check=True)

    def fill(self) -> Path:
        """Use up the disk, to the last block."""
        path = self.state / "fill"
        with path.open("wb", buffering=0) as file:
            for size in (1 << 20, 4096):
                try:
                    while file.write(bytes(size)) == size:
                        pass
                except OSError:
                    continue
        self.assertEqual(os.statvfs(self.state).f_bavail, 0)
        return path

    async def test_pods_are_stopped_and_removed_at_once(self) -> None:
        await self.start()
        pods = [await self.run_pod(f"pod{number}") for number in range(4)]
        # Without a command: here, a container with one writes to this very disk, which no real VM does.
        container = await self.run_container(pods[0], self.box())
        fill = self.fill()
        status = await self.container_status(container)
        self.assertEqual(status.state, cri.CONTAINER_RUNNING)
        began = time.monotonic()
        for sandbox in pods[:2]:
            await self.stop_pod(sandbox)
            await self.remove_pod(sandbox)
        self.assertLess(time.monotonic() - began, 10.0)
        await self.kill()
        self.fill_again(fill)
        await self.start()
        self.assertEqual({each.id for each in await self.sandboxes()}, set(pods[2:]))
        await self.stop_pod(pods[2])
        await self.remove_pod(pods[2])
        fill.unlink()
        again = await self.run_pod("again")
        self.assertEqual({each.id for each in await self.sandboxes()}, {pods[3], again})

    def fill_again(self, fill: Path) -> None:
        fill.unlink()
        self.fill()
