# SPDX-License-Identifier: Apache-2.0
"""The node's ends of the tunnels: one VXLAN device, with each VM's pod address and its address in the VPC.

The device learns nothing from packets. This module writes the kernel's entries for each VM: a route to its
pod address, its neighbour entry, and the device's forwarding entry with the VM's address in the VPC. Before a
packet is unpacked, an nftables table holds each VM to its own address: it accepts a packet only if the inner
source address belongs to the outer one. It reads that at a fixed place, behind the headers of UDP (8 bytes),
VXLAN (8) and Ethernet (14); packets without IPv4 there are dropped. A fragment without ports is useless
without the one that has them.

The kernel's entries are compared with the wanted ones as a whole, and the differences corrected. So the
daemon after one that was killed at any instant corrects them, and so does each sweep.

What is unpacked is held as what VMs send on the node's own bridge (`qemu.network.bridge`): an ICMP
error has to quote a packet to the pod itself, nothing is for the node's loopback addresses, and each pod has
a share of the kernel's tables.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import TypedDict

import attrs
from twisted.logger import Logger

from infranetes.firewalls import fragments, shares
from infranetes.overlay.config import OverlayConfig
from infranetes.providers.subnet import gateway, mac_of
from infranetes_common.commands import Command, check, run
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument
from infranetes_common.nftables_watch import Mend, TablesWatch, open_socket
from infranetes_common.overlay import NODE_MAC, VNI
from infranetes_common.pod_firewall_rules import ERRORS, QUOTED_TO
from infranetes_common.reactors import IReactor
from infranetes_common.sysctls import raise_sysctl, set_sysctl

_SECONDS = 15.0  # for each command
_DEVICE_MTU = 65000  # no limit: each route has an MTU of its own, which applies
_DEFAULT_MTU = 1500

_log = Logger()


@attrs.frozen
class Peer:
    """One VM: its pod's address, its address in the VPC, and the MTU within the tunnel."""

    address: IPv4Address
    host: IPv4Address  # in the VPC
    mtu: int

    @property
    def mac(self) -> str:
        """The Ethernet address of its end of the tunnel."""
        return mac_of(self.address)

    @property
    def chain(self) -> str:
        """The name of the nftables chain that accepts packets from its address."""
        return f"peer_{int(self.host):08x}_{int(self.address):08x}"


class _LinkInfo(TypedDict):
    info_kind: str
    info_data: Mapping[str, int]


class _Link(TypedDict):
    """The device as `ip -j -d link show` describes it."""

    address: str
    linkinfo: _LinkInfo


@attrs.frozen
class WayTo:
    """The route from the node to a VM in the VPC."""

    source: IPv4Address  # the node's own address on this route
    mtu: int


