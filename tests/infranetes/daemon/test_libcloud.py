# SPDX-License-Identifier: Apache-2.0
"""The daemon with pods on a simulated DigitalOcean: as a process, through the CRI, killed, with faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_registry, needs_tools
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.nodes import PLACES
from tests.support.clouds.vps import DigitalOcean, SimulatedVps


def digital_ocean(reactor: Any, directory: Path) -> SimulatedVps:
    """Return a simulated cloud."""
    return SimulatedVps(reactor, directory, DigitalOcean())


@needs_tools("wheels")
@needs_registry
class LibcloudDaemonTests(CloudDaemonCase):
    provider = "libcloud"
    make_world = staticmethod(digital_ocean)

    @slow(5, "the daemon is started twice, and looks for a VM whose launch was not answered")
    async def test_a_pods_life_with_a_lost_launch_a_lack_of_capacity_a_killed_daemon_and_throttling(
        self,
    ) -> None:
        self.world.faults.add(FaultKind.THROTTLE, share=0.2)
        self.world.faults.add(FaultKind.CAPACITY, "launch", times=1)
        self.world.faults.add(FaultKind.LOST, "launch", times=1)
        self.world.faults.add(FaultKind.STALE, "list", times=2)
        await self.start()
        sandbox = await self.run_pod()
        [id] = self.world.running()
        self.assertEqual([vm.place for vm in self.world.vms()], [PLACES[1]])
        container = await self.run_container(sandbox, self.box(script="echo hello; sleep 1000"))
        await self.restart()
        await self.in_state(container, cri.CONTAINER_RUNNING)
        self.assertEqual(self.world.running(), [id])
        asked = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        status = await self.runtime.PodSandboxStatus(asked, timeout=10.0)
        self.assertEqual(status.status.network.ip, self.world.vms()[0].address)
        self.world.end(id)
        while [each.state for each in await self.sandboxes()] != [cri.SANDBOX_NOTREADY]:
            await self.sleep(0.1)
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)
        await self.nothing_is_left()
