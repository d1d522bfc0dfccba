# SPDX-License-Identifier: Apache-2.0
"""The daemon with pods on a simulated OpenStack: as a process, through the CRI, killed, with faults."""

from __future__ import annotations

from infranetes_common.wire import cri
from tests.harness.needs import needs_registry, needs_tools
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.nova_resources import ZONES
from tests.support.clouds.openstack import SimulatedOpenStack
from tests.support.clouds.openstack_api import addresses_of


@needs_tools("wheels")
@needs_registry
class OpenStackDaemonTests(CloudDaemonCase):
    provider = "openstack"
    make_world = SimulatedOpenStack

    async def test_a_pods_life_with_a_refused_server_a_killed_daemon_and_throttling(
        self,
    ) -> None:
        self.world.faults.add(FaultKind.THROTTLE, share=0.2)
        table = self.config["providers"]["openstack"]
        table["settle_seconds"] = 30.0  # for that long, a launch is watched
        table["allowed_elastic_addresses"] = ["new"]
        self.world.launch_seconds = 1.0  # so that lists show each server both before and after it is refused
        self.world.faults.add(FaultKind.CAPACITY, "launch", times=1)
        self.world.faults.add(FaultKind.LOST, "launch", times=1)
        await self.start()
        sandbox = await self.run_pod(annotations={"infranetes.io/elastic-address": "new"})
        [id] = self.world.running()
        self.assertEqual([each["server"]["availability_zone"] for each in self.world.bodies], list(ZONES))
        container = await self.run_container(sandbox, self.box(script="echo hello; sleep 1000"))
        await self.restart()
        await self.in_state(container, cri.CONTAINER_RUNNING)
        self.assertEqual(self.world.running(), [id])
        asked = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        status = await self.runtime.PodSandboxStatus(asked, timeout=10.0)
        fixed, floating = addresses_of(self.world.api.servers[id])
        self.assertEqual(status.status.network.ip, fixed["addr"])
        self.assertEqual(len(self.world.holdings()), 2, floating)
        self.world.end(id)
        while [each.state for each in await self.sandboxes()] != [cri.SANDBOX_NOTREADY]:
            await self.sleep(0.1)
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)
        await self.nothing_is_left()
