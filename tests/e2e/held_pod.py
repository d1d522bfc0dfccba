# SPDX-License-Identifier: Apache-2.0
"""A real VM with a container that counts, to be held still and cloned."""

from __future__ import annotations

import gzip
import hashlib
import time
from collections.abc import AsyncIterator

from infranetes.machines.agent.client import AgentClient
from infranetes.providers.interface import Instance, InstanceSpec
from infranetes_common.filesync.manifest import FILE, Bounds, Change, Entry
from infranetes_common.wire import cri, vmserver
from tests.contract.container_provider_case import pieces
from tests.contract.pod_provider_case import reactor
from tests.e2e.qemu_case import QemuCase
from tests.support.oci import busybox
from tests.vmserver.containers.oci.provider_case import file_system

BOUNDS = Bounds(100, 1 << 20)
SCRIPT = """
nc -l -p 9000 -e sleep 1000 &
sleep 1; (nc $ADDRESS 9000 </dev/zero >/dev/null; echo closed >/closed) &
n=0; while :; do n=$((n+1)); echo $n >>/count; sleep 0.1; done
"""
"""A connection of the pod with itself, by its own address, and a counter."""


async def file(content: bytes) -> AsyncIterator[Change]:
    """Yield the changes that make a volume a file with this content."""
    yield Entry(b"", FILE, 0o600, 0, 0, len(content), time.time_ns())
    yield content


class HeldPodCase(QemuCase):
    """The agent's calls, as the node makes them."""

    async def begun(self) -> tuple[InstanceSpec, Instance, AgentClient]:
        """Launch a VM; return what it is and its agent."""
        provider = await self.started()
        spec = self.spec()
        launched = await self.within(provider.launch(spec))
        wait = self.boot_timeout
        instance = await self.within(provider.wait_running(launched.id, wait), wait + 5)
        await self.agent_info(instance)
        return spec, instance, AgentClient(spec.sandbox_id, self.channel(instance))

    async def load(self, agent: AgentClient) -> str:
        """Bring an image; return its id."""
        built = busybox()
        for blob, diff_id in zip(built.layers, built.diff_ids, strict=True):
            data = file_system(diff_id, gzip.decompress(blob.data))
            header = vmserver.PutLayerHeader(
                diff_id=diff_id, size=len(data), digest=f"sha256:{hashlib.sha256(data).hexdigest()}"
            )
            await agent.put_layer(header, pieces(data))
        await agent.add_image(built.id, built.config.data)
        return built.id

    async def put(self, agent: AgentClient, id: str, content: bytes) -> None:
        """Bring a secret, which is one file."""
        await agent.put_volume(id, file=True, in_memory=True, bounds=BOUNDS, changes=file(content))

    def config(self, volume: str, address: str) -> cri.ContainerConfig:
        """Return the container's configuration. :param volume: its secret. :param address: the pod's."""
        return cri.ContainerConfig(
            command=["sh", "-c", SCRIPT],
            envs=[cri.KeyValue(key="ADDRESS", value=address.encode())],
            mounts=[cri.Mount(container_path="/key", host_path=f"infranetes-volume:{volume}", readonly=True)],
        )

    async def said(self, agent: AgentClient, id: str, *command: str) -> str:
        """Return what a command in a container says."""
        ran = await agent.exec_sync(id, command, 60, 90.0, 10_000)
        self.assertEqual(ran.exit_code, 0, ran.stderr)
        return ran.stdout.decode().strip()

    async def count(self, agent: AgentClient, id: str) -> int:
        """Return how far a container has counted."""
        return int(await self.said(agent, id, "sh", "-c", "tail -n 1 /count || echo 0"))

    async def counts(self, agent: AgentClient, id: str) -> int:
        """Wait until a container counts on; return how far it has got."""
        first = await self.count(agent, id)
        until = reactor.seconds() + 60
        while (now := await self.count(agent, id)) == first:
            self.assertLess(reactor.seconds(), until, "it does not run")
        return now
