# SPDX-License-Identifier: Apache-2.0
"""A case with pods on the bridge, which are network namespaces, and with their firewalls."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from ipaddress import IPv4Network, ip_network
from typing import ParamSpec, TypeVar

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from infranetes.providers.qemu.network.bridge import Bridge
from infranetes.providers.qemu.network.firewalls import BridgeFirewalls
from infranetes_common.concurrency import run_in_thread
from infranetes_common.pod_firewall import OPEN, Allowed, PodFirewall, Ports
from infranetes_common.reactors import installed
from tests.harness.needs import needs_netns
from tests.support import pod_namespaces
from tests.support.pod_namespaces import Connection, Host, Machine, Node, Pod, ip

reactor = installed()
P = ParamSpec("P")
T = TypeVar("T")
SUBNET = IPv4Network("10.221.0.0/24")
NODE, OUTSIDE_OF_NODE, OUTSIDE = "10.221.0.1", "198.18.221.1", "198.18.221.2"
EVERYWHERE = ip_network("0.0.0.0/0")


def allowed(*networks: str, ports: tuple[Ports, ...] | None = None) -> Allowed:
    return Allowed(tuple(sorted(IPv4Network(each) for each in networks)), ports)


async def blocking(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await run_in_thread(reactor, functools.partial(work, *args, **kwargs))


@needs_netns
class FirewallCase(TestCase):
    """Three pods, and a machine outside.

    :ivar policies: False: the pods have no firewalls. :ivar share: of the connection table.
    :ivar together: of it, for all pods; None: the ordinary one.
    """

    timeout = 300.0
    policies = True
    share = 16384
    together: int | None = None

    async def setUp(self) -> None:
        word = secrets.token_hex(4)
        self.bridge = f"inf{word}"
        self.network = Bridge(reactor, self.bridge, 1500, share=self.share, together=self.together)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.network.remove()))
        await self.network.set_up(SUBNET, [])
        self.firewalls = BridgeFirewalls(reactor, self.bridge)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.firewalls.remove()))
        if self.policies:
            await self.firewalls.set_up({})
        self.node = Node(NODE)
        self.addCleanup(self.node.end)
        self.a, self.b, self.c = [await self.pod(letter, f"10.221.0.{number}")
                                  for number, letter in enumerate("abc", 5)]  # fmt: skip
        self.uplink = f"out{word}"
        self.outside = await blocking(self.machine_outside, self.uplink)
        self.addCleanup(self.outside.end)

    async def pod(self, letter: str, address: str) -> Pod:
        made = await blocking(Pod, f"{self.bridge}000{letter}", address, NODE)
        self.addCleanup(made.end)
        await self.network.allow(made.port)
        await self.network.join(made.port)
        return made

    def machine_outside(self, interface: str) -> Machine:
        made = Machine(interface, OUTSIDE, OUTSIDE_OF_NODE, "02:00:00:00:00:02")
        ip("address", "add", f"{OUTSIDE_OF_NODE}/24", "dev", interface)
        ip("-n", made.name, "route", "add", str(SUBNET), "via", OUTSIDE_OF_NODE)
        return made

    async def set(
        self, pod: Pod, ingress: list[Allowed] | None = None, egress: list[Allowed] | None = None
    ) -> None:
        firewall = PodFirewall(
            None if ingress is None else tuple(ingress), None if egress is None else tuple(egress)
        )
        await self.firewalls.set(pod.port, firewall)

    async def open_all(self) -> None:
        for each in (self.a, self.b, self.c) if self.policies else ():
            await self.firewalls.set(each.port, OPEN)

    async def connection(self, client: Host, server: Host, port: int = 8000, to: str = "") -> Connection:
        made = await blocking(pod_namespaces.tcp, client, server, port, True, to)
        assert made is not None, f"no connection from {client.address} to {server.address}"
        self.addCleanup(made.end)
        return made

    async def reaches(self, client: Host, server: Host, port: int = 8000, to: str = "") -> None:
        """Assert that `client` can connect to `server`, and that data passes in both directions."""
        made = await self.connection(client, server, port, to)
        for back in (False, True):
            self.assertTrue(await blocking(made.carries, True, back))
        made.end()

    async def cannot_reach(self, client: Host, server: Host, port: int = 8000, to: str = "") -> None:
        self.assertIsNone(await blocking(pod_namespaces.tcp, client, server, port, False, to))
