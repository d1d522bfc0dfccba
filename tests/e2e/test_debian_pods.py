# SPDX-License-Identifier: Apache-2.0
"""Pods that are a Debian as people have it: cloud-init, an SSH server, QEMU's guest agent, none of ours."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from infranetes_common.wire import cri
from tests.e2e.image_case import ImagePodCase
from tests.guests import catalogue
from tests.harness.needs import needs_guests
from txgrpc import Code, GrpcError

BOOT_SECONDS = 900.0  # emulated, with others beside it


class DebianCase(ImagePodCase):
    """A pod of a Debian, with a Secret."""

    async def begun(self, name: str, **annotations: str) -> str:
        """Start a daemon and the guest; return its container."""
        await self.start()
        image = await self.pulled(name, catalogue.path(f"{name}.qcow2"))
        self.secret = self.root / "kubelet/pods/uid-web/volumes/kubernetes.io~secret/keys"
        self.secret.mkdir(parents=True)
        self.write_secret("one")
        said = {f"infranetes.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
        self.sandbox = await self.run_pod(
            hostname="web-0", annotations={"infranetes.io/memory": "768Mi", **said}
        )
        mounts = [cri.Mount(container_path="/etc/keys", host_path=str(self.secret), readonly=True)]
        envs = [cri.KeyValue(key="COLOUR", value=b"green")]
        return await self.run_container(self.sandbox, self.guest(image, mounts=mounts, envs=envs))

    def write_secret(self, text: str) -> None:
        """Change the Secret as kubelet does: whole."""
        new: Path = self.secret / ".new"
        new.write_text(text)
        new.rename(self.secret / "key")

    async def run_in(self, container: str, *command: str) -> Any:
        """Run a command, once there is a way into the guest."""
        until = time.monotonic() + BOOT_SECONDS
        while True:
            try:
                return await self.execute(container, *command)
            except GrpcError as error:
                if error.code is not Code.FAILED_PRECONDITION or time.monotonic() > until:
                    raise
            await self.sleep(3.0)

    async def reads(self, container: str, command: str, text: str, seconds: float) -> None:
        """Wait until a command prints this."""
        until = time.monotonic() + seconds
        while (ran := await self.run_in(container, "sh", "-c", command)).stdout.decode() != text:
            self.assertLess(time.monotonic(), until, f"{command}: {ran}")
            await self.sleep(1.0)


@needs_guests("debian.qcow2")
class DebianTests(DebianCase):
    """A Debian with cloud-init, SSH and the guest agent."""

    async def test_its_life_by_ssh(self) -> None:
        container = await self.begun("debian")
        ran = await self.run_in(container, "sh", "-c", "hostname; id -un; echo err >&2; exit 3")
        self.assertEqual((ran.stdout, ran.stderr, ran.exit_code), (b"web-0\nroot\n", b"err\n", 3))
        await self.reads(container, "cat /etc/keys/key", "one", BOOT_SECONDS)
        await self.reads(container, "cat /etc/cloud/environment", "COLOUR=green\n", BOOT_SECONDS)
        await self.reads(container, "nproc", "1\n", 60.0)
        self.write_secret("two")
        await self.reads(container, "cat /etc/keys/key", "two", 120.0)
        request = cri.PodSandboxStatsRequest(pod_sandbox_id=self.sandbox)
        stats = (await self.runtime.PodSandboxStats(request, timeout=30.0)).stats
        self.assertGreater(stats.linux.memory.usage_bytes.value, 32 << 20)
        self.assertGreater(stats.linux.network.default_interface.rx_bytes.value, 0)
        await self.kill()
        await self.start()
        self.assertEqual((await self.run_in(container, "hostname")).stdout, b"web-0\n")
        stop = cri.StopContainerRequest(container_id=container, timeout=120)
        await self.runtime.StopContainer(stop, timeout=200.0)
        status = await self.container_status(container)
        self.assertEqual((status.state, status.exit_code), (cri.CONTAINER_EXITED, 0))
        self.assertIn("Power down", self.console())

    async def test_the_pod_may_choose_the_guest_agent(self) -> None:
        container = await self.begun("debian", guest="guest-agent")
        ran = await self.run_in(container, "sh", "-c", "cat; echo err >&2; exit 4")
        self.assertEqual((ran.stderr, ran.exit_code), (b"err\n", 4))
        await self.reads(container, "cat /etc/keys/key", "one", BOOT_SECONDS)
        self.write_secret("two")
        await self.reads(container, "cat /etc/keys/key", "two", 120.0)
