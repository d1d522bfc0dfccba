# SPDX-License-Identifier: Apache-2.0
"""The daemon with pods on a simulated Compute Engine: as a process, through the CRI, killed, with faults."""

from __future__ import annotations

from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_registry, needs_tools
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.gce import SimulatedGce
from txgrpc import Code


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

    @slow(8, "two daemons, and an agent for each pod")
    async def test_a_confidential_pod_whose_vm_makes_no_report_runs_only_where_nobody_judges(self) -> None:
        """The agents of simulated VMs share a machine, whose processor reports on none of them."""
        features = [{"type": "SEV_SNP_CAPABLE"}]
        self.world.api.add_image("confidential", guestOsFeatures=features)
        self.config["providers"]["gcp"] |= {"sizes": ["n2d-*"], "image": "confidential"}
        wanted = {"infranetes.io/confidential": "sev-snp"}
        await self.start()
        sandbox = await self.run_pod(annotations=wanted)
        [id] = self.world.running()
        zone, _, name = id.partition(".")
        self.assertIn("n2d-standard-2", self.world.api.instances[zone, name]["machineType"])
        await self.until(lambda: "has no report on its VM" in self.log, "the log says so")
        self.config["attestation"] = {"url": "http://127.0.0.1:1/judge"}
        await self.restart()
        words = await self.refused(Code.FAILED_PRECONDITION, self.run_pod("other", annotations=wanted))
        self.assertIn("does not offer this", words)
        await self.until(lambda: self.world.running() == [id], "the other VM is gone")
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)
        await self.nothing_is_left()
