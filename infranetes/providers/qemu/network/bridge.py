# SPDX-License-Identifier: Apache-2.0
"""The pods' network on the node: a bridge, a tap for each VM, and nftables tables.

The programs `ip`, `bridge` and `nft` set it up: they are on every Debian node, explain their errors, and
keep netlink's wire format out of here. A launch runs each of them once, while QEMU loads. A tap is not
persistent: it belongs to QEMU's process alone and is gone when that ends, however it ends.

Two things hold a VM to its own addresses. The nftables table accepts only IPv4 and ARP, and only from the
combinations of port, MAC and address that it lists; it is replaced in one transaction, and drops what comes
from any other port (the bridge's ports have an interface group of their own, since before they are ports).
And the bridge learns nothing from the taps: its forwarding entries are written here, with each port.

A VM tells only of what was sent to itself: an ICMP error has to quote a packet to the address of its sender,
which is no router. Otherwise a VM could refuse others' connections, slow them and the node's down by a small
path MTU, and send data past NetworkPolicies, since an error counts as part of the connection that it quotes.
Redirects, and the source quench that nobody uses any more, are dropped, as is an error whose quote is in
another fragment. SCTP's errors are ICMP's too.

Packets to an address of the subnet that no VM has are dropped, since each would take an entry of the node's
neighbour table. Of the tables that the node has for all, each VM has a share (`shares`), as of the memory for
fragments (`fragments`).

For a VM that knows nothing of Kubernetes, the node translates Services' addresses. So what other VMs send to
it is routed by the node, which else would not see the answers of an endpoint on the bridge. The VM may itself
be the endpoint: then it sees the node as the client, and where the kernel translates bridged packets already
(br_netfilter), these go out by the port that they came in by (hairpin), as nothing that is for all does.

Packets to the node's loopback addresses are dropped: other programs, such as kube-proxy, have the kernel take
them from every interface (route_localnet). The bridge neither heeds nor sends redirects, nor lets a packet
choose its way.

The port of the VMs' agents is the daemon's alone, whatever NetworkPolicies say. All others' packets to it are
dropped where all ways to it meet, after every translation of addresses:

    ip      forward      what the node routes: from outside, and from pods by way of the node. Fragments are
                         whole again before
    ip      postrouting  connections of the node's other programs, such as kubelet's, whose probes may name
                         any address and port. The daemon's have a mark
    bridge  forward      what goes from one port of the bridge to another. A first fragment has the port's
                         number, since it has at least 8 bytes, and the others are useless without it
    bridge  output       what other programs send out past the table `ip`, such as a CNI's in BPF: all but
                         what is from the bridge's own address, as the node's own packets are
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Network
from pathlib import Path
from typing import TypedDict

import attrs
from twisted.logger import Logger

from infranetes.firewalls import fragments, shares
from infranetes.providers.qemu.network import refusals
from infranetes.providers.subnet import gateway, mac_of
from infranetes_common.commands import Command, check, run
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument
from infranetes_common.identity import AGENT_CALL, AGENT_PORT
from infranetes_common.pod_firewall_rules import ERRORS, QUOTED_TO
from infranetes_common.reactors import IReactor
from infranetes_common.sysctls import raise_sysctl, set_sysctl

_SECONDS = 15.0  # for each command
# The bridge's own address, which marks it as Infranetes'. 02: locally administered; then "infra".
MAC = "02:69:6e:66:72:61"
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_DEFAULT_MTU = 1500
# Makes the bridge forward frames to the link-local groups (IEEE 802.1D) like others, so that the table drops
# them. Otherwise the node would receive some, or the bridge learn from them, before any table sees them.
# Pause frames (bit 1) can't be chosen; the kernel drops them.
_GROUP_FORWARD_MASK = 0xFFFD
_AGENTS = "set agents { type ipv4_addr . inet_service; }"  # those that have another port than all others
_MOST_PORTS = 65535
_TO_ALL = 200  # broadcasts and multicasts of one VM in a second, which all VMs receive, ARP's too
_OUR_TAP = re.compile("inf[0-9a-f]{12}")

_log = Logger()


@attrs.frozen
class BridgePort:
    """A VM's port on the bridge: its tap, the address that it may send from, and its agent's TCP port."""

    tap: str
    address: str
    agent_port: int = attrs.field(default=AGENT_PORT, eq=False)
    # Whether the node translates Services' addresses for the VM, since nothing in it does.
    served: bool = attrs.field(default=False, eq=False)

    @property
    def mac(self) -> str:
        """The VM's Ethernet address."""
        return mac_of(IPv4Address(self.address))

    @property
    def name(self) -> str:
        """The name after which the chains of the port's firewall are called."""
        return self.tap

    @property
    def element(self) -> str:
        """The port's element of the nftables set `pods`."""
        return f'"{self.tap}" . {self.mac} . {self.address}'


