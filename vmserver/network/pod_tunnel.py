# SPDX-License-Identifier: Apache-2.0
"""The VM's end of the tunnel to its node: an address of the pods' network, where the VM's own is a VPC's.

The device `pod0` has the pod's address. The cluster's subnets are reached through it, from that address; and
everything sent from that address goes through it, so that replies return the way that the requests came. All
other traffic, including the agent's channel, goes as before, from the VM's own address. Nothing is learnt
from packets: the node's end is set here, and tunnel packets that are not from the node are dropped. Packets
that the rules of Services lead into the tunnel after their source address was chosen get the pod's address
too, because the node accepts no other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import attrs
from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes_common.commands import Command, check, run
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.overlay import NODE_MAC, OVERHEAD, VNI
from infranetes_common.reactors import IReactor
from infranetes_common.sysctls import set_sysctl

DEVICE = "pod0"
TABLE = "infranetes-overlay"
ROUTES = 2475  # the number of the routing table, and the preference of the rule that selects it
MAX_NETWORKS = 64
_SECONDS = 60.0  # per command, in an emulated VM
_MIN_MTU, _MAX_MTU = 576, 65535

_log = Logger()


@attrs.frozen
class PodNetwork:
    """The node's description of the pod network; see JoinPodNetwork in ``proto/vmserver.proto``."""

    address: IPv4Address
    gateway: IPv4Address
    node_host: IPv4Address
    port: int
    mtu: int
    networks: tuple[IPv4Network, ...]


def pod_network(
    address: str, gateway: str, node_host: str, port: int, mtu: int, networks: Sequence[str]
) -> PodNetwork:
    """Validate the node's description. :raise InvalidArgument: it is malformed."""
    try:
        found = PodNetwork(
            _host(address),
            _host(gateway),
            _host(node_host),
            port,
            mtu,
            tuple(map(IPv4Network, networks[: MAX_NETWORKS + 1])),
        )
    except ValueError as error:
        raise InvalidArgument(f"the pods' network: {str(error)[:200]}") from None
    if not 0 < port < 65536 or not _MIN_MTU + OVERHEAD <= mtu <= _MAX_MTU:
        raise InvalidArgument("the pods' network: the port or the MTU is out of range")
    if not 0 < len(found.networks) <= MAX_NETWORKS:
        raise InvalidArgument(f"the pods' network: 1 to {MAX_NETWORKS} subnets are needed")
    if found.address == found.gateway or any(found.node_host in each for each in found.networks):
        raise InvalidArgument("the pods' network: the node can't be reached by its own tunnel")
    return found


def _host(text: str) -> IPv4Address:
    address = IPv4Address(text)
    if address.is_loopback or address.is_multicast or address.is_unspecified or address.is_reserved:
        raise ValueError(f"{address} is no machine's address")
    return address