class Tunnels:
    """The kernel's part of the overlay.

    :param cluster: the subnets whose hosts see the pods' own addresses.
    :param namespace: the network namespace's name; "": the process's own.
    :param opener: `open_socket`, in that namespace.
    """

    def __init__(
        self,
        reactor: IReactor,
        config: OverlayConfig,
        cluster: Iterable[IPv4Network],
        proc_sys: Path = Path("/proc/sys"),
        namespace: str = "",
        opener: Callable[[], socket.socket] = open_socket,
    ) -> None:
        self._inside = ["ip", "netns", "exec", namespace] if namespace else []
        self._reactor = reactor
        self._config = config
        self._device = config.device
        self._table = f"infranetes_{config.device}"
        self._cluster = list(cluster)
        self._proc_sys = proc_sys
        self._opener = opener
        self._watch: TablesWatch | None = None

    def watched(self, mend: Mend) -> TablesWatch:
        """Return a watch that calls `mend` when another program changes the table."""
        self._watch = TablesWatch(self._reactor, [("ip", self._table)], mend, self._opener)
        return self._watch

    async def way_to(self, host: IPv4Address) -> WayTo:
        """Return the route to a VM.

        :raise FailedPrecondition: a tunnel can't take this route: it leads through the pods' own subnets."""
        [route] = json.loads(await self._ip("route", "get", str(host)))
        device = str(route["dev"])
        source = IPv4Address(route["prefsrc"])
        for network in self._cluster:
            for end in (host, source):
                if end in network:
                    raise FailedPrecondition(
                        f"kubernetes.cluster_cidrs: {network} has {end}, an end of a tunnel to a VM: name "
                        "only the subnets of pods and Services, or leave the pod in the VPC"
                    )
        [link] = json.loads(await self._ip("link", "show", "dev", device))
        return WayTo(source, self._config.mtu or int(link.get("mtu", _DEFAULT_MTU)))

    async def replace(self, network: IPv4Network, peers: Sequence[Peer]) -> None:
        """Make tunnels to exactly these VMs, and remove all others. Idempotent.

        :param network: the pods' subnet, whose first address is the node's.
        :raise InfranetesError: it failed; call again."""
        if not peers:
            await self._remove()
            return
        await self._set_up(network)
        # The table comes first: it then drops packets of former peers, and accepts the first of new peers.
        divided = fragments.script(self._device)
        divided += "".join(fragments.add(self._device, str(each.address)) for each in peers)
        await self._nft(self._script(network, peers) + divided)
        # The kernel tells its size once the table above has had it follow connections.
        together = await run_in_thread(self._reactor, shares.together, self._proc_sys)
        await self._nft(shares.script(self._device, self._config.connections, together))
        try:
            await self._nft(shares.half_open(self._device))
        except InfranetesError as error:
            _log.info("half-open connections of pods stay as long as others: {error}", error=error)
        entries, before = entries_for(peers, network), await self._entries()
        await self._change(entries, before)
        present = {address for address, *_ in entries.routes}
        await self._forget(address for address, *_ in before.routes if address not in present)

    async def _forget(self, addresses: Iterable[str]) -> None:
        """Let the next pods with these addresses begin with shares of their own."""
        for address in addresses:
            fragmented = fragments.add(self._device, address) + fragments.delete(self._device, address)
            commands = [*shares.forgetting(self._device, address), (["nft", "-f", "-"], fragmented)]
            for command, script in commands:
                with suppress(InfranetesError):
                    await run(self._reactor, Command([*self._inside, *command], _SECONDS, script.encode()))

    async def mtus(self) -> Mapping[str, int]:
        """Return the MTU within each present tunnel, by the pod's address."""
        if (await self._link()) is None:
            return {}
        return {address: mtu for address, _, mtu in (await self._entries()).routes}

    async def is_right(self, network: IPv4Network, peers: Sequence[Peer]) -> bool:
        """Return whether the kernel has tunnels to exactly these VMs.

        :raise InfranetesError: the kernel's state can't be read."""
        if (await self._link()) is None:
            return not peers
        shown = await run(
            self._reactor,
            Command([*self._inside, "nft", "-j", "list", "map", "ip", self._table, "peers"], _SECONDS),
        )
        if shown.code != 0:
            return False
        chains = {
            host: verdict["goto"]["target"]
            for one in json.loads(shown.stdout)["nftables"]
            for host, verdict in one.get("map", {}).get("elem", ())
        }
        shown = await run(
            self._reactor,
            Command(
                [*self._inside, "nft", "-t", "list", "table", "ip", shares.table_of(self._device)], _SECONDS
            ),
        )
        expected = {str(each.host): each.chain for each in peers}
        return shown.code == 0 and chains == expected and await self._entries() == entries_for(peers, network)

    async def _link(self) -> _Link | None:
        found = await run(
            self._reactor,
            Command([*self._inside, "ip", "-j", "-d", "link", "show", "dev", self._device], _SECONDS),
        )
        if found.code != 0:
            return None
        link: _Link = json.loads(found.stdout)[0]
        return link

    async def _set_up(self, network: IPv4Network) -> None:
        """Make the device unless it exists, and set its address and the sysctls."""
        name, link = self._device, await self._link()
        if link is not None and link["address"] != NODE_MAC:
            raise FailedPrecondition(
                f"the node has a device {name} that is not Infranetes'; choose another name with "
                "overlay.device, or remove it"
            )
        if link is not None and link["linkinfo"]["info_data"].get("port") != self._config.port:
            await self._batch("ip", [f"link delete dev {name}"])
            link = None
        if link is None:
            await self._check_free(network)
            options = f"type vxlan id {VNI} dstport {self._config.port} nolearning"
            await self._batch("ip", [f"link add {name} address {NODE_MAC} mtu {_DEVICE_MTU} {options}"])
        if (self._proc_sys / "net/ipv6/conf" / name).exists():
            await self._sysctl(f"net/ipv6/conf/{name}/disable_ipv6", "1")
        await self._sysctl("net/ipv4/ip_forward", "1")
        memory = self._proc_sys / "net/ipv4/ipfrag_high_thresh"
        await raise_sysctl(self._reactor, memory, fragments.MEMORY)
        for setting in ("accept_redirects", "send_redirects", "accept_source_route"):
            if (self._proc_sys / "net/ipv4/conf" / name).exists():
                await self._sysctl(f"net/ipv4/conf/{name}/{setting}", "0")
        shown = json.loads(await self._ip("-4", "address", "show", "dev", name))
        own = f"{gateway(network)}/32"
        had = [f"{one['local']}/{one['prefixlen']}" for each in shown for one in each.get("addr_info", ())]
        commands = [f"address delete {each} dev {name}" for each in had if each != own]
        commands += [f"address replace {own} dev {name}", f"link set {name} up"]
        await self._batch("ip", commands)

    async def _check_free(self, network: IPv4Network) -> None:
        for each in json.loads(await self._ip("-4", "address", "show")):
            for one in each.get("addr_info", ()):
                other = IPv4Network(f"{one['local']}/{one['prefixlen']}", strict=False)
                if other.overlaps(network) and other != IPv4Network(network.network_address):
                    raise InvalidArgument(
                        f"pod CIDR {network} overlaps {other} of the node's interface {each['ifname']}; "
                        "choose another with overlay.pod_cidr"
                    )

    async def _entries(self) -> Entries:
        """Return the kernel's entries for the device."""
        name = self._device
        routes = json.loads(await self._ip("-4", "route", "show", "dev", name))
        neighbours = json.loads(await self._ip("-4", "neigh", "show", "dev", name, "nud", "permanent"))
        shown = await check(
            self._reactor, Command([*self._inside, "bridge", "-j", "fdb", "show", "dev", name], _SECONDS)
        )
        return Entries(
            frozenset(
                (each["dst"], each.get("prefsrc", ""), _mtu_of(each.get("metrics", ()))) for each in routes
            ),
            frozenset((each["dst"], each.get("lladdr", "")) for each in neighbours),
            frozenset((each["mac"], each["dst"]) for each in json.loads(shown) if "dst" in each),
        )

    async def _change(self, wanted: Entries, there: Entries) -> None:
        name = self._device
        # `replace` overwrites the route or neighbour of an address, but a MAC may have several hosts.
        kept = {each[0] for each in wanted.routes}
        lost = [f"route delete {each[0]} dev {name}" for each in there.routes if each[0] not in kept]
        lost += [f"neigh delete {each[0]} dev {name}" for each in there.neighbours if each[0] not in kept]
        gone = [f"fdb delete {mac} dev {name} dst {host} self" for mac, host in there.hosts - wanted.hosts]
        more = [
            f"neigh replace {address} lladdr {mac} dev {name} nud permanent"
            for address, mac in wanted.neighbours - there.neighbours
        ]
        more += [
            f"route replace {address} dev {name} src {source} mtu {mtu}"
            for address, source, mtu in wanted.routes - there.routes
        ]
        new = [
            f"fdb replace {mac} dev {name} dst {host} self permanent"
            for mac, host in wanted.hosts - there.hosts
        ]
        await self._batch("bridge", gone + new)
        await self._batch("ip", lost + more)

    def _script(self, network: IPv4Network, peers: Sequence[Peer]) -> str:
        pairs = ", ".join(f"{each.host} : goto {each.chain}" for each in peers)
        chains = "".join(
            f"""chain {each.chain} {{
                @th,336,32 {int(each.address):#010x} accept
                drop
            }}
            """
            for each in peers
        )
        direct = "".join(f"ip saddr {network} ip daddr {each} return\n" for each in self._cluster)
        quoted = ", ".join(f"{each.address} . {int(each.address):#x}" for each in peers)
        return f"""table ip {self._table} {{}}
        delete table ip {self._table}
        table ip {self._table} {{
            {chains}
            map peers {{
                type ipv4_addr : verdict
                elements = {{ {pairs} }}
            }}
            set errors {{
                typeof ip saddr . {QUOTED_TO}
                elements = {{ {quoted} }}
            }}
            chain prerouting {{
                type filter hook prerouting priority raw; policy accept;
                iifname "{self._device}" jump unpacked
                fib daddr type local udp dport {self._config.port} goto arriving
            }}
            chain unpacked {{
                ip daddr 127.0.0.0/8 drop
                icmp type {{ {ERRORS} }} ip saddr . {QUOTED_TO} @errors return
                icmp type {{ {ERRORS}, source-quench, redirect }} counter drop
            }}
            chain arriving {{
                @th,224,16 != 0x0800 drop
                ip saddr vmap @peers
                drop
            }}
            chain output {{
                type filter hook output priority filter; policy accept;
                oifname "{self._device}" icmp type redirect drop
            }}
            chain postrouting {{
                type nat hook postrouting priority srcnat; policy accept;
                {direct}ip saddr {network} oifname != "{self._device}" masquerade
            }}
        }}
        """

    async def _remove(self) -> None:
        link = await self._link()
        if link is not None and link["address"] == NODE_MAC:
            await self._forget(address for address, *_ in (await self._entries()).routes)
            await self._batch("ip", [f"link delete dev {self._device}"])
        if (
            await run(
                self._reactor, Command([*self._inside, "nft", "list", "table", "ip", self._table], _SECONDS)
            )
        ).code == 0:
            own = (self._table, *(each.table_of(self._device) for each in (shares, fragments)))
            await self._nft("".join(f"table ip {each} {{}}\ndelete table ip {each}\n" for each in own))

    async def _sysctl(self, name: str, value: str) -> None:
        await set_sysctl(self._reactor, self._proc_sys / name, value)

    async def _ip(self, *words: str) -> bytes:
        return await check(self._reactor, Command([*self._inside, "ip", "-j", *words], _SECONDS))

    async def _batch(self, program: str, commands: Sequence[str]) -> None:
        if commands:
            script = "".join(command + "\n" for command in commands)
            await check(
                self._reactor, Command([*self._inside, program, "-batch", "-"], _SECONDS, script.encode())
            )

    async def _nft(self, script: str) -> None:
        with nullcontext() if self._watch is None else self._watch.ours():
            await check(self._reactor, Command([*self._inside, "nft", "-f", "-"], _SECONDS, script.encode()))


@attrs.frozen
class Entries:
    """A kernel's present or wanted entries for the tunnels' device."""

    routes: frozenset[tuple[str, str, int]]  # address, source, MTU
    neighbours: frozenset[tuple[str, str]]  # address, MAC
    hosts: frozenset[tuple[str, str]]  # MAC, address in the VPC


def entries_for(peers: Iterable[Peer], network: IPv4Network) -> Entries:
    """Return the entries for these VMs."""
    peers = list(peers)
    return Entries(
        frozenset((str(each.address), str(gateway(network)), each.mtu) for each in peers),
        frozenset((str(each.address), each.mac) for each in peers),
        frozenset((each.mac, str(each.host)) for each in peers),
    )


def _mtu_of(metrics: Iterable[Mapping[str, int]]) -> int:
    return next((each["mtu"] for each in metrics if "mtu" in each), 0)
