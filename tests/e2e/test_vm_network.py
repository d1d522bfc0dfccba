# SPDX-License-Identifier: Apache-2.0
"""What a cloud's VM does for its pod's network, in a real VM with Debian's kernel.

With QEMU the node filters packets itself, and pods have addresses of the node's subnet. So here the test
itself tells the agent, as the node tells a cloud's VM, to enforce a firewall and to make its end of a tunnel.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
from ipaddress import IPv4Network, ip_network

from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.threads import deferToThread

from infranetes.authority import Authority
from infranetes.machines.agent.client import AgentClient
from infranetes.overlay.config import OverlayConfig
from infranetes.overlay.overlay import Overlay
from infranetes.overlay.tunnels import Tunnels
from infranetes.overlay.walls import Walls
from infranetes_common.pod_firewall import CLOSED, OPEN, Allowed, PodFirewall, Ports
from infranetes_common.wire import cri, vmserver
from tests.e2e.pod_case import PodCase
from tests.harness.durations import slow
from tests.infranetes.daemon.case import reactor
from tests.support.spaces import Space
from txgrpc import Channel

NODE_END, OUTSIDE = "198.18.215.1", "198.18.215.2"
CLUSTER, SUBNET, POD = "10.87.0.0/16", "10.87.3.0/24", "10.87.3.2"
OTHER_POD = "10.87.9.9"  # an address of the machine outside, which stands for another node
SERVED, TOLD, OTHER_PORT = 8080, 8081, 8082
ARRIVES, DOES_NOT = 30.0, 3.0  # seconds to wait for packets that should arrive, or not, from an emulated VM
SERVER = f"mkdir -p /w; echo served >/w/name; httpd -p {SERVED} -h /w; echo ready; exec sleep 10000"
LARGE = 200_000  # bytes, which take many packets of full length


def allowed(network: str, port: int = 0) -> tuple[Allowed, ...]:
    return (Allowed((ip_network(network),), (Ports("TCP", port, port),) if port else None),)


@slow(90, "its VMs are emulated where there is no KVM")
class VmNetworkTests(PodCase):
    async def set_up_pod(self) -> None:
        """Set up a pod with a server, a machine outside that tells clients their addresses, and the agent."""
        self.outside = Space("out")
        self.addCleanup(self.outside.end)
        device = f"out{secrets.token_hex(4)}"
        for words in (
            f"link add {device} type veth peer name eth0 netns {self.outside.name}",
            f"address add {NODE_END}/24 dev {device}",
            f"link set {device} up",
            f"route add {OTHER_POD}/32 via {OUTSIDE}",
        ):
            subprocess.run(["ip", *words.split()], check=True)
        self.outside.ip(
            f"address add {OUTSIDE}/24 dev eth0",
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
        endpoint = wrapClientTLS(options, HostnameEndpoint(reactor, self.address, 2475))
        channel = Channel(reactor, endpoint)
        self.agent = AgentClient(self.sandbox, channel)

    async def reaches_pod(self, address: str, source: str, expected: bool = True) -> None:
        """Assert whether the pod's server can be reached. :param source: OUTSIDE, or else the node's."""

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
        await self.reaches_pod(self.address, OUTSIDE)
        self.assertEqual(await self.seen_by(OUTSIDE), NODE_END)
        for _ in range(2):
            await self.agent.set_firewall(CLOSED)
        await self.reaches_pod(self.address, OUTSIDE, expected=False)
        self.assertEqual(await self.seen_by(OUTSIDE), "")
        await self.reaches_pod(self.address, "")
        await self.agent.set_firewall(
            PodFirewall(ingress=allowed(f"{OUTSIDE}/32", SERVED), egress=allowed("198.18.0.0/15", TOLD))
        )
        await self.reaches_pod(self.address, OUTSIDE)
        self.assertEqual(await self.seen_by(OUTSIDE), NODE_END)
        await self.agent.set_firewall(PodFirewall(egress=allowed("198.18.0.0/15", OTHER_PORT)))
        self.assertEqual(await self.seen_by(OUTSIDE), "")

    async def tunnel(self) -> None:
        """Check both ends of a tunnel, where the node filters, while the VM filters everything else."""
        config = OverlayConfig(pod_cidr=SUBNET, device="infvxtest0")
        networks = [IPv4Network(CLUSTER)]
        walls = Walls(reactor, config.device, self.root / "overlay-firewalls")
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
            self.assertEqual(await self.seen_by(OUTSIDE), NODE_END, "by the VPC, as before")
            script = f"head -c {LARGE} /dev/zero | timeout {ARRIVES:.0f} nc {OTHER_POD} {TOLD} | wc -c"
            done = await self.execute(self.container, "sh", "-c", script)
            self.assertEqual(int(done.stdout), LARGE + len(POD) + 1)
            await put(CLOSED)
            await self.reaches_pod(POD, OTHER_POD, expected=False)
            self.assertEqual(await self.seen_by(OTHER_POD), "")
            self.assertEqual(await self.seen_by(OUTSIDE), "")
            for address in (POD, self.address):
                await self.reaches_pod(address, "")
            await put(PodFirewall(ingress=allowed(f"{OTHER_POD}/32"), egress=allowed(CLUSTER, TOLD)))
            await self.reaches_pod(POD, OTHER_POD)
            self.assertEqual(await self.seen_by(OTHER_POD), POD)
            self.assertEqual(await self.seen_by(OUTSIDE), "")
        finally:
            await overlay.remove("web")
            overlay.stop()