def port_group(bridge: str) -> int:
    """Return the interface group of a bridge's ports, by which rules know them."""
    return int.from_bytes(hashlib.sha256(bridge.encode()).digest()[:3], "big") | 1


def open_tap(name: str) -> int:
    """Make a tap and return its descriptor. The tap exists as long as a process has it open.

    :raise FailedPrecondition: the node can't have taps.
    :raise OSError: the name is taken.
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


def _for_served(group: int) -> str:
    """Return the part of the bridge's table that is for VMs for which the node translates addresses."""
    return f"""
            set served {{ type ipv4_addr; }}
            chain to-served {{
                type filter hook prerouting priority -150; policy accept;
                iifgroup {group} ether daddr & 01:00:00:00:00:00 == 00:00:00:00:00:00 \
                    ip daddr @served ether daddr set {MAC} meta pkttype set host
            }}
            set reflections {{ type ifname . ifname; }}
            chain reflections {{
                type filter hook forward priority -200; policy accept;
                ether daddr & 01:00:00:00:00:00 != 00:00:00:00:00:00 \
                    iifname . oifname @reflections drop
            }}"""


class _InterfaceAddress(TypedDict):
    family: str
    local: str
    prefixlen: int


class _Interface(TypedDict, total=False):
    """An interface as `ip -j address show` describes it."""

    ifname: str
    address: str
    mtu: int
    master: str
    addr_info: list[_InterfaceAddress]


