# SPDX-License-Identifier: Apache-2.0
"""emptyDirs in real VMs: as large as the VM's disk takes, one directory for all mounts, gone with the pod."""

from __future__ import annotations

import os

from infranetes.volumes.space import NAME
from tests.e2e.pod_case import PodCase
from tests.support.empty_dirs import EmptyDirCase

MEBIBYTES = 300  # more than is carried


class EmptyDirTests(EmptyDirCase, PodCase):
    """Each with QEMU and the guest image's agent."""

    async def test_it_is_one_directory_of_the_vm_and_kubelet_knows_its_size(self) -> None:
        await self.start()
        sandbox = await self.check_one_directory(MEBIBYTES)
        shown = self.cache / os.fsdecode(NAME)
        full = (MEBIBYTES - 1) << 20
        await self.until(lambda: shown.exists() and shown.stat().st_blocks * 512 >= full, "its size is shown")
        await self.stop_pod(sandbox)
        await self.until(lambda: not shown.exists(), "it takes nothing any more")
        await self.remove_pod(sandbox)
        again = await self.run_own_pod(attempt=1)
        fresh = self.box(script="sleep 1000", mounts=[self.mount()])
        self.assertEqual(await self.ran(await self.run_container(again, fresh), "ls -A /cache/a"), "")
