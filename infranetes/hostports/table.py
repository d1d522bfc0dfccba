"""The nftables table behind the host ports: as text, and in the kernel.

It is always put there whole, in one transaction, so that there is no moment in which a port leads nowhere
or to the wrong pod; connections that exist keep their translation whatever becomes of the rules.

What comes back from a pod has to come by the node. It does where the node is the pod's way to the sender;
where it is not, the sender is made to be the node: for the node's own loopback address, for the pods'
neighbours, a pod that calls itself among them, and for pods that are behind a router.
"""

from __future__ import annotations

import json
from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

import attrs
from twisted.logger import Logger

from infranetes.hostports.mappings import Mapping
from infranetes.providers.qemu.process import check, run
from infranetes_common.errors import InfranetesError

_SECONDS = 15.0  # for each child process

_log = Logger()


@attrs.frozen
class Ways:
    """How the node reaches the pods: by interfaces of its own, whose networks these are, or by a router."""

    interfaces: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    routed: tuple[str, ...] = ()


class Table:
    """:param name: of the nftables table, which is this daemon's alone."""

    def __init__(self, reactor: Any, name: str, proc_sys: Path = Path("/proc/sys")) -> None:
        self._reactor = reactor
        self._name = name
        self._proc_sys = proc_sys

    async def put(self, ports: MappingOf[Mapping, str]) -> None:
        """Have exactly these, with the address of the pod behind each. None: no table.

        :raise InfranetesError: it can't be had; the table is as it was."""
        if not ports:
            await self._nft(f"table ip {self._name} {{}}\ndelete table ip {self._name}\n")
            return
        ways = await self._ways(sorted(set(ports.values())))
        await self._nft(script(self._name, ports, ways))
        for interface in ways.interfaces:
            self._allow_loopback(interface)

    async def there(self) -> set[str] | None:
        """The elements in the kernel, as `elements` words them; None: there is no table."""
        found = await run(self._reactor, ["nft", "-j", "list", "table", "ip", self._name], _SECONDS)
        if found.code != 0:
            return None
        listed: set[str] = set()
        for each in json.loads(found.stdout).get("nftables", ()):
            if each.get("map", {}).get("name") in ("anywhere", "somewhere"):
                for key, value in each["map"].get("elem", ()):
                    listed.add(
                        " . ".join(map(str, key["concat"])) + " : " + " . ".join(map(str, value["concat"]))
                    )
        return listed

    async def forget_flows(self, ports: Sequence[Mapping]) -> None:
        """What a sender of UDP goes on sending goes where it went first, unless that is forgotten. Done
        where the program conntrack is there."""
        for mapping in ports:
            if mapping.protocol == "udp":
                command = ["conntrack", "-D", "-p", "udp", "--orig-port-dst", str(mapping.host_port)]
                try:
                    await run(self._reactor, command, _SECONDS)
                except InfranetesError as error:
                    _log.debug(
                        "flows to host port {port} are not forgotten: {error}", port=mapping, error=error
                    )

    async def _ways(self, addresses: Sequence[str]) -> Ways:
        interfaces: dict[str, list[str]] = {}
        routed = []
        for address in addresses:
            [route] = json.loads(await self._ip("route", "get", address))
            if "gateway" in route:
                routed.append(address)
            elif route["dev"] not in interfaces:
                shown = json.loads(await self._ip("-4", "address", "show", "dev", route["dev"]))
                interfaces[route["dev"]] = [
                    str(ip_interface(f"{each['local']}/{each['prefixlen']}").network)
                    for one in shown
                    for each in one.get("addr_info", ())
                ]
        networks = sorted({network for found in interfaces.values() for network in found})
        return Ways(tuple(interfaces), tuple(networks), tuple(routed))

    def _allow_loopback(self, interface: str) -> None:
        """Let answers to 127.0.0.1 come back by the pods' interface; the table's guard lets in nothing else
        that says it is for there."""
        path = self._proc_sys / "net/ipv4/conf" / interface / "route_localnet"
        try:
            if path.read_text().strip() != "1":
                path.write_text("1")
        except OSError as error:
            _log.warn(
                "host ports can't be reached at 127.0.0.1: {path}: {error}", path=str(path), error=error
            )

    async def _ip(self, *words: str) -> bytes:
        return await check(self._reactor, ["ip", "-j", *words], _SECONDS)

    async def _nft(self, text: str) -> None:
        await check(self._reactor, ["nft", "-f", "-"], _SECONDS, text.encode())


def elements(ports: MappingOf[Mapping, str]) -> tuple[list[str], list[str]]:
    """Those at all of the node's addresses, and those at one of them."""
    anywhere, somewhere = [], []
    for mapping, address in ports.items():
        key, value = f"{mapping.protocol} . {mapping.host_port}", f"{address} . {mapping.container_port}"
        if mapping.host_ip:
            somewhere.append(f"{mapping.host_ip} . {key} : {value}")
        else:
            anywhere.append(f"{key} : {value}")
    return anywhere, somewhere


def script(name: str, ports: MappingOf[Mapping, str], ways: Ways) -> str:
    """The whole table, in place of any that is there."""
    anywhere, somewhere = elements(ports)
    targets = sorted({f"{ip} . {one.protocol} . {one.container_port}" for one, ip in ports.items()})
    return f"""\
table ip {name} {{}}
delete table ip {name}
table ip {name} {{
    map anywhere {{
        type inet_proto . inet_service : ipv4_addr . inet_service
        {_listed(anywhere)}
    }}
    map somewhere {{
        type ipv4_addr . inet_proto . inet_service : ipv4_addr . inet_service
        {_listed(somewhere)}
    }}
    set targets {{
        type ipv4_addr . inet_proto . inet_service
        {_listed(targets)}
    }}
    set neighbours {{
        type ipv4_addr
        flags interval
        auto-merge
        {_listed(["127.0.0.0/8", *ways.networks])}
    }}
    set routed {{
        type ipv4_addr
        {_listed(ways.routed)}
    }}
    chain ports {{
        dnat ip to ip daddr . meta l4proto . th dport map @somewhere
        dnat ip to meta l4proto . th dport map @anywhere
    }}
    chain prerouting {{
        type nat hook prerouting priority dstnat; policy accept;
        fib daddr type local jump ports
    }}
    chain output {{
        type nat hook output priority -100; policy accept;
        fib daddr type local jump ports
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        ct status dnat ip daddr . meta l4proto . th dport @targets jump back
    }}
    chain back {{
        ip saddr @neighbours masquerade
        ip daddr @routed masquerade
    }}
    chain guard {{
        type filter hook prerouting priority raw; policy accept;
        iifname != "lo" ip daddr 127.0.0.0/8 drop
    }}
}}
"""


def _listed(found: Sequence[str]) -> str:
    return f"elements = {{ {', '.join(found)} }}" if found else ""