class PodTunnel:
    """The tunnel of this machine.

    :param namespace: the network namespace's name; none: the process's own.
    """

    def __init__(self, reactor: IReactor, proc_sys: Path = Path("/proc/sys"), namespace: str = "") -> None:
        self._inside = ["ip", "netns", "exec", namespace] if namespace else []
        self._reactor = reactor
        self._proc_sys = proc_sys
        self._lock = DeferredLock()

    async def join(self, network: PodNetwork) -> int:
        """Give the pod exactly this address and these routes; return the MTU. Idempotent.

        :raise InfranetesError: that failed, at least in part; call again."""
        async with self._lock:
            own, mtu = await self._way_to(network)
            await self._guard(network)
            await self._make_device(network, mtu)
            await self._make_ways(network, mtu)
        _log.info(
            "the pod has {address} by a tunnel from {own} to the node {node}, MTU {mtu}",
            address=str(network.address),
            own=str(own),
            node=str(network.node_host),
            mtu=mtu,
        )
        return mtu

    async def _way_to(self, network: PodNetwork) -> tuple[IPv4Address, int]:
        """Return the machine's own address on the way to the node, and the MTU within the tunnel."""
        [route] = json.loads(await self._ip("route", "get", str(network.node_host)))
        if route["dev"] == DEVICE:
            raise FailedPrecondition("the node can't be reached by its own tunnel")
        [link] = json.loads(await self._ip("link", "show", "dev", route["dev"]))
        return IPv4Address(route["prefsrc"]), min(link["mtu"], network.mtu) - OVERHEAD

    async def _guard(self, network: PodNetwork) -> None:
        """Accept tunnel packets from the node only, and send with the pod's address only."""
        script = f"""table inet {TABLE} {{}}
        delete table inet {TABLE}
        table inet {TABLE} {{
            chain prerouting {{
                type filter hook prerouting priority raw; policy accept;
                udp dport {network.port} ip saddr != {network.node_host} drop
                udp dport {network.port} meta nfproto ipv6 drop
            }}
            chain postrouting {{
                type nat hook postrouting priority srcnat; policy accept;
                oifname "{DEVICE}" ip saddr != {network.address} snat ip to {network.address}
            }}
        }}
        """
        await check(self._reactor, Command([*self._inside, "nft", "-f", "-"], _SECONDS, script.encode()))

    async def _make_device(self, network: PodNetwork, mtu: int) -> None:
        mac = ":".join(f"{byte:02x}" for byte in (0x0A, 0x58, *network.address.packed))
        shown = await run(
            self._reactor, Command([*self._inside, "ip", "-j", "-d", "link", "show", "dev", DEVICE], _SECONDS)
        )
        if shown.code == 0:
            [link] = json.loads(shown.stdout)
            data = link.get("linkinfo", {}).get("info_data", {})
            if (link["address"], data.get("id"), data.get("port")) != (mac, VNI, network.port):
                await self._batch("ip", [f"link delete dev {DEVICE}"])
                shown = attrs.evolve(shown, code=1)
        if shown.code != 0:
            options = f"type vxlan id {VNI} dstport {network.port} nolearning"
            await self._batch("ip", [f"link add {DEVICE} address {mac} mtu {mtu} {options}"])
        no_ipv6 = self._proc_sys / "net/ipv6/conf" / DEVICE / "disable_ipv6"
        if no_ipv6.exists():
            await set_sysctl(self._reactor, no_ipv6, "1")
        host = network.node_host
        shown_hosts = await check(
            self._reactor, Command([*self._inside, "bridge", "-j", "fdb", "show", "dev", DEVICE], _SECONDS)
        )
        others = [
            f"fdb delete {each['mac']} dev {DEVICE} dst {each['dst']} self"
            for each in json.loads(shown_hosts)
            if "dst" in each and each["dst"] != str(host)
        ]
        await self._batch(
            "bridge", [*others, f"fdb replace {NODE_MAC} dev {DEVICE} dst {host} self permanent"]
        )
        await self._batch("ip", [f"link set {DEVICE} mtu {mtu} up"])

    async def _make_ways(self, network: PodNetwork, mtu: int) -> None:
        address, gateway = network.address, network.gateway
        shown = json.loads(await self._ip("-4", "route", "show", "dev", DEVICE))
        ours = {str(each) for each in network.networks} | {str(gateway)}
        lost = [each["dst"] for each in shown if each["dst"] not in ours]
        shown = json.loads(await self._ip("-4", "address", "show", "dev", DEVICE))
        had = [f"{one['local']}/{one['prefixlen']}" for each in shown for one in each.get("addr_info", ())]
        by = f"via {gateway} dev {DEVICE} src {address} onlink"
        await self._batch(
            "ip",
            [
                *(f"route delete {each} dev {DEVICE}" for each in lost),
                *(f"address delete {each} dev {DEVICE}" for each in had if each != f"{address}/32"),
                f"address replace {address}/32 dev {DEVICE}",
                f"neigh replace {gateway} lladdr {NODE_MAC} dev {DEVICE} nud permanent",
                f"route replace {gateway}/32 dev {DEVICE} src {address}",
                *(f"route replace {each} {by}" for each in network.networks),
                f"route replace default {by} table {ROUTES}",
            ],
        )
        rules = json.loads(await self._ip("-4", "rule", "show"))
        kept = [each for each in rules if each.get("priority") == ROUTES]
        if [each.get("src") for each in kept] != [str(address)]:
            await self._batch(
                "ip",
                [
                    *(f"rule delete pref {ROUTES}" for _ in kept),
                    f"rule add from {address} lookup {ROUTES} pref {ROUTES}",
                ],
            )

    async def _ip(self, *words: str) -> bytes:
        return await check(self._reactor, Command([*self._inside, "ip", "-j", *words], _SECONDS))

    async def _batch(self, program: str, commands: Sequence[str]) -> None:
        script = "".join(command + "\n" for command in commands)
        await check(
            self._reactor, Command([*self._inside, program, "-batch", "-"], _SECONDS, script.encode())
        )
