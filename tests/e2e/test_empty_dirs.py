# SPDX-License-Identifier: Apache-2.0
"""emptyDirs in real VMs: limited by the VM's disk alone, one directory for all mounts, gone with the pod."""

from __future__ import annotations

from tests.e2e.pod_case import PodCase
from tests.support.empty_dirs import EmptyDirCase

MEBIBYTES = 300  # more than a volume that is copied to the VM may have


class EmptyDirTests(EmptyDirCase, PodCase):
    """emptyDirs with QEMU and the guest image's agent."""

    async def test_it_is_one_directory_of_the_vm_and_gone_with_it(self) -> None:
        await self.start()
        sandbox = await self.check_one_directory(MEBIBYTES)
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)
        again = await self.run_own_pod(attempt=1)
        fresh = self.box(script="sleep 1000", mounts=[self.mount()])
        self.assertEqual(await self.ran(await self.run_container(again, fresh), "ls -A /cache/a"), "")
