# SPDX-License-Identifier: Apache-2.0
"""The daemon with pods on a simulated vCenter: as a process, through the CRI, killed, with faults between."""

from __future__ import annotations

from infranetes_common.wire import cri
from tests.harness.needs import needs_tools
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.support.clouds import tls, vcsim
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.vsphere import SimulatedVcenter


@needs_tools("vcsim")
class VsphereDaemonTests(CloudDaemonCase):
    """Pods on vSphere."""

    provider = "vsphere"
    make_world = SimulatedVcenter

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        vcsim.shared()  # both take a moment, but only once
        tls.certificate()

    async def test_a_pods_life_over_a_killed_daemon_and_throttling(self) -> None:
        self.world.faults.add(FaultKind.THROTTLE, share=0.1)
        await self.start()
        sandbox = await self.run_pod(annotations={"infranetes.io/instance-type": "2cpu-1024mib"})
        [vm] = self.world.vms()
        self.assertEqual(vm.config.hardware.numCPU, 2)
        container = await self.run_container(sandbox, self.box(script="echo hello; sleep 1000"))
        await self.restart()
        await self.in_state(container, cri.CONTAINER_RUNNING)
        self.assertEqual(self.world.names(), [vm.name])
        asked = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        status = await self.runtime.PodSandboxStatus(asked, timeout=10.0)
        self.assertEqual(status.status.network.ip, vm.guest.ipAddress)
        await self.stop_pod(sandbox)
        await self.nothing_is_left()
        await self.remove_pod(sandbox)
