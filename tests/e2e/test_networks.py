# SPDX-License-Identifier: Apache-2.0
"""Pods' networks in real VMs: NetworkPolicies, Services, and what a cloud's VM does for its pod's network.

With QEMU the node filters packets itself, and pods have addresses of the node's subnet. So for a cloud's VM
the test itself tells the agent, as the node does, to enforce a firewall and to make its end of a tunnel.
"""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections import Counter
from ipaddress import IPv4Network, ip_network
from pathlib import Path
from typing import Any

from twisted.internet.endpoints import wrapClientTLS
from twisted.internet.threads import deferToThread

from infranetes.cri.status import CLUSTER_CONDITION
from infranetes.ctl.cli import ask, parser, socket_of
from infranetes.identity.authority import Authority
from infranetes.machines.agent.client import AgentClient
from infranetes.machines.agent.marked import marked_endpoint
from infranetes.overlay.config import OverlayConfig
from infranetes.overlay.overlay import Overlay
from infranetes.overlay.tunnels import Tunnels
from infranetes.overlay.walls import OverlayFirewalls
from infranetes.providers.qemu.network.firewalls import BridgeFirewalls
from infranetes_common.concurrency import run_in_thread
from infranetes_common.pod_firewall import CLOSED, OPEN, Allowed, PodFirewall, Ports
from infranetes_common.wire import cri, vmserver
from tests.e2e.pod_case import PodCase
from tests.e2e.qemu_case import without_agent_port
from tests.harness.durations import slow
from tests.infranetes.daemon.case import reactor
from tests.infranetes.kubernetes.api_server import SimulatedApiServer
from tests.infranetes.policies.objects import labelled, namespace, policy
from tests.infranetes.policies.test_cluster import NAMESPACES, POLICIES
from tests.infranetes.services import objects as written
from tests.infranetes.services.test_cluster import NODES, RANGES, SERVICES, SLICES
from tests.support.pod_namespaces import ARRIVES, Machine, Node, connects, ip
from tests.support.spaces import Space
from txgrpc import Channel, Code, GrpcError

OUTSIDE_OF_NODE, OUTSIDE = "198.18.214.1", "198.18.214.2"
ANY = 8000  # a port at which nothing listens, so that a connection that gets there is refused
DOES_NOT = 3.0  # seconds within which even an emulated VM would have answered


class NetworkPolicyTests(PodCase):
    unneeded = PodCase.unneeded | {CLUSTER_CONDITION}  # policies are refused to the daemon at first

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
        self.server.kubeconfig(kubeconfig)
        self.config["kubernetes"] = {"kubeconfig": str(kubeconfig), "network_policies": True}
        await self.start()

    async def end_everything(self) -> None:
        try:
            await super().end_everything()
        finally:
            await BridgeFirewalls(reactor, self.network.bridge).remove()

    def allow(self, address: str) -> None:
        """Make a policy that lets this address reach a port of the pod."""
        peers = {
            "from": [{"ipBlock": {"cidr": f"{address}/32"}}],
            "ports": [{"protocol": "TCP", "port": ANY}],
        }
        self.server.put(POLICIES, policy("web", labelled(app="web"), "default", ingress=[peers]))

    async def reaches(self, expected: bool) -> bool:
        """Return whether the machine outside gets to the pod. Check that the node does."""
        self.assertTrue(await run_in_thread(reactor, connects, self.node, self.address, ANY, ARRIVES, True))
        seconds = ARRIVES if expected else DOES_NOT
        return await run_in_thread(reactor, connects, self.outside, self.address, ANY, seconds, True)

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


# Three servers, each of which answers with its number. Packets to fd00::/64 get a route.
SERVERS = """
ip address add fd01::1/128 dev lo; ip -6 route add fd00::/64 dev lo
for n in 1 2 3; do mkdir -p /w/$n; echo $n >/w/$n/name; httpd -p 808$n -h /w/$n; done
echo ready; exec sleep 10000
"""
# With -T, busybox' wget crashes.
ASK = """
for i in 1 2 3 4 5 6 7 8 9 10 11 12; do wget -q -O - http://{}/name || echo none; done
"""


