# SPDX-License-Identifier: Apache-2.0
"""What a VM in a CNI's network is told of IPv6: by router advertisements and DHCPv6 (RFC 4861, 8415).

An advertisement says that addresses come from DHCPv6 alone, and tells router, MTU, and what is on the link.
It comes from the router's own address if that is of the link, since a guest takes the sender for the router;
a router with another address can't be told. DHCPv6 gives the VM's addresses to the first association that
the client names. As with IPv4, each answer follows from the message alone.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator
from ipaddress import IPv6Address, IPv6Interface, IPv6Network

from infranetes.providers.machine_images import Names
from infranetes.providers.qemu.dhcp import packets6
from infranetes.providers.qemu.dhcp.messages import labels
from infranetes.providers.qemu.dhcp.packets import Malformed
from infranetes.providers.qemu.dhcp.packets6 import ICMP, UDP, Packet
from infranetes_common.identity import Network

SECONDS = 86400  # that an address is valid. Clients ask again after half of it
_CARD = b"\x02dhcp."
_OWN = IPv6Address("fe80::6468:6370")  # where the router has no address of the link
_ALL_NODES, _ALL_NODES_CARD = IPv6Address("ff02::1"), b"\x33\x33\0\0\0\x01"
_UNSPECIFIED = IPv6Address(0)
_SOLICITATION, _ADVERTISEMENT = 133, 134
_MANAGED = 0xC0  # addresses and all else by DHCPv6
_ROUTER_SECONDS = 65535
_SERVER_PORT, _CLIENT_PORT = 547, 546
_SERVER_ID = struct.pack("!HH", 3, 1) + _CARD  # DUID-LL of Ethernet
_MOST_NAMES, _MOST_ASSOCIATIONS = 512, 4  # bytes, and how many are answered

# Kinds of DHCPv6's messages
_SOLICIT, _ADVERTISE, _REQUEST, _CONFIRM, _RENEW, _REBIND, _REPLY, _RELEASE, _DECLINE = range(1, 10)
_INFORMATION = 11
_GIVING = (_SOLICIT, _REQUEST, _RENEW, _REBIND)
_NAMES_SERVER = (_REQUEST, _RENEW, _RELEASE, _DECLINE)  # messages for one server
# Options
_CLIENT, _SERVER, _ASSOCIATION, _ADDRESS, _PREFERENCE, _STATUS, _RAPID = 1, 2, 3, 5, 7, 13, 14
_DNS, _SEARCH = 23, 24
_SUCCESS, _NO_ADDRESS, _NOT_ON_LINK = 0, 2, 4


class Lease6:
    """What a VM is told of IPv6."""

    def __init__(self, network: Network, names: Names) -> None:
        self._mac = bytes.fromhex(network.mac.replace(":", ""))
        self._addresses = [IPv6Interface(each) for each in network.more if ":" in each]
        routes = [each for each in network.routes if ":" in each.to]
        via = [IPv6Address(each.via) for each in routes if each.via]
        link_local = [each for each in via if each.is_link_local]
        self._router = link_local[0] if link_local else _OWN
        has_default = any(
            each.via and IPv6Address(each.via) == self._router and IPv6Network(each.to).prefixlen == 0
            for each in routes
        )
        servers = list(_sixth(names.servers))
        search = b""
        for each in names.searches:
            search += labels(each) if len(search) + len(labels(each)) <= _MOST_NAMES else b""
        self._advertisement = struct.pack(
            "!BBHBBHII", _ADVERTISEMENT, 0, 0, 64, _MANAGED, _ROUTER_SECONDS if has_default else 0, 0, 0
        ) + b"".join(self._told(network.mtu, routes_on_link(network), servers))
        self._names = b"".join(
            _option(code, value) for code, value in ((_DNS, b"".join(servers)), (_SEARCH, search)) if value
        )

    @property
    def is_any(self) -> bool:
        """Whether the VM has addresses of IPv6."""
        return bool(self._addresses)

    def _told(self, mtu: int, on_link: Iterable[IPv6Network], servers: list[bytes]) -> Iterator[bytes]:
        """Yield the options of an advertisement."""
        yield struct.pack("!BBHI", 5, 1, 0, mtu)
        for subnet in on_link:
            flags = 0x80  # on the link, and no addresses are made of it
            yield struct.pack("!BBBBIII", 3, 4, subnet.prefixlen, flags, 0xFFFFFFFF, 0xFFFFFFFF, 0)
            yield subnet.network_address.packed
        if servers:
            yield struct.pack("!BBHI", 25, 1 + 2 * len(servers), 0, 0xFFFFFFFF) + b"".join(servers)

    def advertisement(self, to: IPv6Address = _ALL_NODES, card: bytes = _ALL_NODES_CARD) -> bytes:
        """Return the frame of an advertisement."""
        return packets6.encode(Packet(_CARD, card, self._router, to, ICMP, self._advertisement))

    def answer(self, frame: bytes) -> bytes | None:
        """Return the answer to a frame of the VM's; None: there is none, as to what is malformed."""
        try:
            packet = packets6.decode(frame)
            if packet.sender != self._mac:
                return None
            if packet.protocol == ICMP:
                return self._solicited(packet)
            return self._answered(packet)
        except Malformed:
            return None

    def _solicited(self, packet: Packet) -> bytes | None:
        if packet.payload[0] != _SOLICITATION or packet.payload[1] or packet.hops != 255:
            return None
        if packet.source.is_link_local:
            return self.advertisement(packet.source, self._mac)
        return self.advertisement()

    def _answered(self, packet: Packet) -> bytes | None:
        _, port = struct.unpack_from("!HH", packet.payload)
        message = packet.payload[8:]
        if port != _SERVER_PORT or not packet.source.is_link_local or len(message) < 4:
            return None
        options = list(_options(message[4:]))
        reply = self._reply(message[0], options)
        if reply is None:
            return None
        kind, body = reply
        said = bytes([kind]) + message[1:4] + body
        header = struct.pack("!HHHH", _SERVER_PORT, _CLIENT_PORT, 8 + len(said), 0)
        return packets6.encode(Packet(_CARD, self._mac, self._router, packet.source, UDP, header + said))

    def _reply(self, asked: int, options: list[tuple[int, bytes]]) -> tuple[int, bytes] | None:
        by_code = dict(options)
        client, server = by_code.get(_CLIENT), by_code.get(_SERVER)
        if server not in (None, _SERVER_ID) or (asked in _NAMES_SERVER and server is None):
            return None
        if client is None and asked != _INFORMATION:
            return None
        body = _option(_SERVER, _SERVER_ID)
        if client is not None:
            body += _option(_CLIENT, client)
        if asked in _GIVING:
            kind = _REPLY
            if asked == _SOLICIT:
                body += _option(_PREFERENCE, b"\xff")  # so that clients wait for no other server
                if _RAPID in by_code:
                    body += _option(_RAPID, b"")
                else:
                    kind = _ADVERTISE
            asked_for = [value for code, value in options if code == _ASSOCIATION]
            return kind, body + self._associations(asked_for[:_MOST_ASSOCIATIONS]) + self._names
        if asked == _CONFIRM:
            wanted = [
                each for code, value in options if code == _ASSOCIATION for each in _addresses_in(value)
            ]
            own = {each.ip for each in self._addresses}
            return _REPLY, body + _status(_SUCCESS if own.issuperset(wanted) else _NOT_ON_LINK)
        if asked in (_RELEASE, _DECLINE):
            return _REPLY, body + _status(_SUCCESS)
        if asked == _INFORMATION:
            return _REPLY, body + self._names
        return None

    def _associations(self, asked_for: Iterable[bytes]) -> bytes:
        """Return the associations of addresses: the first has all, and what is not the VM's is taken back."""
        associations = b""
        own = [each.ip for each in self._addresses]
        for value in asked_for:
            if len(value) < 12:
                raise Malformed("an association")
            head = value[:4] + struct.pack("!II", SECONDS // 2, SECONDS * 4 // 5)
            within = b"".join(
                _option(_ADDRESS, each.packed + struct.pack("!II", SECONDS, SECONDS)) for each in own
            )
            for each in list(_addresses_in(value))[:_MOST_ASSOCIATIONS]:
                if each not in own:
                    within += _option(_ADDRESS, each.packed + bytes(8))
            associations += _option(_ASSOCIATION, head + (within if own else within + _status(_NO_ADDRESS)))
            own = []
        return associations


def routes_on_link(network: Network) -> list[IPv6Network]:
    """Return the subnets of IPv6 that are on the link."""
    own = [IPv6Interface(each).network for each in network.more if ":" in each]
    routed = [IPv6Network(each.to) for each in network.routes if ":" in each.to and not each.via]
    return sorted({each for each in (*own, *routed) if each.prefixlen < 128 and not each.is_link_local})


def _sixth(servers: Iterable[str]) -> Iterator[bytes]:
    """Yield the addresses of IPv6."""
    for each in servers:
        with contextlib.suppress(ValueError):
            yield IPv6Address(each).packed


def _options(area: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(area):
        if position + 4 > len(area):
            raise Malformed("an option is cut off")
        code, length = struct.unpack_from("!HH", area, position)
        position += 4 + length
        if position > len(area):
            raise Malformed("an option is cut off")
        yield code, area[position - length : position]


def _addresses_in(association: bytes) -> Iterator[IPv6Address]:
    """Yield the addresses that a client names in an association."""
    for code, value in _options(association[12:]):
        if code == _ADDRESS:
            if len(value) < 24:
                raise Malformed("an address")
            yield IPv6Address(value[:16])


def _option(code: int, value: bytes) -> bytes:
    return struct.pack("!HH", code, len(value)) + value


def _status(code: int) -> bytes:
    return _option(_STATUS, struct.pack("!H", code))
