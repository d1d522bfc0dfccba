# SPDX-License-Identifier: Apache-2.0
"""The pods' firewalls on the node, where no guest can get around them.

Two nftables tables of the bridge's judge what comes from and goes to its VMs, beside those in `bridge`:

    table   hook        what it does
    bridge  prerouting  hands all that VMs send to one address to the node, which routes it: also what is for
                        another VM of the bridge, so that one place judges everything
    bridge  forward     lets packets to groups and to everybody through from VMs that may connect to everyone
                        to VMs that everyone may connect to
    ip      forward     judges what is routed. Services' addresses are translated already, and sources that
                        the node masquerades not yet
    ip      input       judges packets from a VM to the node itself
    ip      output      nothing: kubelet's probes and the agent's connection are never cut; but it keeps
                        the node from telling VMs of shorter ways

A VM is judged by its address, to which the table of `bridge` holds it. One whose firewall isn't known has no
connections but those from the node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes.providers.qemu.bridge import MAC, BridgePort, port_group
from infranetes_common.commands import check, run
from infranetes_common.errors import FailedPrecondition, InfranetesError
from infranetes_common.pod_firewall import OPEN, PodFirewall
from infranetes_common.pod_firewall_rules import Way, chains, listed, replacing
from infranetes_common.reactors import IReactor

_SECONDS = 60.0  # for each run of nft: all VMs' firewalls may have some 100,000 networks
_FAMILIES = ("bridge", "ip")
# Frames. Those to one port that it sees forwarded are on their way to an endpoint of a Service: where
# br_netfilter has translated them, it has them judged as the routed ones.
_TO_ONE = "ether daddr & 01:00:00:00:00:00 == 00:00:00:00:00:00"
_TO_MANY = "ether daddr & 01:00:00:00:00:00 != 00:00:00:00:00:00"
_NAMES = {Way.INGRESS: "ingress", Way.EGRESS: "egress"}

_log = Logger()


class Firewalls:
    """The tables of one bridge. Each call is one transaction of the kernel's.

    :param bridge: the bridge's name.
    """

    def __init__(self, reactor: IReactor, bridge: str) -> None:
        self._reactor = reactor
        self._bridge = bridge
        self._table = f"infranetes_{bridge}_firewalls"
        self._known: dict[BridgePort, PodFirewall] = {}
        self._lock = DeferredLock()
        self._there = False

    async def set_up(self, known: Mapping[BridgePort, PodFirewall]) -> None:
        """Make the tables, or replace those that are there. Idempotent.

        :param known: the firewalls of VMs; all others are closed.
        :raise FailedPrecondition: the kernel can't have such tables.
        """
        async with self._lock:
            self._known = dict(known)
            try:
                await self._make()
            except InfranetesError as error:
                raise FailedPrecondition(
                    f"network policies can't be enforced: {error}; the kernel needs nftables for bridges "
                    "(CONFIG_NF_TABLES_BRIDGE); or turn them off by kubernetes.network_policies = false"
                ) from error
            self._there = True

    async def restore(self) -> None:
        """Make the tables again if somebody has removed them, as the reload of a firewall does."""
        async with self._lock:
            for family in _FAMILIES if self._there else ():
                command = ["nft", "--terse", "list", "table", family, self._table]
                if (await run(self._reactor, command, _SECONDS)).code != 0:
                    _log.warn("the nftables table {family} {table} was gone and is made again",
                              family=family, table=self._table)  # fmt: skip
                    await self._make()
                    return

    async def set(self, port: BridgePort, firewall: PodFirewall) -> None:
        """Put a VM's firewall in force, for connections that there are too. Idempotent.

        :raise InfranetesError: why it can't be; the one before is in force.
        """
        async with self._lock:
            before = dict(self._known)
            self._known[port] = firewall
            try:
                await self._change(
                    replacing("ip", self._table, _chains(port, firewall)) + self._elements(port, firewall)
                )
            except BaseException:
                self._known = before
                raise

    async def forget(self, port: BridgePort) -> None:
        """Close a VM's firewall, and let go of its chains. Idempotent."""
        async with self._lock:
            self._known.pop(port, None)
            if not self._there:
                return
            emptied = replacing("ip", self._table, dict.fromkeys(_chains(port, OPEN), ()))
            await self._change(emptied + self._elements(port, None))
            gone = "".join(f"delete chain ip {self._table} {name}\n" for name in _chains(port, OPEN))
            # Kernels before 6.2 refuse just after its last use; an empty one is in nobody's way.
            with contextlib.suppress(InfranetesError):
                await self._nft(gone)

    async def remove(self) -> None:
        """Remove the tables: everything is allowed. Idempotent."""
        async with self._lock:
            self._there = False
            self._known.clear()
            for family in _FAMILIES:
                with contextlib.suppress(InfranetesError):
                    await self._nft(
                        f"table {family} {self._table} {{}}\ndelete table {family} {self._table}\n"
                    )

    async def _change(self, script: str) -> None:
        """Change the tables; if that can't be, as somebody has removed them, make them of what is known."""
        try:
            await self._nft(script)
        except InfranetesError as error:
            _log.warn("the pods' firewalls are made again: {error}", error=str(error))
            await self._make()

    async def _make(self) -> None:
        every: dict[str, list[str]] = {}
        for port, firewall in self._known.items():
            every.update(_chains(port, firewall))
        script = ""
        for family, text in (("bridge", self._bridge_table()), ("ip", self._ip_table() + listed(every))):
            script += f"table {family} {self._table} {{}}\ndelete table {family} {self._table}\n"
            script += f"table {family} {self._table} {{\n{text}}}\n"
        for port, firewall in self._known.items():
            script += self._elements(port, firewall)
        await self._nft(script)

    def _elements(self, port: BridgePort, firewall: PodFirewall | None) -> str:
        """Lines that make a VM known to the tables, or forgotten (None)."""
        ip, bridge = f"ip {self._table}", f"bridge {self._table}"
        verbs = ["add"] if firewall is not None else ["add", "delete"]
        lines = [f"{verb} element {ip} pods {{ {port.address} }}" for verb in verbs]
        for way in Way:
            element = f"{{ {port.address} : jump {_chain(port, way)} }}"
            lines += [f"{verb} element {ip} {_NAMES[way]} {element}" for verb in verbs]
            is_open = firewall is not None and way.of(firewall) is None
            for verb in ["add"] if is_open else ["add", "delete"]:
                lines.append(f'{verb} element {bridge} open-{_NAMES[way]} {{ "{port.tap}" }}')
        return "".join(line + "\n" for line in lines)

    def _bridge_table(self) -> str:
        ours = f"iifgroup {port_group(self._bridge)} ether type ip"
        return f"""
            set open-egress {{ type ifname; }}
            set open-ingress {{ type ifname; }}
            chain route {{
                type filter hook prerouting priority -100; policy accept;
                {ours} {_TO_ONE} ether daddr set {MAC} meta pkttype set host
            }}
            chain groups {{
                type filter hook forward priority -100; policy accept;
                {ours} {_TO_MANY} iifname != @open-egress drop
                {ours} {_TO_MANY} oifname != @open-ingress drop
            }}
            """

    def _ip_table(self) -> str:
        bridge = f'"{self._bridge}"'
        # Such packets are not routed, but br_netfilter has those of bridges pass here.
        judged_on_bridge = f"iifname {bridge} meta pkttype {{ broadcast, multicast }} accept"
        return f"""
            set pods {{ type ipv4_addr; }}
            map egress {{ type ipv4_addr : verdict; }}
            map ingress {{ type ipv4_addr : verdict; }}
            chain forward-egress {{
                type filter hook forward priority 0; policy accept;
                {judged_on_bridge}
                iifname {bridge} ip saddr != @pods drop
                oifname {bridge} ip daddr != @pods drop
                iifname {bridge} goto judge-egress
                oifname {bridge} goto judge-egress
            }}
            chain forward-ingress {{
                type filter hook forward priority 1; policy accept;
                {judged_on_bridge}
                iifname {bridge} goto judge-ingress
                oifname {bridge} goto judge-ingress
            }}
            chain to-node {{
                type filter hook input priority 0; policy accept;
                iifname {bridge} goto judge-to-node
            }}
            chain from-node {{
                type filter hook output priority 0; policy accept;
                oifname {bridge} icmp type redirect drop
            }}
            chain judge-egress {{
                ct state invalid,untracked goto judge-others
                ct original ip saddr vmap @egress
            }}
            chain judge-ingress {{
                ct reply ip saddr vmap @ingress
            }}
            chain judge-others {{
                ip saddr vmap @egress
                ip saddr vmap @ingress
                ip daddr vmap @egress
                ip daddr vmap @ingress
            }}
            chain judge-to-node {{
                ct direction reply accept
                ip saddr != @pods drop
                ct state invalid,untracked ip saddr vmap @egress
                ct original ip saddr vmap @egress
            }}
            """

    async def _nft(self, script: str) -> None:
        await check(self._reactor, ["nft", "-f", "-"], _SECONDS, script.encode())


def _chain(port: BridgePort, way: Way) -> str:
    return f"{_NAMES[way]}-{port.tap}"


def _chains(port: BridgePort, firewall: PodFirewall) -> dict[str, list[str]]:
    """A VM's chains."""
    found: dict[str, list[str]] = {}
    for way in Way:
        found.update(chains(_chain(port, way), firewall, way, [port.address]))
    return found