@slow(100, "its VMs are emulated where there is no KVM")
class ServiceTests(PodCase):
    async def set_up_services(self) -> None:
        """Start a pod with three servers, and an API server without Services."""
        self.server = SimulatedApiServer(reactor)
        self.server.start()
        self.addCleanup(self.server.stop)
        self.server.put(NODES, {"metadata": {"name": "node", "labels": {}}})
        kubeconfig = self.root / "kubeconfig"
        self.server.kubeconfig(kubeconfig, tokenFile="token")
        (self.root / "token").write_text("secret")
        self.config["kubernetes"] = {"kubeconfig": str(kubeconfig)}
        await self.start()
        self.sandbox = await self.run_pod()
        status = await self.runtime.PodSandboxStatus(
            cri.PodSandboxStatusRequest(pod_sandbox_id=self.sandbox), timeout=30.0
        )
        self.address = status.status.network.ip
        privileged = cri.LinuxContainerConfig(
            security_context=cri.LinuxContainerSecurityContext(privileged=True)
        )
        self.container = await self.run_container(self.sandbox, self.box(script=SERVERS, linux=privileged))
        await self.until(lambda: "ready" in self.lines("main"), "the servers")

    def put(self, name: str, address: str, *servers: int, **spec: Any) -> None:  # Any: JSON
        """Make or change a Service of these servers of the pod."""
        six = ":" in address
        self.server.put(SERVICES, written.service(name, (address,), **spec))
        for number in (1, 2, 3):
            endpoint = written.endpoint("fd01::1" if six else self.address, ready=number in servers)
            item = written.endpoint_slice(
                endpoint,
                service=name,
                name=f"{name}-{number}",
                ports=[written.port(8080 + number)],
                kind="IPv6" if six else "IPv4",
            )
            self.server.put(SLICES, item)

    async def trace(self, destination: str, outcome: str, endpoints: int = 0) -> Any:  # Any: JSON
        """Wait until connections have this outcome, in the VM too; return infranetes-ctl's trace."""
        arguments = ["services", self.sandbox, "--trace", destination, "--json"]
        options = parser().parse_args([*arguments, "--config", str(self.root / "infranetes.toml")])
        deadline = reactor.seconds() + 120
        while True:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                done = await ask(reactor, socket_of(options), options)
            found = json.loads(out.getvalue())
            node = found["node"]
            if done == 0 and (node["outcome"], len(node["endpoints"])) == (outcome, endpoints):
                return found
            self.assertLess(reactor.seconds(), deadline, out.getvalue())
            await self.sleep(0.2)

    async def reached(self, host: str) -> Counter[str]:
        """Return which servers answer twelve connections, and how often."""
        done = await self.execute(self.container, "sh", "-c", ASK.format(host))
        return Counter(done.stdout.decode().split())

    async def test_connections_through_services_and_what_is_said_of_them(self) -> None:
        await self.set_up_services()
        self.put("plain", "10.96.0.10", 1, 2, 3)
        found = await self.trace("10.96.0.10:80", "translated", 3)
        self.assertEqual(found["services"], ["ns/plain"])
        self.assertLess({"1"}, set(await self.reached("10.96.0.10")))

        for name, address, host in (("four", "10.96.0.11", "10.96.0.11"), ("six", "fd00::11", "[fd00::11]")):
            servers = {1, 2, 3}
            while servers:  # when the endpoint of a session goes, the session sticks to another one
                self.put(name, address, *servers, sessionAffinity="ClientIP")
                await self.trace(f"{host}:80", "translated", len(servers))
                (chosen,) = await self.reached(host)
                self.assertIn(int(chosen), servers)
                servers.remove(int(chosen))

        self.server.put(RANGES, {"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/12"]}})
        await self.trace("10.96.0.99:80", "unallocated")
        await self.trace("10.96.0.10:81", "other port")
        self.assertEqual(await self.reached("10.96.0.10:81"), {"none": 12})
        found = await self.trace("10.96.0.99:80", "unallocated")
        self.assertGreaterEqual(found["vm"]["counts"]["refused_packets"], 12)
        self.assertGreaterEqual(found["vm"]["counts"]["max_flows"], 32_768)


NODE_END, FAR = "198.18.215.1", "198.18.215.2"
CLUSTER, SUBNET, POD = "10.87.0.0/16", "10.87.3.0/24", "10.87.3.2"
OTHER_POD = "10.87.9.9"  # an address of the machine outside, which stands for another node
SERVED, TOLD, OTHER_PORT = 8080, 8081, 8082
SERVER = f"mkdir -p /w; echo served >/w/name; httpd -p {SERVED} -h /w; echo ready; exec sleep 10000"
LARGE = 200_000  # bytes, which take many packets of full length


def allowed(network: str, port: int = 0) -> tuple[Allowed, ...]:
    return (Allowed((ip_network(network),), (Ports("TCP", port, port),) if port else None),)


