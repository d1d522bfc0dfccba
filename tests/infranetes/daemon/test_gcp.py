# SPDX-License-Identifier: Apache-2.0
"""The daemon with pods on a simulated Compute Engine: as a process, through the CRI, killed, with faults."""

from __future__ import annotations

from infranetes_common.wire import cri
from tests.harness.needs import needs_registry, needs_tools
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.gce import SimulatedGce


@needs_tools("wheels")
@needs_registry
class GcpDaemonTests(CloudDaemonCase):
    provider = "gcp"
    make_world = SimulatedGce

    async def test_a_pods_life_over_a_killed_daemon_throttling_and_its_preemption(self) -> None:
        self.world.faults.add(FaultKind.THROTTLE, share=0.2)
        await self.start()
        sandbox = await self.run_pod(annotations={"infranetes.io/spot": "true"})
        [id] = self.world.running()
        container = await self.run_container(sandbox, self.box(script="echo hello; sleep 1000"))
        await self.restart()
        await self.in_state(container, cri.CONTAINER_RUNNING)
        self.assertEqual(self.world.running(), [id])
        asked = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        status = await self.runtime.PodSandboxStatus(asked, timeout=10.0)
        zone, _, name = id.partition(".")
        [interface] = self.world.api.instances[zone, name]["networkInterfaces"]
        self.assertEqual(status.status.network.ip, interface["networkIP"])
        self.world.preempt(id)
        while [each.state for each in await self.sandboxes()] != [cri.SANDBOX_NOTREADY]:
            await self.sleep(0.1)
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)
        await self.nothing_is_left()
