# SPDX-License-Identifier: Apache-2.0
"""The daemon with pods on a simulated EC2: as a process, through the CRI, killed, and with faults between."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import gatherResults

from infranetes.providers.cloud.aws.bundled import offers
from infranetes_common.concurrency import start
from infranetes_common.wire import cri
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import reactor
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.infranetes.kubernetes.api_server import SimulatedApiServer
from tests.support.clouds.aws import SimulatedAws
from tests.support.clouds.faults import FaultKind
from txgrpc import Code, GrpcError


def _sandbox(instance: Any) -> str:
    """Return the sandbox whose VM an instance is. :param instance: as EC2 describes it."""
    return str(next(tag["Value"] for tag in instance["Tags"] if tag["Key"] == "infranetes-sandbox"))


@needs_registry
class AwsDaemonTests(CloudDaemonCase):
    """Pods on EC2."""

    provider = "aws"
    make_world = SimulatedAws

    async def test_a_pods_life_over_a_killed_daemon_and_throttling(self) -> None:
        self.world.faults.add(FaultKind.THROTTLE, share=0.2)
        await self.start()
        sandbox = await self.run_pod(annotations={"infranetes.aws.instancetype": "t3.small"})
        [instance] = self.world.instances()
        self.assertEqual(instance["InstanceType"], "t3.small")
        container = await self.run_container(sandbox, self.box(script="echo hello; sleep 1000"))
        brief = await self.run_container(sandbox, self.box("brief", script="exit 7"))
        self.assertEqual((await self.in_state(brief, cri.CONTAINER_EXITED)).exit_code, 7)
        await self.restart()
        await self.in_state(container, cri.CONTAINER_RUNNING)
        self.assertEqual([one["InstanceId"] for one in self.world.instances()], [instance["InstanceId"]])
        request = cri.ExecSyncRequest(container_id=container, cmd=["sh", "-c", "echo there"], timeout=10)
        self.assertEqual((await self.runtime.ExecSync(request, timeout=20.0)).stdout, b"there\n")
        asked = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        status = await self.runtime.PodSandboxStatus(asked, timeout=10.0)
        self.assertEqual(status.status.network.ip, instance["PrivateIpAddress"])
        await self.stop_pod(sandbox)
        await self.nothing_is_left()
        await self.remove_pod(sandbox)

    async def test_a_pod_that_requests_memory_and_limits_none_has_it(self) -> None:
        """kubelet does not say: an annotation or the API server does, or else the smallest type is used."""
        server = SimulatedApiServer(reactor)
        server.start()
        self.addCleanup(server.stop)
        of_api, pods = {"kubernetes.io/config.source": "api"}, "/api/v1/namespaces/default/pods"
        server.pods[f"{pods}/web"] = {
            "metadata": {"namespace": "default", "name": "web", "uid": "uid-web"},
            "spec": {"containers": [{"name": "main", "resources": {"requests": {"memory": "8Gi"}}}]},
        }
        server.refused.add(f"{pods}/secret")
        kubeconfig = self.root / "kubeconfig"
        server.kubeconfig(kubeconfig, tokenFile="token")
        (self.root / "token").write_text("secret")
        self.config["kubernetes"] = {"kubeconfig": str(kubeconfig), "service_proxy": False}
        await self.start()
        given = {"web": of_api, "own": {"infranetes.io/memory": "8Gi"}, "secret": of_api, "small": {}}
        runs = [start(self.run_pod(name, annotations=each)) for name, each in given.items()]
        sandboxes = await gatherResults(runs, consumeErrors=True)
        memory = {offer.name: offer.memory_bytes >> 30 for offer in offers("eu-west-1")}
        has = {_sandbox(one): memory[one["InstanceType"]] for one in self.world.instances()}
        self.assertEqual([has[id] > 8 for id in sandboxes], [True, True, False, False], has)
        self.assertIn("the requests of pod default/secret are not known", self.log)
        for removed in [start(self.remove_pod(id)) for id in sandboxes]:
            await removed

    async def test_an_instance_that_is_taken_away_leaves_a_sandbox_that_is_not_ready(self) -> None:
        await self.start()
        sandbox = await self.run_pod(annotations={"infranetes.io/spot": "true"})
        [instance] = self.world.instances()
        self.world.end(instance["InstanceId"])

        async def not_ready() -> None:
            while [each.state for each in await self.sandboxes()] != [cri.SANDBOX_NOTREADY]:
                await self.sleep(0.1)

        await not_ready()
        await self.remove_pod(sandbox)

    async def test_an_annotation_that_is_wrong_is_told_by_the_cri(self) -> None:
        await self.start()
        call = self.run_pod(annotations={"infranetes.io/gpus": "lots"})
        self.assertIn("infranetes.io/gpus", await self.refused(Code.INVALID_ARGUMENT, call))
        await self.nothing_is_left()

    async def test_a_pod_whose_vm_can_not_join_the_pods_network_is_not_made(self) -> None:
        """Simulated VMs share one machine, which can't have the tunnels of all of them."""
        await self.start()
        asking = {"infranetes.io/network": "overlay"}
        said = await self.refused(Code.FAILED_PRECONDITION, self.run_pod("early", annotations=asking))
        self.assertIn("overlay.pod_cidr", said)
        await self.kill()
        self.config["overlay"] = {"pod_cidr": "10.244.3.0/24"}
        self.config["kubernetes"] = {"cluster_cidrs": ["10.244.0.0/16"], "network": "overlay"}
        await self.start()
        said = await self.refused(Code.FAILED_PRECONDITION, self.run_pod("web"))
        self.assertIn("can't join the pods' network", said)
        await self.nothing_is_left()
        sandbox = await self.run_pod("other", annotations={"infranetes.io/network": "vpc"})
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)

    async def test_a_daemon_that_is_killed_in_a_launch_leaves_a_pod_or_nothing(self) -> None:
        """Once before the VM is launched, once before its id is recorded; kubelet then retries the call."""
        for number, (when, write) in enumerate((("after", 2), ("before", 3))):
            await self.start(crash=(when, write))
            name = f"pod{number}"
            try:
                await self.run_pod(name)
            except GrpcError as error:
                self.assertIs(error.code, Code.UNAVAILABLE)
                await self.ended()
                await self.start()
            sandbox = await self.run_pod(name)
            self.assertEqual(len(self.world.instances()), 1)
            await self.stop_pod(sandbox)
            await self.remove_pod(sandbox)
            await self.nothing_is_left()
            await self.kill()
