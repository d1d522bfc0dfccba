"""The pods' network on the node: a bridge, a tap for each VM, and an nftables table of our own.

`ip` and `nft` do it, as child processes: they are on every Debian node, say what is wrong in words,
and keep netlink's wire format out of here. A launch needs each of them once, while QEMU loads. A tap
is not persistent: it belongs to QEMU's process alone and goes with it, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path
from typing import Any

import attrs
from twisted.logger import Logger

from infranetes.providers.qemu.process import check, run
from infranetes.providers.qemu.subnet import gateway, mac_of
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument

_SECONDS = 15.0  # for each child process
# The bridge's hardware address says that it is ours. 02: locally administered; then "infra".
_BRIDGE_MAC = "02:69:6e:66:72:61"
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_DEFAULT_MTU = 1500

_log = Logger()


@attrs.frozen
class Port:
    """One VM's place on the bridge."""

    tap: str
    address: str

    @property
    def element(self) -> str:
        """In the set of who may send as whom; what comes from a VM and is not in it is dropped."""
        return f'"{self.tap}" . {mac_of(IPv4Address(self.address))} . {self.address}'


def open_tap(name: str) -> int:
    """A descriptor of a new tap of that name, which lives as long as somebody has it open.

    :raise FailedPrecondition: there can be no taps here. :raise OSError: the name is taken.
    """
    try:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FailedPrecondition(
            f"/dev/net/tun can't be opened ({error.strerror}); VMs need it: `modprobe tun`, and run as root"
        ) from error
    try:
        request = struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR)
        fcntl.ioctl(descriptor, _TUNSETIFF, request)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Network:
    """The bridge called `bridge` and what belongs to it."""

    def __init__(self, reactor: Any, bridge: str, mtu: int) -> None:
        self._reactor = reactor
        self._bridge = bridge
        self._table = f"infranetes_{bridge}"
        self._mtu = mtu
        self.mtu = mtu or _DEFAULT_MTU
        self.guarded = False  # whether pods are held to their own addresses

    async def set_up(self, network: IPv4Network, ports: Iterable[Port]) -> None:
        """Have bridge and tables as they are to be, whatever was there of them.

        :raise FailedPrecondition: the bridge's name or the subnet is somebody else's, or a program or
            right is missing.
        """
        interfaces = json.loads(await check(self._reactor, ["ip", "-j", "address", "show"], _SECONDS))
        self._check_free(network, interfaces)
        if self._mtu == 0:
            self.mtu = await self._uplink_mtu(interfaces)
        await self._set_up_bridge(network, interfaces)
        _sysctl("net/ipv4/ip_forward", "1")
        _sysctl(f"net/ipv6/conf/{self._bridge}/disable_ipv6", "1")
        await self._set_up_tables(network, list(ports))

    def _check_free(self, network: IPv4Network, interfaces: list[dict[str, Any]]) -> None:
        for interface in interfaces:
            name = interface.get("ifname")
            if name == self._bridge and interface.get("address") != _BRIDGE_MAC:
                raise FailedPrecondition(
                    f"the node has an interface {name} that is not Infranetes'; choose another name with "
                    "providers.qemu.bridge, or remove it"
                )
            for each in interface.get("addr_info", ()):
                if name == self._bridge or each.get("family") != "inet":
                    continue
                other = IPv4Interface(f"{each['local']}/{each['prefixlen']}").network
                if other.overlaps(network):
                    raise InvalidArgument(
                        f"pod CIDR {network} overlaps {other} of the node's interface {name}; choose another"
                    )

    async def _uplink_mtu(self, interfaces: list[dict[str, Any]]) -> int:
        routes = json.loads(
            await check(self._reactor, ["ip", "-j", "-4", "route", "show", "default"], _SECONDS)
        )
        names = [route.get("dev") for route in routes]
        return next((each["mtu"] for each in interfaces if each.get("ifname") in names[:1]), _DEFAULT_MTU)

    async def _set_up_bridge(self, network: IPv4Network, interfaces: list[dict[str, Any]]) -> None:
        name = self._bridge
        address = f"{gateway(network)}/{network.prefixlen}"
        there = next((each for each in interfaces if each.get("ifname") == name), None)
        commands = []
        if there is None:
            commands.append(f"link add name {name} address {_BRIDGE_MAC} mtu {self.mtu} type bridge")
        had = [f"{each['local']}/{each['prefixlen']}" for each in (there or {}).get("addr_info", ())]
        commands += [f"address delete {old} dev {name}" for old in had if old != address]
        if address not in had:
            commands.append(f"address add {address} dev {name}")
        commands.append(f"link set dev {name} mtu {self.mtu} up")
        await self._ip(commands)

    async def _set_up_tables(self, network: IPv4Network, ports: list[Port]) -> None:
        table = self._table
        await self._nft(
            f"""table ip {table} {{}}
            delete table ip {table}
            table ip {table} {{
                chain postrouting {{
                    type nat hook postrouting priority srcnat; policy accept;
                    ip saddr {network} ip daddr != {network} masquerade
                }}
            }}"""
        )
        allowed = "".join(self._element("add", port) for port in ports)
        try:
            await self._nft(
                f"""table bridge {table} {{}}
                delete table bridge {table}
                table bridge {table} {{
                    set taps {{ typeof iifname; }}
                    set pods {{ typeof iifname . ether saddr . ip saddr; }}
                    chain prerouting {{
                        type filter hook prerouting priority -200; policy accept;
                        iifname != @taps accept
                        iifname . ether saddr . ip saddr @pods accept
                        iifname . arp saddr ether . arp saddr ip @pods accept
                        drop
                    }}
                }}
                {allowed}"""
            )
            self.guarded = True
        except InfranetesError as error:
            self.guarded = False
            _log.warn("pods are not held to their own addresses: {error}", error=str(error))

    async def join(self, port: Port) -> None:
        """Put a VM's tap onto the bridge."""
        words = f"link set dev {port.tap} master {self._bridge} mtu {self.mtu} up"
        await check(self._reactor, ["ip", *words.split()], _SECONDS)

    async def allow(self, port: Port) -> None:
        """Let a VM send as its address. Again: no change."""
        if self.guarded:
            await self._nft(self._element("add", port))

    async def forbid(self, port: Port) -> None:
        """Let no one send as that address any more. Again: no change."""
        if self.guarded:
            await self._nft(self._element("add", port) + self._element("delete", port))

    def _element(self, verb: str, port: Port) -> str:
        name = f"{verb} element bridge {self._table}"
        return f'{name} taps {{ "{port.tap}" }}\n{name} pods {{ {port.element} }}\n'

    async def remove(self) -> None:
        """Take away bridge and tables. Not there: nothing to do."""
        for family in ("ip", "bridge"):
            with contextlib.suppress(InfranetesError):
                await self._nft(f"table {family} {self._table} {{}}\ndelete table {family} {self._table}")
        await run(self._reactor, ["ip", "link", "delete", "dev", self._bridge, "type", "bridge"], _SECONDS)

    async def _ip(self, commands: list[str]) -> None:
        words = "".join(command + "\n" for command in commands).encode()
        await check(self._reactor, ["ip", "-batch", "-"], _SECONDS, words)

    async def _nft(self, script: str) -> None:
        await check(self._reactor, ["nft", "-f", "-"], _SECONDS, script.encode())


def _sysctl(name: str, value: str) -> None:
    path = Path("/proc/sys") / name
    try:
        if path.read_text().strip() != value:
            path.write_text(value)
            _log.info("set {name} to {value}", name=name.replace("/", "."), value=value)
    except OSError as error:
        raise FailedPrecondition(
            f"{name.replace('/', '.')} can't be set to {value}: {error.strerror}; run as root"
        ) from error
