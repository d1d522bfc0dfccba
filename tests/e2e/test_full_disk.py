# SPDX-License-Identifier: Apache-2.0
"""Disks that are full: a pod's own, and the node's, as pods on real VMs see them."""

from __future__ import annotations

import subprocess

from tests.e2e.pod_case import PodCase, templates_of
from tests.infranetes.daemon.case import reactor


class FullDiskTests(PodCase):
    """Full disks, which no ContainerProvider has a part in."""

    async def test_a_pod_fills_its_own_disk_alone(self) -> None:
        """The disk has the configured size, or the one that the pod asks for. The node's may be full, too."""
        self.config["providers"]["qemu"].update(disk="9GiB", template_dir=templates_of("9GiB"))
        await self.start()
        greedy, other = await self.run_pod("greedy"), await self.run_pod("other")
        large = await self.run_pod("large", annotations={"infranetes.io/disk": "12Gi"})
        sizes = {}
        mains = {}
        for pod in (greedy, other, large):
            mains[pod] = await self.run_container(pod, self.box(f"main-{pod[:4]}", script="sleep 3600"))
        look = "df -m / | tail -n 1 | awk '{ print $(NF-4) }'"

        async def size(pod: str) -> int:
            sizes[pod] = int((await self.execute(mains[pod], "sh", "-c", look)).stdout)
            return sizes[pod]

        self.assertTrue(8400 < await size(greedy) < 9 << 10, sizes)
        until = reactor.seconds() + 60.0
        while await size(large) < 11 << 10:
            self.assertLess(reactor.seconds(), until, "the file system takes the larger disk")
            await self.sleep(0.5)
        filling = (  # including the blocks reserved for root
            "free=$(df -m / | tail -n 1 | awk '{ print $(NF-4) - $(NF-3) }') && "
            "fallocate -l $(( (free - 64) << 20 )) /fill && "
            "dd if=/dev/zero of=/more bs=1M count=256 conv=fsync"
        )
        full = await self.execute(mains[greedy], "sh", "-c", filling)
        self.assertNotEqual(full.exit_code, 0)
        self.assertIn(b"No space left on device", full.stderr)
        for pod in (other, large):
            wrote = await self.execute(
                mains[pod], "dd", "if=/dev/urandom", "of=/more", "bs=1M", "count=4", "conv=fsync"
            )
            self.assertEqual(wrote.exit_code, 0, wrote.stderr)
        began = reactor.seconds()
        await self.stop_pod(greedy)
        self.assertLess(reactor.seconds() - began, 15.0)

    async def test_on_a_full_node_writes_fail_in_the_pod_and_it_is_stopped_at_once(self) -> None:
        state = self.root / "state"
        state.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", str(state)], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(state)], check=True)
        await self.start()
        pod = await self.run_pod()
        main = await self.run_container(pod, self.box(script="sleep 3600"))
        wrote = await self.execute(
            main, "dd", "if=/dev/urandom", "of=/more", "bs=1M", "count=200", "conv=fsync"
        )
        self.assertNotEqual(wrote.exit_code, 0)
        self.assertRegex(wrote.stderr, rb"I/O error|Read-only file system|Input/output error")
        began = reactor.seconds()
        await self.stop_pod(pod)
        self.assertLess(reactor.seconds() - began, 15.0)
        await self.remove_pod(pod)
        await self.run_container(await self.run_pod("again"), self.box(script="sleep 3600"))
