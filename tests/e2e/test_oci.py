# SPDX-License-Identifier: Apache-2.0
"""Pods whose containers are run by conmon and crun, in real VMs that get the images' layers as disks."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from twisted.internet.threads import deferToThread

from infranetes_common.wire import cri
from tests.e2e.pod_case import PodCase
from tests.support.large_image import large
from tests.support.registry import Registry

LARGE = (80, 140, 6)  # MiB that do not compress, MiB that do, and layers


class OciTests(PodCase):
    """Pods on a node that runs containers with conmon and crun."""

    contprovider = "oci"
    sizes = ""  # the sizes of the pool's VMs

    def written(self) -> str:
        return super().written() + self.sizes

    async def end_everything(self) -> None:
        if self.sizes and self.alive:  # otherwise the pool's VMs would outlive the test
            self.sizes = ""
            await self.restart()
            pods = len(await self.sandboxes())
            await self.until(lambda: len(self.taps().splitlines()) == pods, "the pool's VMs have ended")
        await super().end_everything()

    async def set_up_large(self, *, preload: bool = False) -> None:
        """Start the daemon with an image of 80 MiB on the node."""
        registry = await deferToThread(Registry().start)
        self.addCleanup(deferToThread, registry.stop)
        self.large = await deferToThread(registry.push, "large", "1", large(*LARGE))
        preloaded = [self.large] if preload else []
        self.config["images"] = {"insecure_registries": [registry.host], "preload": preloaded}
        await self.start()
        pull = cri.PullImageRequest(image=cri.ImageSpec(image=self.large))
        await self.image_service.PullImage(pull, timeout=300.0)

    def of_large(self, name: str, script: str, attempt: int = 0) -> Any:
        return self.box(name, script, attempt, image=cri.ImageSpec(image=self.large))

    def shown(self) -> set[str]:
        """Return the layers that QEMU has open."""
        found = set()
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith(f"{self.root}/state/images/disks/") and b"qemu" in self._command(link):
                found.add(Path(target).name.partition(".")[0])
        return found

    def _command(self, link: Path) -> bytes:
        try:
            return (link.parents[1] / "cmdline").read_bytes().split(b"\0")[0]
        except OSError:
            return b""

    async def test_a_vm_has_the_disks_of_preloaded_images_from_the_start(self) -> None:
        await self.set_up_large(preload=True)
        sandbox = await self.run_pod()
        self.assertEqual(len(self.shown()), 1 + LARGE[2])
        await self.run_container(sandbox, self.of_large("big", "cat /data/*/* | wc -c; exec sleep 1000"))
        await self.until(lambda: len(self.lines("big")) == 1, "the log of the large image")
        self.assertEqual(len(self.shown()), 1 + LARGE[2])

    async def test_a_vm_of_the_pool_has_run_a_container_and_shows_none_of_it(self) -> None:
        self.sizes = "\n[[pool.sizes]]\ncount = 1\n"
        await self.start()
        await self.until(lambda: "waits in the pool" in self.log, "a VM waits")
        sandbox = await self.run_pod()
        self.assertEqual(self.log.count("waits in the pool"), 1)
        main = await self.run_container(sandbox, self.box(script="echo hello; exec sleep 1000"))
        await self.until(lambda: self.lines("main") == ["hello"], "its log")
        answer = await self.runtime.ListContainers(cri.ListContainersRequest(), timeout=30.0)
        self.assertEqual([each.id for each in answer.containers], [main])

    async def test_containers_of_two_images_in_one_pod(self) -> None:
        await self.set_up_large()
        sandbox = await self.run_pod(hostname="web-0")
        small = await self.run_container(sandbox, self.box("small", "echo hello; exec sleep 1000"))
        script = "cat /data/*/* | wc -c; echo over >/data/0/0; exec sleep 1000"
        big = await self.run_container(sandbox, self.of_large("big", script))
        self.assertNotIn("loaded into sandbox", self.log)  # as an archive
        await self.until(lambda: self.lines("small") == ["hello"], "the log of busybox")
        await self.until(lambda: len(self.lines("big")) == 1, "the log of the large image")
        self.assertGreater(int(self.lines("big")[0]), 219 << 20)
        self.assertEqual((await self.execute(small, "hostname")).stdout, b"web-0\n")
        self.assertEqual((await self.execute(big, "cat", "/data/0/0")).stdout, b"over\n")
        self.assertEqual((await self.execute(small, "sh", "-c", "exit 4")).exit_code, 4)
        beside = await self.run_container(sandbox, self.of_large("beside", "cat /data/0/0 | wc -c; exit 3"))
        status = await self.in_state(beside, cri.CONTAINER_EXITED)
        self.assertEqual(status.exit_code, 3)
        await self.until(lambda: len(self.lines("beside")) == 1, "the log of the third")
        self.assertGreater(int(self.lines("beside")[0]), 5)  # the image's file, not what `big` wrote
        self.assertEqual(len(self.shown()), 1 + LARGE[2])
        stop = cri.StopContainerRequest(container_id=small, timeout=0)
        await self.runtime.StopContainer(stop, timeout=90.0)
        self.assertEqual((await self.container_status(small)).exit_code, 137)
        await self.stop_pod(sandbox)
        self.assertEqual((self.taps(), self.shown()), ("", set()))

    async def test_a_killed_daemon_changes_nothing_and_the_next_unplugs_what_is_not_used(self) -> None:
        self.config["times"] = {"unused_images": 1.0}
        await self.set_up_large()
        sandbox = await self.run_pod()
        script = "i=0; while true; do echo line $i; i=$((i+1)); sleep 0.2; done"
        main = await self.run_container(sandbox, self.box(script=script))
        big = await self.run_container(sandbox, self.of_large("big", "exec sleep 1000"))
        before = await self.container_status(main)
        seen = len(self.lines("main"))
        await self.restart()
        await self.until(partial(self.has_lines, seen + 15), "the log goes on")
        self.assertEqual((await self.container_status(main)).started_at, before.started_at)
        await self.runtime.RemoveContainer(cri.RemoveContainerRequest(container_id=big), timeout=90.0)
        await self.until(lambda: len(self.shown()) == 1, "only busybox's layer is plugged in")
        again = await self.run_container(sandbox, self.of_large("big", "ls /data | wc -l", 1))
        await self.in_state(again, cri.CONTAINER_EXITED)
        await self.until(lambda: self.lines("big")[-1:] == [str(LARGE[2])], "the image is there again")
        lines = self.lines("main")
        self.assertEqual(lines, [f"line {number}" for number in range(len(lines))])