class Bridge:
    """The bridge, its ports and its nftables tables.

    :param bridge: its name.
    :param mtu: of the pods' network; 0: that of the interface with the node's default route.
    :param cluster: subnets whose hosts see the pods' own addresses, and send their answers there.
    :param share: how many connections a VM may have in the node's table.
    :param together: how many all VMs may have; None: what `shares` leaves to pods.
    :ivar name: its name.
    :ivar mtu: the MTU, known once `set_up` is done.
    """

    def __init__(
        self,
        reactor: IReactor,
        bridge: str,
        mtu: int,
        proc_sys: Path = Path("/proc/sys"),
        *,
        cluster: Iterable[IPv4Network | IPv6Network] = (),
        share: int = shares.SHARE,
        together: int | None = None,
    ) -> None:
        self._share = share
        self._together = together
        self._proc_sys = proc_sys
        self._reactor = reactor
        self.name = bridge
        self._table = f"infranetes_{bridge}"
        self._group = port_group(bridge)
        self._configured_mtu = mtu
        self._cluster = [each for each in cluster if isinstance(each, IPv4Network)]
        self.mtu = mtu or _DEFAULT_MTU

    async def set_up(self, network: IPv4Network, ports: Iterable[BridgePort]) -> None:
        """Make bridge and tables, or change those that are there. Idempotent.

        :param ports: those of running VMs.
        :raise FailedPrecondition: the name belongs to another interface, or a program or right is missing.
        :raise InvalidArgument: the subnet overlaps another one of the node.
        """
        shown = await check(self._reactor, Command(["ip", "-j", "address", "show"], _SECONDS))
        interfaces: list[_Interface] = json.loads(shown)
        self._check_free(network, interfaces)
        if self._configured_mtu == 0:
            self.mtu = await self._uplink_mtu(interfaces)
        ports = list(ports)
        await self._set_up_bridge(network, interfaces)
        await set_sysctl(self._reactor, self._proc_sys / "net/ipv4/ip_forward", "1")
        await raise_sysctl(self._reactor, self._proc_sys / "net/ipv4/ipfrag_high_thresh", fragments.MEMORY)
        for name in ("accept_redirects", "send_redirects", "accept_source_route"):
            await set_sysctl(self._reactor, self._proc_sys / f"net/ipv4/conf/{self.name}" / name, "0")
        if self._has_ipv6():
            disable_ipv6 = self._proc_sys / f"net/ipv6/conf/{self.name}/disable_ipv6"
            await set_sysctl(self._reactor, disable_ipv6, "1")
        on_it = {each["ifname"] for each in interfaces if each.get("master") == self.name}
        await self._adopt(ports, {tap for tap in on_it if _OUR_TAP.fullmatch(tap)})
        # This comes last, as until now the tables of the daemon before guard its ports.
        await self._set_up_tables(network, ports)

    async def _adopt(self, ports: list[BridgePort], taps: set[str]) -> None:
        """Set up the taps on the bridge as `join` does, whichever daemon attached them. Those of no known VM
        join the group whose frames the table drops."""
        for port in ports:
            if port.tap in taps:
                try:
                    await self.join(port)
                except InfranetesError as error:  # its VM may just have ended
                    _log.warn("the port {tap} can't be set up: {error}", tap=port.tap, error=str(error))
        unknown = taps - {port.tap for port in ports}
        for tap in unknown:
            _log.warn("the bridge's port {tap} belongs to no known VM; its packets are dropped", tap=tap)
        await self._batch("ip", [f"link set dev {tap} group {self._group}" for tap in unknown])

    async def restore_tables(self, network: IPv4Network, ports: Iterable[BridgePort]) -> None:
        """Make the tables again if they were removed, as the reload of a firewall does."""
        for family, table in self._tables():
            command = ["nft", "--terse", "list", "table", family, table]
            if (await run(self._reactor, Command(command, _SECONDS))).code != 0:
                _log.warn("the nftables table {family} {table} was gone and is made again",
                          family=family, table=table)  # fmt: skip
                await self._set_up_tables(network, list(ports))
                return

    def _check_free(self, network: IPv4Network, interfaces: list[_Interface]) -> None:
        for interface in interfaces:
            name = interface.get("ifname")
            if name == self.name and interface.get("address") != MAC:
                raise FailedPrecondition(
                    f"the node has an interface {name} that is not Infranetes'; choose another name with "
                    "providers.qemu.bridge, or remove it"
                )
            for each in interface.get("addr_info", ()):
                if name == self.name or each.get("family") != "inet":
                    continue
                other = IPv4Interface(f"{each['local']}/{each['prefixlen']}").network
                if other == IPv4Network(network.network_address):
                    # An overlay's device may have the subnet's first address, which is never a pod's.
                    continue
                if other.overlaps(network):
                    raise InvalidArgument(
                        f"pod CIDR {network} overlaps {other} of the node's interface {name}; choose another"
                    )

    async def _uplink_mtu(self, interfaces: list[_Interface]) -> int:
        routes = json.loads(
            await check(self._reactor, Command(["ip", "-j", "-4", "route", "show", "default"], _SECONDS))
        )
        names = [route.get("dev") for route in routes]
        return next((each["mtu"] for each in interfaces if each.get("ifname") in names[:1]), _DEFAULT_MTU)

    async def _set_up_bridge(self, network: IPv4Network, interfaces: list[_Interface]) -> None:
        name = self.name
        address = f"{gateway(network)}/{network.prefixlen}"
        there = next((each for each in interfaces if each.get("ifname") == name), None)
        commands = []
        if there is None:
            commands.append(f"link add name {name} address {MAC} mtu {self.mtu} type bridge")
        had = [f"{each['local']}/{each['prefixlen']}" for each in (there or {}).get("addr_info", ())]
        commands += [f"address delete {old} dev {name}" for old in had if old != address]
        if address not in had:
            commands.append(f"address add {address} dev {name}")
        # With snooping, one VM's IGMP would decide what its neighbours receive.
        commands.append(f"link set dev {name} type bridge mcast_snooping 0")
        commands.append(f"link set dev {name} mtu {self.mtu} up")
        await self._batch("ip", commands)

    async def _set_up_tables(self, network: IPv4Network, ports: list[BridgePort]) -> None:
        table = self._table
        lines = [line for each in ports for line in self._elements("add", each)]
        elements = "".join(line for line in lines if line.startswith("add element ip "))
        direct = "".join(f"ip saddr {network} ip daddr {each} return\n" for each in self._cluster)
        await self._nft(
            f"""table ip {table} {{}}
            delete table ip {table}
            table ip {table} {{
                set hairpins {{ type ipv4_addr . ipv4_addr; }}
                chain postrouting {{
                    type nat hook postrouting priority srcnat; policy accept;
                    ip saddr . ip daddr @hairpins ct status dnat masquerade
                    {direct}ip saddr {network} ip daddr != {network} masquerade
                }}
                set addresses {{ type ipv4_addr; }}
                chain known {{
                    type filter hook forward priority mangle; policy accept;
                    oifname "{self.name}" meta pkttype != {{ broadcast, multicast }} \\
                        ip daddr != @addresses drop
                }}
                {_AGENTS}
                chain agents {{
                    type filter hook forward priority mangle; policy accept;
                    oifname "{self.name}" tcp dport {AGENT_PORT} counter drop
                    ip daddr . tcp dport @agents counter drop
                }}
                chain agents-others {{
                    type filter hook postrouting priority mangle; policy accept;
                    oifname "{self.name}" tcp dport {AGENT_PORT} {AGENT_CALL} counter drop
                    ip daddr . tcp dport @agents {AGENT_CALL} counter drop
                }}
            }}
            {elements}
            {fragments.script(self.name)}
            {"".join(fragments.add(self.name, each.address) for each in ports)}"""
        )
        together = self._together
        if together is None:  # the kernel tells it once the table above has had it follow connections
            together = await run_in_thread(self._reactor, shares.together, self._proc_sys)
        await self._nft(shares.script(self.name, self._share, together))
        try:
            await self._nft(shares.half_open(self.name))
        except InfranetesError as error:
            _log.info("half-open connections of pods stay as long as others: {error}", error=error)
        try:
            await self._nft(self._filter_table(network, ports))
        except InfranetesError as error:
            raise FailedPrecondition(
                f"pods can't be held to their own addresses: {error}; the kernel needs nftables for bridges "
                "(nf_tables, and CONFIG_NF_TABLES_BRIDGE)"
            ) from error

    def _filter_table(self, network: IPv4Network, ports: list[BridgePort]) -> str:
        """Return the script that replaces the table of who may send from which address, and to agents."""
        table = self._table
        allowed = "".join(self._element("add", port) for port in ports)
        return f"""table bridge {table} {{}}
        delete table bridge {table}
        table bridge {table} {{
            set pods {{ typeof iifname . ether saddr . ip saddr; }}
            set errors {{ typeof ip saddr . {QUOTED_TO}; }}
            set callers {{ typeof iifname; size {_MOST_PORTS}; flags dynamic, timeout; timeout 1m; }}
            chain prerouting {{
                type filter hook prerouting priority -200; policy accept;
                iifgroup {self._group} goto pod
            }}
            chain pod {{
                ether type != {{ ip, arp }} drop
                ether daddr & ff:ff:ff:ff:ff:f0 == 01:80:c2:00:00:00 drop
                udp sport 67 udp dport 68 drop
                ip daddr 127.0.0.0/8 drop
                ether daddr & 01:00:00:00:00:00 != 00:00:00:00:00:00 update @callers {{ iifname \
                    limit rate over {_TO_ALL}/second burst {2 * _TO_ALL} packets }} counter drop
                icmp type {{ {ERRORS}, source-quench, redirect }} jump error
                iifname . ether saddr . ip saddr @pods accept
                arp htype 1 arp ptype ip arp hlen 6 arp plen 4 \\
                    iifname . ether saddr . arp saddr ip @pods \\
                    iifname . arp saddr ether . arp saddr ip @pods accept
                drop
            }}
            {_for_served(self._group)}
            chain error {{
                icmp type {{ {ERRORS} }} ip saddr . {QUOTED_TO} @errors return
                counter drop
            }}
            {_AGENTS}
            chain agents-forward {{
                type filter hook forward priority -200; policy accept;
                oifgroup {self._group} goto agents
            }}
            chain agents-output {{
                type filter hook output priority -200; policy accept;
                oifgroup {self._group} ip saddr != {gateway(network)} goto agents
                oifgroup {self._group} ether type != ip goto agents
            }}
            chain agents {{
                tcp dport {AGENT_PORT} counter drop
                ip daddr . tcp dport @agents counter drop
            }}
        }}
        {allowed}"""

    async def join(self, port: BridgePort) -> None:
        """Make a VM's tap a port of the bridge. Idempotent."""
        tap = port.tap
        link = f"group {self._group} master {self.name} mtu {self.mtu}"
        if self._has_ipv6():
            link += " addrgenmode none"  # the node itself has no address on the tap
        port_settings = f"learning off flood off group_fwd_mask {_GROUP_FORWARD_MASK:#x}"
        if port.served:
            port_settings += " hairpin on"
        await self._batch(
            "ip",
            [
                f"link set dev {tap} {link}",
                f"link set dev {tap} type bridge_slave {port_settings}",
                f"link set dev {tap} up",
            ],
        )
        await self._batch("bridge", [f"fdb replace {port.mac} dev {tap} master static"])

    def _has_ipv6(self) -> bool:
        """Return whether the kernel was started with IPv6."""
        return (self._proc_sys / "net/ipv6").exists()

    async def allow(self, port: BridgePort) -> None:
        """Let a VM send from its address. Idempotent."""
        await self._nft(self._element("add", port) + fragments.add(self.name, port.address))

    async def forbid(self, port: BridgePort) -> None:
        """Drop what comes from that port and address from now on. Idempotent."""
        await self._nft(
            self._element("add", port)
            + self._element("delete", port)
            + "".join(
                f'{verb} element bridge {self._table} callers {{ "{port.tap}" }}\n'
                for verb in ("add", "delete")
            )
            + fragments.add(self.name, port.address)
            + fragments.delete(self.name, port.address)
        )
        # Else the next VM with the address would begin with what this one has left of its share. Without the
        # program conntrack, the connections themselves stay until the kernel gives them up.
        for command, script in shares.forgetting(self.name, port.address):
            with contextlib.suppress(InfranetesError):
                await check(self._reactor, Command(command, _SECONDS, script.encode()))

    def _element(self, verb: str, port: BridgePort) -> str:
        return "".join(self._elements(verb, port))

    def _elements(self, verb: str, port: BridgePort) -> list[str]:
        """Return the lines that add a port to the tables, or delete it from them."""
        table, quoted = self._table, f"{port.address} . {int(IPv4Address(port.address)):#x}"
        found = {
            f"bridge {table} pods": port.element,
            f"bridge {table} errors": quoted,
            f"ip {table} addresses": port.address,
        }
        if port.served:
            found[f"bridge {table} served"] = port.address
            found[f"bridge {table} reflections"] = f'"{port.tap}" . "{port.tap}"'
            found[f"ip {table} hairpins"] = f"{port.address} . {port.address}"
        if port.agent_port != AGENT_PORT:
            for family in ("ip", "bridge"):
                found[f"{family} {table} agents"] = f"{port.address} . {port.agent_port}"
        return [f"{verb} element {where} {{ {what} }}\n" for where, what in found.items()]

    async def refusals(self) -> refusals.Counts:
        """Return what was refused to VMs, by their addresses. :raise InfranetesError: it can't be read."""
        return await refusals.read(self._reactor, self.name)

    async def remove(self) -> None:
        """Remove bridge and tables. Idempotent."""
        for family, table in self._tables():
            with contextlib.suppress(InfranetesError):
                await self._nft(f"table {family} {table} {{}}\ndelete table {family} {table}")
        await run(
            self._reactor, Command(["ip", "link", "delete", "dev", self.name, "type", "bridge"], _SECONDS)
        )

    def _tables(self) -> list[tuple[str, str]]:
        """Return the family and name of each table."""
        divided = [("ip", each.table_of(self.name)) for each in (shares, fragments)]
        return [("ip", self._table), ("bridge", self._table), *divided]

    async def _batch(self, program: str, commands: list[str]) -> None:
        script = "".join(command + "\n" for command in commands)
        await check(self._reactor, Command([program, "-batch", "-"], _SECONDS, script.encode()))

    async def _nft(self, script: str) -> None:
        await check(self._reactor, Command(["nft", "-f", "-"], _SECONDS, script.encode()))
