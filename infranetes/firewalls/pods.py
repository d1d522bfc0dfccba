# SPDX-License-Identifier: Apache-2.0
"""Pods' firewalls on the node, for pods whose packets it routes: where no guest can get around them.

An nftables table `ip` judges what comes from and goes to the pods behind one device:

    hook     what it does
    forward  judges what is routed. Services' addresses are translated already, and sources that the node
             masquerades not yet
    input    judges packets from a pod to the node itself
    output   nothing: kubelet's probes and the agent's connection are never cut; but it keeps the node from
             telling pods of shorter ways

An ICMP error counts as part of the connection that it quotes, and is judged by that one's firewalls. So one
from a pod passes only if the pod is an end of the connection. Routers beyond the device may tell of any.

A pod is judged by its address; that it has no other is for others to see to. One whose firewall isn't known
has no connections but those from the node.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes_common.addresses import nft_address
from infranetes_common.commands import Command, check, run
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError
from infranetes_common.nftables_watch import TablesWatch, open_socket
from infranetes_common.pod_firewall import OPEN, PodFirewall
from infranetes_common.pod_firewall_rules import Way, chains, listed, replacing
from infranetes_common.reactors import IReactor

_SECONDS = 60.0  # for each run of nft: all pods' firewalls may have some 100,000 networks
NAMES = {Way.INGRESS: "ingress", Way.EGRESS: "egress"}

_log = Logger()


class FirewalledPod(Protocol):
    """A pod that has a firewall; hashable."""

    @property
    def address(self) -> str:
        """The address that identifies the pod's packets."""

    @property
    def name(self) -> str:
        """The name that its chains' names are made from."""


G = TypeVar("G", bound=FirewalledPod)
G_contra = TypeVar("G_contra", bound=FirewalledPod, contravariant=True)


class ExtraTable(Protocol[G_contra]):
    """The additions that one kind of device needs to the table `ip`: a table of another family, and rules.

    :ivar family: nftables' name of that family. :ivar needs: the kernel's configuration that it requires.
    """

    family: str
    needs: str

    def table(self) -> str:
        """Return the content of the table."""

    def elements(self, table: str, pod: G_contra, firewall: PodFirewall | None) -> Sequence[str]:
        """Return the lines that add a pod to the table, or remove it if `firewall` is None."""

    def unjudged(self) -> str:
        """Return a rule that accepts the packets that `ip forward` is to let pass unjudged."""


