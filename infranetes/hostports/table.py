# SPDX-License-Identifier: Apache-2.0
"""The nftables table of the host ports: as text, and in the kernel.

The table is always replaced whole, in one transaction, so that at no moment a port leads nowhere or to the
wrong pod. Existing connections keep their translation whatever becomes of the rules.

A pod's answers have to come back through the node. They do where the node is the pod's way to the sender.
Elsewhere the sender's address is replaced by the node's: for senders at the node's own loopback address, for
the pods' neighbours, a pod that calls itself among them, and for pods behind a router.

Answers to 127.0.0.1 come back by the pods' interface, which needs route_localnet = 1. As long as it has that,
the table's guard drops what comes from the wire with a loopback address. So the table is made before the
setting is changed and removed after it is set back, and it names the interfaces that this daemon has changed,
for the next daemon to set them back if this one is killed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from ipaddress import ip_interface
from pathlib import Path

import attrs
from twisted.logger import Logger

from infranetes.hostports.mappings import HostPort
from infranetes_common.addresses import nft_address
from infranetes_common.commands import Command, check, run
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import InfranetesError, Unavailable
from infranetes_common.reactors import IReactor

PROC_SYS = Path("/proc/sys")
_SECONDS = 15.0  # for each child process

_log = Logger()


@attrs.frozen
class Routes:
    """The ways by which the node reaches the pods."""

    interfaces: tuple[str, ...] = ()  # the node's interfaces to pods that it reaches directly
    networks: tuple[str, ...] = ()  # the networks of these interfaces
    routed: tuple[str, ...] = ()  # addresses of pods behind a router


class HostPortTable:
    """The table in the kernel.

    :param name: of the nftables table, which is this daemon's alone.
    """

    def __init__(self, reactor: IReactor, name: str, proc_sys: Path = PROC_SYS) -> None:
        self._reactor = reactor
        self._name = name
        self._proc_sys = proc_sys
        self._localnet: dict[str, bool] | None = None  # see `_load_localnet`

    async def replace(self, ports: Mapping[HostPort, str]) -> None:
        """Forward exactly these ports, each to the address of its pod. No ports: remove the table.

        :raise InfranetesError: it failed; the table is as it was."""
        localnet = await self._load_localnet()
        if not ports:
            await self._close(localnet)
            return
        routes = await self._routes(sorted(set(ports.values())))
        interfaces = [each for each in routes.interfaces if each != "lo"]
        ours = {each: localnet.get(each, False) or not self._is_open(each) for each in interfaces}
        self._localnet = {**localnet, **ours}
        await self._nft(script(self._name, ports, routes, self._localnet))
        for interface in interfaces:
            try:
                await self._write(interface, "1")
            except OSError as error:
                _log.warn(
                    "host ports can't be reached at 127.0.0.1 by {interface}: {error}",
                    interface=interface,
                    error=error,
                )

    async def _close(self, localnet: Mapping[str, bool]) -> None:
        """Set route_localnet back where this daemon has set it, then remove the table. The guard stays where
        somebody else has set it."""
        for interface, ours in localnet.items():
            if ours:
                try:
                    await self._write(interface, "0")
                except OSError as error:
                    raise Unavailable(
                        f"route_localnet of {interface} can't be set back to 0: {error}; the rule that "
                        "guards it stays"
                    ) from error
        left = {interface: False for interface in localnet if self._is_open(interface)}
        if left:
            await self._nft(script(self._name, {}, Routes(), left))
        else:
            await self._nft(f"table ip {self._name} {{}}\ndelete table ip {self._name}\n")
        self._localnet = left

    @property
    def guards(self) -> bool:
        """Whether the table has to stay because route_localnet may still be set for an interface."""
        return bool(self._localnet)

    def loopback_open(self) -> bool:
        """Return whether answers to 127.0.0.1 can come back by all the interfaces that `replace` found."""
        return all(self._is_open(interface) for interface in self._localnet or ())

    async def _load_localnet(self) -> Mapping[str, bool]:
        """Return the interfaces that host ports have needed, and whether this daemon, or an earlier one, has
        set route_localnet there: the table's map of that name."""
        if self._localnet is None:
            command = ["nft", "-j", "list", "map", "ip", self._name, "localnet"]
            found = await run(self._reactor, Command(command, _SECONDS))
            self._localnet = localnet_of(found.stdout) if found.code == 0 else {}
        return self._localnet

    async def current(self) -> set[str] | None:
        """Return the elements in the kernel, as `elements` writes them; None: there is no table."""
        found = await run(self._reactor, Command(["nft", "-j", "list", "table", "ip", self._name], _SECONDS))
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

    async def forget_flows(self, ports: Sequence[HostPort]) -> None:
        """Make the kernel forget where the packets of UDP senders went so far: it would send further packets
        there. Needs the program conntrack; without it, do nothing."""
        for port in ports:
            if port.protocol == "udp":
                command = ["conntrack", "-D", "-p", "udp", "--orig-port-dst", str(port.host_port)]
                try:
                    await run(self._reactor, Command(command, _SECONDS))
                except InfranetesError as error:
                    _log.debug(
                        "connections to host port {port} are still tracked by the kernel: {error}",
                        port=port,
                        error=error,
                    )

    async def _routes(self, addresses: Sequence[str]) -> Routes:
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
        return Routes(tuple(interfaces), tuple(networks), tuple(routed))

    def _is_open(self, interface: str) -> bool:
        return is_open(interface, self._proc_sys)

    async def _write(self, interface: str, value: str) -> None:
        # In a thread, since the write may have to wait for the kernel's lock of network devices.
        await run_in_thread(self._reactor, write_route_localnet, interface, value, self._proc_sys)

    async def _ip(self, *words: str) -> bytes:
        return await check(self._reactor, Command(["ip", "-j", *words], _SECONDS))

    async def _nft(self, text: str) -> None:
        await check(self._reactor, Command(["nft", "-f", "-"], _SECONDS, text.encode()))


