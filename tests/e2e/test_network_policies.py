# SPDX-License-Identifier: Apache-2.0
"""NetworkPolicies of a real VM, whose daemon is killed before they are in force."""

from __future__ import annotations

import secrets
from typing import Any

from infranetes.providers.qemu.firewalls import Firewalls
from infranetes_common.concurrency import run_in_thread
from infranetes_common.wire import cri
from tests.e2e.pod_case import PodCase
from tests.infranetes.daemon.case import reactor
from tests.infranetes.kubernetes.api_server import SimulatedApiServer
from tests.infranetes.policies.objects import labelled, namespace, policy
from tests.infranetes.policies.test_cluster import KUBECONFIG, NAMESPACES, POLICIES
from tests.support.pod_namespaces import ARRIVES, Machine, Node, connects, ip
from txgrpc import Code, GrpcError

OUTSIDE_OF_NODE, OUTSIDE = "198.18.214.1", "198.18.214.2"
AGENT = 2475  # the agent's port, which every VM serves
DOES_NOT = 3.0  # seconds within which even an emulated VM would have answered


class NetworkPolicyTests(PodCase):
    def connect_outside(self) -> None:
        self.node = Node(self.network.node)
        self.addCleanup(self.node.end)
        interface = f"out{secrets.token_hex(4)}"
        self.outside = Machine(interface, OUTSIDE, OUTSIDE_OF_NODE, "02:00:00:00:00:04")
        self.addCleanup(self.outside.end)
        ip("address", "add", f"{OUTSIDE_OF_NODE}/24", "dev", interface)

    async def follow_policies(self) -> None:
        """Start a daemon that may not see the API server's policies."""
        await run_in_thread(reactor, self.connect_outside)
        self.server = SimulatedApiServer(reactor)
        self.server.start()
        self.addCleanup(self.server.stop)
        self.server.put(NAMESPACES, namespace("default"))
        self.server.refused.add(POLICIES)
        kubeconfig = self.root / "kubeconfig"
        kubeconfig.write_text(KUBECONFIG % self.server.url)
        self.config["kubernetes"] = {"kubeconfig": str(kubeconfig), "network_policies": True}
        await self.start()

    async def end_everything(self) -> None:
        try:
            await super().end_everything()
        finally:
            await Firewalls(reactor, self.network.bridge).remove()

    def allow(self, address: str) -> None:
        """Make a policy that lets this address reach the pod's agent."""
        peers = {
            "from": [{"ipBlock": {"cidr": f"{address}/32"}}],
            "ports": [{"protocol": "TCP", "port": AGENT}],
        }
        self.server.put(POLICIES, policy("web", labelled(app="web"), "default", ingress=[peers]))

    async def reaches(self, expected: bool) -> bool:
        """Return whether the machine outside can connect to the pod. Check that the node can."""
        self.assertTrue(await run_in_thread(reactor, connects, self.node, self.address, AGENT, ARRIVES))
        seconds = ARRIVES if expected else DOES_NOT
        return await run_in_thread(reactor, connects, self.outside, self.address, AGENT, seconds)

    async def comes_true(self, expected: bool, what: str) -> None:
        deadline = reactor.seconds() + 180
        while await self.reaches(expected) != expected:
            self.assertLess(reactor.seconds(), deadline, f"not in time: {what}\n{self.log[-5000:]}")
            await self.sleep(0.2)

    async def begun(self, sandbox: str, name: str) -> Any:  # Any: a Code, or None
        """Start a container. Return the code with which that is refused; None: it runs."""
        container = await self.create(sandbox, self.box(name, "exec sleep 10000"))
        try:
            request = cri.StartContainerRequest(container_id=container)
            await self.runtime.StartContainer(request, timeout=120.0)
        except GrpcError as error:
            return error.code
        return None

    async def test_a_pod_whose_daemon_is_killed_before_its_firewall_is_closed_until_the_next_one_knows(
        self,
    ) -> None:
        await self.follow_policies()
        sandbox = await self.run_pod(config=self.pod(labels={"app": "web"}))
        status = await self.runtime.PodSandboxStatus(
            cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox), timeout=30.0
        )
        self.address = status.status.network.ip
        self.assertFalse(await self.reaches(False))
        self.allow(OUTSIDE)

        await self.kill()
        self.assertFalse(await self.reaches(False))
        await self.start()
        self.assertIs(await self.begun(sandbox, "early"), Code.UNAVAILABLE)
        self.assertFalse(await self.reaches(False))

        self.server.refused.clear()
        await self.comes_true(True, "its policy is in force")
        self.assertIsNone(await self.begun(sandbox, "main"))
        await self.kill()
        self.assertTrue(await self.reaches(True))
        await self.start()
        self.allow("192.0.2.1")
        await self.comes_true(False, "the pod that was found gets another policy")