class FirewallTables(Generic[G]):
    """The firewall tables of one device. Each call is one transaction in the kernel.

    :ivar watch: once begun, it soon restores tables that another program has changed.
    :param table: the tables' name. :param beside: None if the table `ip` is the only one.
    :param inside: the prefix of commands in the network namespace. :param opener: `open_socket` there.
    """

    def __init__(
        self,
        reactor: IReactor,
        table: str,
        device: str,
        beside: ExtraTable[G] | None = None,
        inside: Sequence[str] = (),
        opener: Callable[[], socket.socket] = open_socket,
    ) -> None:
        self._reactor = reactor
        self._table = table
        self._device = device
        self._beside = beside
        self._families = ["ip"] if beside is None else [beside.family, "ip"]
        self._inside = list(inside)
        self._firewalls: dict[G, PodFirewall] = {}
        self._lock = DeferredLock()
        self._there = False
        tables = [(family, table) for family in self._families]
        self.watch = TablesWatch(reactor, tables, self._mend, opener)

    async def set_up(self, firewalls: Mapping[G, PodFirewall]) -> None:
        """Make the tables, or replace those that are there. Idempotent.

        :param firewalls: the firewalls of pods; all others are closed.
        :raise FailedPrecondition: the kernel can't have such tables.
        """
        async with self._lock:
            self._firewalls = dict(firewalls)
            self._there = False
            await self._begin()

    async def ensure(self) -> None:
        """Make the tables of what is known, unless they are there. Idempotent.

        :raise FailedPrecondition: the kernel can't have such tables.
        """
        async with self._lock:
            if not self._there:
                await self._begin()
        await self.restore()

    async def restore(self) -> None:
        """Make the tables again if another program has removed them, as the reload of a firewall does."""
        async with self._lock:
            for family in self._families if self._there else ():
                command = [*self._inside, "nft", "--terse", "list", "table", family, self._table]
                if (await run(self._reactor, Command(command, _SECONDS))).code != 0:
                    _log.warn("the nftables table {family} {table} was gone and is made again",
                              family=family, table=self._table)  # fmt: skip
                    await self._make()
                    return

    async def set(self, pod: G, firewall: PodFirewall) -> None:
        """Put a pod's firewall in force, also for existing connections. Idempotent.

        :raise InfranetesError: that failed; the previous firewall is in force.
        """
        async with self._lock:
            before = dict(self._firewalls)
            self._firewalls[pod] = firewall
            try:
                await self._change(await run_in_thread(self._reactor, self._thd_script, pod, firewall))
            except BaseException:
                self._firewalls = before
                raise

    async def keep(self, pod: G, firewall: PodFirewall, save: Callable[[PodFirewall | None], None]) -> None:
        """Put a pod's firewall in force, and have the next daemon know what is in force.

        :param save: saves it for that one, or that there is none. Blocks.
        :raise InfranetesError: why it can't be; the one before is in force, and saved.
        """
        await run_in_thread(self._reactor, save, firewall)
        try:
            await self.set(pod, firewall)
        except InfranetesError:
            await run_in_thread(self._reactor, save, self._firewalls.get(pod))
            raise

    async def forget(self, pod: G) -> None:
        """Close a pod's firewall, and remove its chains. Idempotent."""
        async with self._lock:
            self._firewalls.pop(pod, None)
            if not self._there:
                return
            emptied = replacing("ip", self._table, dict.fromkeys(_chains(pod, OPEN), ()))
            await self._change(emptied + self._elements(pod, None))
            gone = "".join(f"delete chain ip {self._table} {name}\n" for name in _chains(pod, OPEN))
            # Kernels before 6.2 refuse to delete a chain just after its last use. An empty one does no harm.
            with contextlib.suppress(InfranetesError):
                await self._nft(gone)

    async def remove(self) -> None:
        """Remove the tables: everything is allowed. Idempotent."""
        async with self._lock:
            self._there = False
            self._firewalls.clear()
            for family in self._families:
                with contextlib.suppress(InfranetesError):
                    await self._nft(
                        f"table {family} {self._table} {{}}\ndelete table {family} {self._table}\n"
                    )

    async def _mend(self, sure: bool) -> None:
        if not sure:
            await self.restore()
            return
        async with self._lock:
            if self._there:
                _log.warn(
                    "the nftables tables {table} were changed by somebody else: they are made again",
                    table=self._table,
                )
                await self._make()

    async def _begin(self) -> None:
        try:
            await self._make()
        except InfranetesError as error:
            needs = "nftables" if self._beside is None else self._beside.needs
            raise FailedPrecondition(
                f"network policies can't be enforced: {error}; the kernel needs {needs}; or turn them off by "
                "kubernetes.network_policies = false"
            ) from error
        self._there = True

    async def _change(self, script: str) -> None:
        """Change the tables; if that fails, for instance because they are gone, make them anew."""
        try:
            await self._nft(script)
        except InfranetesError as error:
            _log.warn("the pods' firewalls are made again: {error}", error=str(error))
            await self._make()

    def _thd_script(self, pod: G, firewall: PodFirewall) -> str:
        """Return the script for one pod. It may have ten thousand networks for each of many ports."""
        return replacing("ip", self._table, _chains(pod, firewall)) + self._elements(pod, firewall)

    async def _make(self) -> None:
        await self._nft(await run_in_thread(self._reactor, self._thd_all, dict(self._firewalls)))

    def _thd_all(self, firewalls: Mapping[G, PodFirewall]) -> str:
        """Return the script that makes the tables anew."""
        every: dict[str, list[str]] = {}
        for pod, firewall in firewalls.items():
            every.update(_chains(pod, firewall))
        beside = self._beside
        tables = [] if beside is None else [(beside.family, beside.table())]
        script = ""
        for family, text in (*tables, ("ip", self._ip_table() + listed(every))):
            script += f"table {family} {self._table} {{}}\ndelete table {family} {self._table}\n"
            script += f"table {family} {self._table} {{\n{text}}}\n"
        for pod, firewall in firewalls.items():
            script += self._elements(pod, firewall)
        return script

    def _elements(self, pod: G, firewall: PodFirewall | None) -> str:
        """Return the lines that add a pod to the tables or, with None, remove it."""
        ip, address = f"ip {self._table}", nft_address(pod.address)
        verbs = ["add"] if firewall is not None else ["add", "delete"]
        lines = [f"{verb} element {ip} pods {{ {address} }}" for verb in verbs]
        lines += [f"{verb} element {ip} ends {{ {address} . {address} }}" for verb in verbs]
        for way in Way:
            element = f"{{ {address} : jump {_chain(pod, way)} }}"
            lines += [f"{verb} element {ip} {NAMES[way]} {element}" for verb in verbs]
        if self._beside is not None:
            lines += self._beside.elements(self._table, pod, firewall)
        return "".join(line + "\n" for line in lines)

    def _ip_table(self) -> str:
        device = f'"{self._device}"'
        unjudged = "" if self._beside is None else self._beside.unjudged()
        return f"""
            set pods {{ type ipv4_addr; }}
            set ends {{ type ipv4_addr . ipv4_addr; }}
            map egress {{ type ipv4_addr : verdict; }}
            map ingress {{ type ipv4_addr : verdict; }}
            chain forward-egress {{
                type filter hook forward priority 0; policy accept;
                {unjudged}
                iifname {device} ip saddr != @pods drop
                iifname {device} ct state related meta l4proto icmp goto error
                oifname {device} ip daddr != @pods drop
                iifname {device} goto judge-egress
                oifname {device} goto judge-egress
            }}
            chain error {{
                ip saddr . ct original ip saddr @ends goto judge-egress
                ip saddr . ct reply ip saddr @ends goto judge-egress
                drop
            }}
            chain forward-ingress {{
                type filter hook forward priority 1; policy accept;
                {unjudged}
                iifname {device} goto judge-ingress
                oifname {device} goto judge-ingress
            }}
            chain to-node {{
                type filter hook input priority 0; policy accept;
                iifname {device} goto judge-to-node
            }}
            chain from-node {{
                type filter hook output priority 0; policy accept;
                oifname {device} icmp type redirect drop
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
                ct state related meta l4proto icmp ip saddr . ct original ip saddr != @ends \\
                    ip saddr . ct reply ip saddr != @ends drop
                ct direction reply accept
                ip saddr != @pods drop
                ct state invalid,untracked ip saddr vmap @egress
                ct original ip saddr vmap @egress
            }}
            """

    async def _nft(self, script: str) -> None:
        with self.watch.ours():
            await check(self._reactor, Command([*self._inside, "nft", "-f", "-"], _SECONDS, script.encode()))


def _chain(pod: FirewalledPod, way: Way) -> str:
    return f"{NAMES[way]}-{pod.name}"


def _chains(pod: FirewalledPod, firewall: PodFirewall) -> dict[str, list[str]]:
    """Return a pod's chains."""
    found: dict[str, list[str]] = {}
    for way in Way:
        found.update(chains(_chain(pod, way), firewall, way, [pod.address]))
    return found
