# SPDX-License-Identifier: Apache-2.0
"""VMs that reboot by themselves on a simulated EC2: the node restores what pods had in memory there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_netns, needs_registry
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.support.clouds.aws import SimulatedAws
from vmserver.containers.machine.mounts import mounted

_IMAGE = "web:1.0"


class RebootCase(CloudDaemonCase):
    """A node where kubelet has a Secret for the pod `web`."""

    provider = "aws"
    make_world = SimulatedAws

    def setUp(self) -> None:
        super().setUp()
        self.kubelet = Path(os.path.realpath(self.root)) / "kubelet/pods/uid-web/volumes"
        self.secret = self.kubelet / "kubernetes.io~secret/key"
        self.secret.mkdir(parents=True)
        (self.secret / "key").write_text("first")

    async def end_everything(self) -> None:
        for sandbox in await self.sandboxes():
            await self.stop_pod(sandbox.id)
            await self.remove_pod(sandbox.id)
        await super().end_everything()

    def secret_mount(self, at: str) -> Any:
        return cri.Mount(container_path=at, host_path=str(self.secret), readonly=True)

    def reboot(self) -> None:
        """Reboot the only VM."""
        [vm] = self.world.seen()
        self.world.reboot(vm.id)


@slow(10, "a machine boots three times, and its agent with it")
@needs_netns
class MachineRebootTests(RebootCase):
    """Reboots of VM-image pods, whose container keeps running."""

    def setUp(self) -> None:
        super().setUp()
        self.config["imgprovider"] = self.provider
        self.cache = self.kubelet / "kubernetes.io~empty-dir/cache"
        self.cache.mkdir(parents=True)
        self.mount_tmpfs(self.cache)
        self.inside = self.root / "inside"  # shared by the simulated machine and this one

    async def end_everything(self) -> None:
        try:
            await super().end_everything()
        finally:
            self.unmount_inside()  # what an agent may have mounted before it was ended

    def mount_tmpfs(self, at: Path) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", at], check=True)
        self.addCleanup(subprocess.check_call, ["umount", str(at)])

    def unmount_inside(self) -> None:
        """Unmount everything, as a reboot does."""
        for each in self.inside.glob("*"):
            subprocess.run(["umount", "--lazy", each], check=False, stderr=subprocess.DEVNULL)

    def reads(self, name: str) -> str | None:
        """Return the text of a file in the machine, or None if it is not mounted there."""
        path = self.inside / name
        if not mounted(str(path.parent)):
            return None
        return path.read_text() if path.exists() else None

    async def started(self) -> str:
        """Run a container that mounts a Secret and an emptyDir in memory. Return its id."""
        await self.world.machine_image(_IMAGE)
        await self.start()
        pull = cri.PullImageRequest(image=cri.ImageSpec(image=_IMAGE))
        pulled = (await self.image_service.PullImage(pull, timeout=30.0)).image_ref
        mounts = [
            self.secret_mount(f"{self.inside}/secret"),
            cri.Mount(container_path=f"{self.inside}/cache", host_path=str(self.cache)),
        ]
        config = self.box(image=cri.ImageSpec(image=pulled), mounts=mounts)
        container = await self.run_container(await self.run_pod(), config)
        self.assertEqual(self.reads("secret/key"), "first")
        (self.inside / "cache/file").write_text("of the first boot")
        return container

    async def test_it_has_its_secrets_and_its_memory_again(self) -> None:
        """Also if the daemon is killed in the meantime."""
        container = await self.started()
        self.unmount_inside()
        self.reboot()
        await self.until(lambda: self.reads("secret/key") == "first", "the secret is there again", 30.0)
        await self.until(lambda: mounted(f"{self.inside}/cache"), "so is the emptyDir", 30.0)
        self.assertEqual(os.listdir(self.inside / "cache"), [], "which was in memory")
        await self.in_state(container, cri.CONTAINER_RUNNING)
        (self.secret / "key").write_text("second")
        await self.until(lambda: self.reads("secret/key") == "second", "and what changes is carried")
        await self.kill()
        self.unmount_inside()
        self.reboot()
        await self.start()
        await self.until(lambda: self.reads("secret/key") == "second", "the next daemon brings it", 30.0)
        await self.until(lambda: mounted(f"{self.inside}/cache"), "so is the emptyDir", 30.0)
        await self.in_state(container, cri.CONTAINER_RUNNING)


@needs_registry
class ContainerRebootTests(RebootCase):
    """Reboots of pods of containers, which kubelet recreates."""

    async def test_the_next_container_has_the_secrets(self) -> None:
        await self.start()
        sandbox = await self.run_pod()
        config = self.box(script="sleep 1000", mounts=[self.secret_mount("/secret")])
        first = await self.run_container(sandbox, config)
        self.reboot()
        await self.in_state(first, cri.CONTAINER_EXITED, 60.0)
        config.metadata.attempt = 1
        await self.in_state(await self.run_container(sandbox, config), cri.CONTAINER_RUNNING)
        [there] = self.root.glob("machines/*/volumes/*/directory/key")
        self.assertEqual(there.read_text(), "first")
