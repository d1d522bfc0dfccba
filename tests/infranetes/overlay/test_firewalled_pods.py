# SPDX-License-Identifier: Apache-2.0
"""Firewalls at the node's end of its tunnels keep the same promises as those that providers enforce."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from zope.interface import implementer

from infranetes.firewalls.pods import FirewallTables
from infranetes.overlay.overlay import Overlay
from infranetes.providers.interface import IFirewallsPods
from infranetes_common.concurrency import deferred, run_in_thread
from infranetes_common.errors import Unavailable
from infranetes_common.pod_firewall import PodFirewall
from tests.contract.firewalled_pods import ClosedPodsContract, Talk
from tests.infranetes.overlay.case import GATEWAY, OTHER_POD, PODS, TunnelCase, reactor
from tests.support import pod_namespaces
from tests.support.pod_namespaces import Connection
from tests.support.spaces import Space

P = ParamSpec("P")
T = TypeVar("T")
SERVED = 8000


async def blocking(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await run_in_thread(reactor, functools.partial(work, *args, **kwargs))


class Place:
    """A namespace that plays a machine with that address. `end` closes its sockets."""

    def __init__(self, space: Space, address: str) -> None:
        self.address = address
        self._space = space
        self._sockets: list[socket.socket] = []

    def socket(self, kind: int, protocol: int = 0) -> socket.socket:
        made = self._space.inside(lambda: socket.socket(socket.AF_INET, kind, protocol))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._sockets.append(made)
        return made

    def end(self) -> None:
        for each in self._sockets:
            each.close()


@implementer(IFirewallsPods)
class AtTunnels:
    """A daemon's overlay, addressed by sandbox."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay

    @deferred
    async def set_firewall(self, instance_id: str, firewall: PodFirewall) -> None:
        await self.overlay.set_firewall(instance_id, firewall)


class Talking:
    """A connection between namespaces."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def goes_on(self, expected: bool) -> bool:
        return await blocking(self._connection.carries, expected)


class OverlayFirewallsTests(ClosedPodsContract, TunnelCase):
    """The contract, for VMs that have joined the pods' network."""

    enforcing = True
    stranger = OTHER_POD

    def setUp(self) -> None:
        super().setUp()
        self.outside, self.by_node = self.place(self.other, OTHER_POD), self.place(self.node, GATEWAY)
        self.places = {f"pod{number}": self.place(space, PODS[number])
                       for number, space in enumerate(self.vms)}  # fmt: skip

    def place(self, space: Space, address: str) -> Place:
        made = Place(space, address)
        self.addCleanup(made.end)
        return made

    async def enforcer(self) -> IFirewallsPods:
        self.tunnels = AtTunnels(await self.daemon())
        return self.tunnels

    async def machine(self, enforcer: IFirewallsPods) -> str:
        number = len(self.found)
        await self.join(number)
        self.tunnels.overlay = await self.daemon()
        return f"pod{number}"

    async def next_daemon(self, enforcer: IFirewallsPods) -> IFirewallsPods:
        return await self.enforcer()

    async def idle_daemon(self, enforcer: IFirewallsPods) -> IFirewallsPods:
        self.enforcing = False
        return await self.enforcer()

    async def destroy(self, enforcer: IFirewallsPods, machine: str) -> None:
        await self.tunnels.overlay.remove(machine)
        del self.found[machine]

    def break_enforcing(self) -> Callable[[], None]:
        broken = self.patch(FirewallTables, "_nft", self.refuse)
        return lambda: broken.restore()

    async def refuse(self, script: str) -> None:
        raise Unavailable("nft is not there")

    async def port(self, machine: str) -> int:
        return SERVED

    async def connection(self, machine: str, by_node: bool, expected: bool) -> Connection | None:
        client = self.by_node if by_node else self.outside
        return await blocking(pod_namespaces.tcp, client, self.places[machine], SERVED, expected)

    async def reaches(self, machine: str, by_node: bool, expected: bool) -> bool:
        made = await self.connection(machine, by_node, expected)
        if made is not None:
            made.end()
        return made is not None

    async def talk(self, machine: str) -> Talk:
        made = await self.connection(machine, False, True)
        assert made is not None
        self.addCleanup(made.end)
        return Talking(made)