def localnet_of(listed: bytes) -> dict[str, bool]:
    """Return the map `localnet` in what `nft -j` lists: the interfaces that host ports have needed, and
    whether a daemon with this table has set route_localnet there."""
    return {
        interface: bool(ours)
        for each in json.loads(listed).get("nftables", ())
        if each.get("map", {}).get("name") == "localnet"
        for interface, ours in each["map"].get("elem", ())
    }


def is_open(interface: str, proc_sys: Path = PROC_SYS) -> bool:
    """Return whether an interface has route_localnet = 1. One that is gone has not."""
    try:
        return _setting(interface, proc_sys).read_text().strip() == "1"
    except FileNotFoundError:
        return False


def write_route_localnet(interface: str, value: str, proc_sys: Path = PROC_SYS) -> None:
    """Set an interface's route_localnet, unless the interface is gone."""
    with contextlib.suppress(FileNotFoundError):
        _setting(interface, proc_sys).write_text(value)


def _setting(interface: str, proc_sys: Path) -> Path:
    return proc_sys / "net/ipv4/conf" / interface / "route_localnet"


def elements(ports: Mapping[HostPort, str]) -> tuple[list[str], list[str]]:
    """Return the maps' elements: of ports at all of the node's addresses, and of those at one of them."""
    anywhere, somewhere = [], []
    for port, address in ports.items():
        key, value = f"{port.protocol} . {port.host_port}", f"{nft_address(address)} . {port.container_port}"
        if port.host_ip:
            somewhere.append(f"{nft_address(port.host_ip)} . {key} : {value}")
        else:
            anywhere.append(f"{key} : {value}")
    return anywhere, somewhere


def script(
    name: str, ports: Mapping[HostPort, str], routes: Routes, localnet: Mapping[str, bool] | None = None
) -> str:
    """Return the nft script that replaces the whole table.

    :param localnet: interfaces with route_localnet, and whether this daemon has set it."""
    opened = [f'"{interface}" : {ours:d}' for interface, ours in (localnet or {}).items()]
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
        {_listed(["127.0.0.0/8", *routes.networks])}
    }}
    set routed {{
        type ipv4_addr
        {_listed(routes.routed)}
    }}
    map localnet {{
        type ifname : mark
        {_listed(opened)}
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
        iifname != "lo" ip saddr 127.0.0.0/8 drop
    }}
}}
"""


def _listed(found: Sequence[str]) -> str:
    return f"elements = {{ {', '.join(found)} }}" if found else ""
