# SPDX-License-Identifier: Apache-2.0
"""A case with tunnels between VMs and their node, with the code of both ends, in this machine's kernel.

The node, the VMs, another node and the VPC between them are network namespaces.
"""

from __future__ import annotations

import socket
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, cast

import attrs
from twisted.trial.unittest import TestCase

from infranetes.overlay.config import OverlayConfig
from infranetes.overlay.overlay import Invitation, Overlay
from infranetes.overlay.tunnels import Tunnels
from infranetes.overlay.walls import OverlayFirewalls
from infranetes_common.network_namespaces import thd_in_namespace
from infranetes_common.nftables_watch import open_socket
from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver
from tests.harness.needs import needs_netns
from tests.harness.tools import need
from tests.support.spaces import Space
from txgrpc import Call
from vmserver.network.pod_tunnel import PodTunnel
from vmserver.rpc.pod_network import PodNetworkCalls

reactor = installed()

SUBNET, GATEWAY = "10.244.3.0/24", "10.244.3.1"
CLUSTER = ("10.244.0.0/16", "10.96.0.0/12")
NODE, OTHER_NODE, ROUTER = "192.0.2.1", "192.0.2.2", "192.0.2.254"
HOSTS = ("192.0.2.11", "192.0.2.12")  # of the VMs
PODS = ("10.244.3.2", "10.244.3.3")
OTHER_POD = "10.244.9.9"  # on the other node
INTERNET = "198.51.100.9"
PORT = 80
SHORT = 1.0  # seconds for connections that have to fail


@needs_netns
class TunnelCase(TestCase):
    """:ivar enforcing: whether the daemon enforces policies. :ivar remembered: the recorded firewalls."""

    timeout = 180
    enforcing = False

    def setUp(self) -> None:
        for program in ("ip", "bridge", "nft"):
            need(program)
        self.vpc, self.node, self.other, *self.vms = (
            self.space(word) for word in ("vpc", "node", "other", "vm0", "vm1")
        )
        self.vpc.ip(
            "link add vpc0 type bridge",
            "link set vpc0 up",
            f"address add {ROUTER}/24 dev vpc0",
            f"address add {INTERNET}/32 dev lo",
        )
        ends = {NODE: self.node, OTHER_NODE: self.other, **dict(zip(HOSTS, self.vms, strict=True))}
        for number, (address, space) in enumerate(ends.items()):
            self.vpc.connect(space, f"port{number}", "eth0")
            self.vpc.ip(f"link set port{number} master vpc0")
            space.ip(f"address add {address}/24 dev eth0", f"route add default via {ROUTER}")
        self.other.ip(f"address add {OTHER_POD}/32 dev lo", f"route add {SUBNET} via {NODE} src {OTHER_POD}")
        self.node.ip(f"route add 10.244.9.0/24 via {OTHER_NODE}")
        self.config: dict[str, Any] = {"pod_cidr": SUBNET}
        self.cluster: tuple[str, ...] = CLUSTER
        self.node.said("sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
        self.proc_sys = Path(self.mktemp())  # this process's own shows another namespace
        (self.proc_sys / "net/ipv4").mkdir(parents=True)
        (self.proc_sys / "net/ipv4/ip_forward").write_text("0\n")
        self.remembered = Path(self.mktemp())
        self.last: Overlay | None = None
        self.found: dict[str, tuple[str, str]] = {}

    def space(self, word: str) -> Space:
        space = Space(word)
        self.addCleanup(space.end)
        return space

    async def daemon(self) -> Overlay:
        """Return the overlay of a new daemon, made from its records. The previous daemon was killed."""
        config = OverlayConfig(**self.config)
        networks = [IPv4Network(each) for each in self.cluster]
        inside = self.node.command()

        def opener() -> socket.socket:
            return thd_in_namespace(self.node.name, open_socket)

        tunnels = Tunnels(reactor, config, networks, self.proc_sys, self.node.name, opener)
        walls = OverlayFirewalls(reactor, config.device, self.remembered, self.enforcing, inside, opener)
        overlay = Overlay(tunnels, walls, config, networks)
        if self.last is not None:
            await self.last.stop()
        self.last = overlay
        self.addCleanup(overlay.stop)
        await overlay.restore(self.found)
        return overlay

    async def told(self, number: int, invitation: Invitation) -> int:
        """Return how the agent of this VM answers the node's call."""
        calls = PodNetworkCalls(PodTunnel(reactor, self.proc_sys, self.vms[number].name))
        request = vmserver.JoinPodNetworkRequest(**attrs.asdict(invitation))
        return (await calls.JoinPodNetwork(request, cast(Call, None))).mtu

    async def join(self, *numbers: int) -> list[int]:
        """Have these VMs join the pods' network. Returns their MTUs."""
        mtus = []
        for number in numbers:
            id, host, overlay = f"pod{number}", HOSTS[number], await self.daemon()
            address = overlay.lease(id)
            self.assertEqual(address, PODS[number])
            self.found[id] = (address, host)
            mtus.append(await self.told(number, await overlay.invite(id, host)))
            await overlay.put(id, host, mtus[-1])
        return mtus

    def assert_joined(self, number: int) -> None:
        """Check that a pod and one of another node reach each other, by their own addresses."""
        self.assertEqual(self.vms[number].seen_as(OTHER_POD, PORT), PODS[number])
        self.assertEqual(self.other.seen_as(PODS[number], PORT, OTHER_POD), OTHER_POD)