@slow(90, "its VMs are emulated where there is no KVM")
class VmNetworkTests(PodCase):
    """What the agent does for VMs in clouds' networks, whose nodes it knows by their addresses."""

    def setUp(self) -> None:
        super().setUp()
        wrapper = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, wrapper)
        self.config["providers"]["qemu"] |= without_agent_port(wrapper)

    async def set_up_pod(self) -> None:
        """Set up a pod with a server, a machine outside that tells clients their addresses, and the agent."""
        self.outside = Space("out")
        self.addCleanup(self.outside.end)
        device = f"out{secrets.token_hex(4)}"
        for words in (
            f"link add {device} type veth peer name eth0 netns {self.outside.name}",
            f"address add {NODE_END}/24 dev {device}",
            f"link set {device} up",
            f"route add {OTHER_POD}/32 via {FAR}",
        ):
            subprocess.run(["ip", *words.split()], check=True)
        self.outside.ip(
            f"address add {FAR}/24 dev eth0",
            f"address add {OTHER_POD}/32 dev lo",
            "link set eth0 up",
            f"route add default via {NODE_END}",
        )
        self.outside.tell_callers(TOLD)
        await self.start()
        self.sandbox = await self.run_pod()
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=self.sandbox)
        self.address = (await self.runtime.PodSandboxStatus(request, timeout=30.0)).status.network.ip
        self.container = await self.run_container(self.sandbox, self.box(script=SERVER))
        await self.until(lambda: "ready" in self.lines("main"), "the server")
        options = Authority(self.root / "state").client_options(self.sandbox)
        endpoint = wrapClientTLS(options, marked_endpoint(reactor, self.address, 2475, 30.0))
        channel = Channel(reactor, endpoint)
        self.agent = AgentClient(self.sandbox, channel)

    async def reaches_pod(self, address: str, source: str, expected: bool = True) -> None:
        """Assert whether the pod's server can be reached. :param source: FAR, or else the node's."""

        def connects() -> bool:
            try:
                seconds = ARRIVES if expected else DOES_NOT
                socket.create_connection((address, SERVED), seconds, (source, 0)).close()
            except OSError:
                return False
            return True

        work = connects if not source else lambda: self.outside.inside(connects)
        self.assertEqual(await deferToThread(work), expected, f"{source or 'the node'} to {address}")

    async def seen_by(self, address: str, port: int = TOLD) -> str:
        """Return the address from which a machine sees a container connect; "": it is not reached."""
        script = f"timeout {DOES_NOT:.0f} nc {address} {port} </dev/null | head -n 1"
        done = await self.execute(self.container, "sh", "-c", script)
        return str(done.stdout.decode().strip())

    async def test_a_firewall_and_a_tunnel_in_the_vm(self) -> None:
        await self.set_up_pod()
        try:
            await self.firewall()
            await self.tunnel()
        finally:
            await self.agent.close()

    async def firewall(self) -> None:
        """Check the VM's own firewall, with no other in force."""
        await self.reaches_pod(self.address, FAR)
        self.assertEqual(await self.seen_by(FAR), NODE_END)
        for _ in range(2):
            await self.agent.set_firewall(CLOSED)
        await self.reaches_pod(self.address, FAR, expected=False)
        self.assertEqual(await self.seen_by(FAR), "")
        await self.reaches_pod(self.address, "")
        await self.agent.set_firewall(
            PodFirewall(ingress=allowed(f"{FAR}/32", SERVED), egress=allowed("198.18.0.0/15", TOLD))
        )
        await self.reaches_pod(self.address, FAR)
        self.assertEqual(await self.seen_by(FAR), NODE_END)
        await self.agent.set_firewall(PodFirewall(egress=allowed("198.18.0.0/15", OTHER_PORT)))
        self.assertEqual(await self.seen_by(FAR), "")

    async def tunnel(self) -> None:
        """Check both ends of a tunnel, where the node filters, while the VM filters everything else."""
        config = OverlayConfig(pod_cidr=SUBNET, device="infvxtest0")
        networks = [IPv4Network(CLUSTER)]
        walls = OverlayFirewalls(reactor, config.device, self.root / "overlay-firewalls")
        overlay = Overlay(Tunnels(reactor, config, networks), walls, config, networks)
        try:
            self.assertEqual(overlay.lease("web"), POD)
            invitation = await overlay.invite("web", self.address)
            request = vmserver.JoinPodNetworkRequest(
                address=invitation.address,
                gateway=invitation.gateway,
                node_host=invitation.node_host,
                port=invitation.port,
                mtu=invitation.mtu,
                networks=invitation.networks,
            )
            for _ in range(2):
                mtu = await self.agent.join_pod_network(request)
            await overlay.put("web", self.address, mtu)

            async def put(firewall: PodFirewall) -> None:
                await overlay.set_firewall("web", firewall)
                await self.agent.set_firewall(firewall, overlay.port)

            await put(OPEN)
            await self.reaches_pod(POD, OTHER_POD)
            await self.reaches_pod(POD, "")
            self.assertEqual(await self.seen_by(OTHER_POD), POD)
            self.assertEqual(await self.seen_by(FAR), NODE_END, "by the VPC, as before")
            script = f"head -c {LARGE} /dev/zero | timeout {ARRIVES:.0f} nc {OTHER_POD} {TOLD} | wc -c"
            done = await self.execute(self.container, "sh", "-c", script)
            self.assertEqual(int(done.stdout), LARGE + len(POD) + 1)
            await put(CLOSED)
            await self.reaches_pod(POD, OTHER_POD, expected=False)
            self.assertEqual(await self.seen_by(OTHER_POD), "")
            self.assertEqual(await self.seen_by(FAR), "")
            for address in (POD, self.address):
                await self.reaches_pod(address, "")
            await put(PodFirewall(ingress=allowed(f"{OTHER_POD}/32"), egress=allowed(CLUSTER, TOLD)))
            await self.reaches_pod(POD, OTHER_POD)
            self.assertEqual(await self.seen_by(OTHER_POD), POD)
            self.assertEqual(await self.seen_by(FAR), "")
        finally:
            await overlay.remove("web")
            overlay.stop()
