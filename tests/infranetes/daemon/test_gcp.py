"""The daemon with pods on a simulated Compute Engine: as a process, through the CRI, killed, with faults."""

from __future__ import annotations

import secrets

from infranetes_common import cri
from tests.infranetes.daemon.case import DaemonCase, reactor
from tests.support.clouds.faults import Kind
from tests.support.clouds.gce import GceWorld


class GcpDaemonTests(DaemonCase):
    timeout = 300

    def setUp(self) -> None:
        super().setUp()
        self.world = GceWorld(reactor, self.root / "machines")
        self.world.start()
        self.config.update(provider="gcp", providers={"gcp": self.world.table()})
        self.config["cluster"] = f"test-{secrets.token_hex(4)}"
        self.config["times"] = {"sweep": 1.0}

    async def end_everything(self) -> None:
        await super().end_everything()
        try:
            self.assertEqual(self.world.holdings(), [])
        finally:
            await self.world.stop()

    async def test_a_pods_life_over_a_killed_daemon_throttling_and_its_preemption(self) -> None:
        self.world.faults.add(Kind.THROTTLE, share=0.2)
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
        await self.until(lambda: not self.world.holdings(), "nothing is left", 30.0)
