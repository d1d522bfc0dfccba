"""The daemon with pods on a simulated vCenter: as a process, through the CRI, killed, with faults between."""

from __future__ import annotations

import secrets

from infranetes_common import cri
from tests.infranetes.daemon.case import DaemonCase, reactor
from tests.support.clouds import tls, vcsim
from tests.support.clouds.faults import Kind
from tests.support.clouds.vsphere import VsphereWorld


class VsphereDaemonTests(DaemonCase):
    """Pods on vSphere."""

    timeout = 300

    @classmethod
    def setUpClass(cls) -> None:
        vcsim.shared()  # both take a moment, once
        tls.certificate()

    def setUp(self) -> None:
        super().setUp()
        self.world = VsphereWorld(reactor, self.root / "machines")
        self.world.start()
        self.config.update(provider="vsphere", providers={"vsphere": self.world.table()})
        self.config["cluster"] = f"test-{secrets.token_hex(4)}"
        self.config["times"] = {"sweep": 1.0}

    async def end_everything(self) -> None:
        await super().end_everything()
        try:
            self.assertEqual(self.world.holdings(), [])
        finally:
            await self.world.stop()

    async def nothing_is_left(self) -> None:
        await self.until(lambda: not self.world.holdings(), "nothing is left", 30.0)

    async def test_a_pods_life_over_a_killed_daemon_and_throttling(self) -> None:
        self.world.faults.add(Kind.THROTTLE, share=0.1)
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
