# SPDX-License-Identifier: Apache-2.0
"""The pod's firewall in the kernel: tables of its own, replaced as a whole.

Outgoing packets are judged after the service proxy has translated them, incoming packets before anything
else. Some traffic always passes: the node's connections, the agent's own to the cloud's metadata service,
neighbour discovery, DHCP, without which the VM has no address, and the time that a cloud's hosts serve at
addresses of their own. The loopback interface is not filtered. If the pod has its address by a tunnel to the
node, the node judges the traffic inside, and the tunnel's own packets pass.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from ipaddress import ip_address

from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes_common.commands import Command, run
from infranetes_common.errors import InfranetesError, Unavailable
from infranetes_common.nftables import Scripts
from infranetes_common.nftables_watch import TablesWatch, open_socket
from infranetes_common.pod_firewall import OPEN, PodFirewall
from infranetes_common.pod_firewall_rules import ERRORS, FAMILIES, Way, chains, listed
from infranetes_common.reactors import IReactor
from vmserver.network.marked_connections import MARK
from vmserver.network.pod_tunnel import DEVICE

TABLE = "infranetes-firewall"  # one table of this name in each family
SECONDS = 60.0
MAX_LISTING = 16 << 20
NO_NODE = "127.0.0.1"  # stands for the node while none is known
METADATA = "169.254.169.254"
TIME = f"{{ 169.254.169.123, {METADATA} }}"  # of AWS and GCP: answered by the VM's host

_NEIGHBOURS = "nd-neighbor-solicit, nd-neighbor-advert, nd-router-solicit, nd-router-advert"
# By version of IP: the input and output accepted whatever the pod's firewall says.
_ALWAYS = {
    4: (
        f"ip saddr {METADATA} tcp sport 80 ct direction reply accept\n"
        f"    ip saddr {TIME} udp sport 123 ct direction reply accept\n    udp sport 67 udp dport 68",
        f"ip daddr {METADATA} meta mark {MARK:#x} accept\n"
        f"    ip daddr {TIME} udp dport 123 accept\n    udp sport 68 udp dport 67",
    ),
    6: (
        f"icmpv6 type {{ {_NEIGHBOURS}, mld-listener-query }} accept\n    udp sport 547 udp dport 546",
        f"icmpv6 type {{ {_NEIGHBOURS}, mld-listener-report, mld2-listener-report }} accept\n"
        "    udp sport 546 udp dport 547",
    ),
}

# By version of IP: what nobody sends for good any more, and errors, of which the VM may send those about its
# own connections. The kernel knows these. Others would count as part of the connection where they arrive.
_STALE = {4: "icmp type { redirect, source-quench }", 6: "icmpv6 type nd-redirect"}
_ERRORS = {4: f"icmp type {{ {ERRORS} }}", 6: f"icmpv6 type {{ {ERRORS}, packet-too-big }}"}

_log = Logger()


class Firewall:
    """The firewall of a network namespace.

    :ivar watch: once begun, it soon restores tables that another program has changed.
    :param namespace: its name; by default the process's own. :param opener: `open_socket` there.
    """

    def __init__(
        self, reactor: IReactor, namespace: str = "", opener: Callable[[], socket.socket] = open_socket
    ) -> None:
        self._reactor = reactor
        self._inside = ["ip", "netns", "exec", namespace] if namespace else []
        self._scripts = Scripts(reactor, namespace)
        self._lock = DeferredLock()
        self._script = ""  # the script in force; empty: this process has put none there
        self._listing = b""
        tables = [(family, TABLE) for family in FAMILIES.values()]
        self.watch = TablesWatch(reactor, tables, self.mend, opener)

    async def prepare(self) -> None:
        """Make the kernel track connections from now on. A firewall in force stays; without one, all is open.

        The rules turn tracking on. A connection that is not tracked when a firewall takes effect seems to be
        opened by the sender of its next packet: for the node's own call, that is the agent with its answer.

        :raise InfranetesError: the kernel does not track connections yet.
        """
        async with self._lock:
            if not self._script and not await self._listed():
                await self._apply(tables(OPEN, NO_NODE))

    async def put(self, firewall: PodFirewall, node: str, tunnel_port: int = 0) -> None:
        """Put a firewall in force, at one instant. Idempotent.

        :param node: the address that the node connects from, which is always allowed to.
        :param tunnel_port: of the tunnel to the node; 0: there is none.
        :raise Unavailable: it is not in force; the one before is.
        """
        script = tables(firewall, node, tunnel_port)
        async with self._lock:
            try:
                await self._apply(script)
            except InfranetesError as error:
                raise Unavailable(f"the firewall is not in force: {error}") from error

    async def reset(self) -> None:
        """Put no firewall in force, as before the first one. :raise InfranetesError: the one before is."""
        async with self._lock:
            if self._script not in ("", tables(OPEN, NO_NODE)):
                await self._apply(tables(OPEN, NO_NODE))

    async def mend(self, changed: bool = False) -> None:
        """Restore the firewall in force if another program has changed the tables.

        :param changed: the kernel has told of a change. The tables may have been looked at only after it.
        """
        async with self._lock:
            if self._script and (changed or not (listed := await self._listed()) or listed != self._listing):
                _log.warn("the pod's firewall was changed by somebody else, and is restored")
                await self._apply(self._script)

    async def _apply(self, script: str) -> None:
        with self.watch.ours():
            await self._scripts.run(script)
        self._script = script
        self._listing = await self._listed()

    async def _listed(self) -> bytes:
        found = b""
        for family in FAMILIES.values():
            command = [*self._inside, "nft", "--stateless", "list", "table", family, TABLE]
            listing = await run(self._reactor, Command(command, SECONDS, most=MAX_LISTING))
            found += listing.stdout if listing.code == 0 else b""
        return found


def tables(firewall: PodFirewall, node: str, tunnel_port: int = 0) -> str:
    """Return the script that replaces the tables."""
    return "".join(_table(version, firewall, node, tunnel_port) for version in FAMILIES)


def _table(version: int, firewall: PodFirewall, node: str, tunnel_port: int) -> str:
    family = FAMILIES[version]
    own = [node] if ip_address(node).version == version else []
    every = {
        **chains("ingress", firewall, Way.INGRESS, own, [version]),
        **chains("egress", firewall, Way.EGRESS, [], [version]),
    }
    received, sent = _ALWAYS[version]
    stale, errors = _STALE[version], _ERRORS[version]
    arrives = leaves = ""
    if tunnel_port:
        arrives, leaves = f'iifname "{DEVICE}" accept', f'oifname "{DEVICE}" accept'
        if own:
            arrives += f"\n    {family} saddr {node} udp dport {tunnel_port} accept"
            leaves += f"\n    {family} daddr {node} udp dport {tunnel_port} accept"
    return f"""table {family} {TABLE} {{}}
delete table {family} {TABLE}
table {family} {TABLE} {{
{listed(every)}
chain others {{
    jump ingress
    goto egress
}}
chain input {{
    type filter hook input priority 0; policy accept;
    iifname "lo" accept
    {stale} drop
    {received} accept
    {arrives}
    ct state invalid,untracked goto others
    ct direction original goto ingress
    ct direction reply goto egress
}}
chain output {{
    type filter hook output priority 0; policy accept;
    oifname "lo" accept
    {stale} drop
    ct state invalid {errors} drop
    {sent} accept
    {leaves}
    ct state invalid,untracked goto others
    ct direction original goto egress
    ct direction reply goto ingress
}}
}}
"""
