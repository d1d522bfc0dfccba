# SPDX-License-Identifier: Apache-2.0
"""emptyDirs in real VMs: as large as the VM's disk takes, one directory for all mounts, gone with the pod."""

from __future__ import annotations

from tests.e2e.pod_case import PodCase
from tests.support.empty_dirs import EmptyDirCase

MEBIBYTES = 300  # more than is carried


class EmptyDirTests(EmptyDirCase, PodCase):
    """Each with QEMU and the guest image's agent."""

    async def test_it_is_one_directory_of_the_vm_and_gone_with_it(self) -> None:
        await self.start()
        sandbox = await self.check_one_directory(MEBIBYTES)
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)
        again = await self.run_own_pod(attempt=1)
        fresh = self.box(script="sleep 1000", mounts=[self.mount()])
        self.assertEqual(await self.ran(await self.run_container(again, fresh), "ls -A /cache/a"), "")
