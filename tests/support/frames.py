# SPDX-License-Identifier: Apache-2.0
"""Ethernet frames, including forged ones, and taps through which to send them."""

from __future__ import annotations

import os
import struct
from ipaddress import IPv4Address, IPv6Address

from infranetes.providers.qemu.network.bridge import BridgePort, open_tap
from infranetes.providers.subnet import mac_of

IPV4, ARP, RARP, VLAN, IPV6, QINQ, PPPOE = 0x0800, 0x0806, 0x8035, 0x8100, 0x86DD, 0x88A8, 0x8864
BROADCAST = "ff:ff:ff:ff:ff:ff"
_VNET_HEADER = bytes(10)


def mac(text: str) -> bytes:
    """The six bytes of an Ethernet address."""
    return bytes.fromhex(text.replace(":", ""))


def ethernet(to: str, sender: str, kind: int, payload: bytes) -> bytes:
    """Return a frame, padded to the shortest that Ethernet allows."""
    return (mac(to) + mac(sender) + kind.to_bytes(2, "big") + payload).ljust(60, b"\0")


def tagged(frame: bytes, *tags: tuple[int, int]) -> bytes:
    """Return `frame` with VLAN tags of these ethertypes and ids, the outermost first."""
    return frame[:12] + b"".join(struct.pack("!HH", kind, vlan) for kind, vlan in tags) + frame[12:]


def internet_sum(data: bytes) -> int:
    """Return the internet checksum (of IPv4, ICMP and others) of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def udp(
    source: str, to: str, payload: bytes, ports: tuple[int, int] = (1000, 2000), number: int = 0
) -> bytes:
    """Return an IPv4 packet with a UDP datagram. :param number: its identification."""
    datagram = struct.pack("!HHHH", *ports, 8 + len(payload), 0) + payload
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(datagram), number, 0, 64, 17, 0)
    head += IPv4Address(source).packed + IPv4Address(to).packed
    return head[:10] + internet_sum(head).to_bytes(2, "big") + head[12:] + datagram


def fragment(source: str, to: str, number: int, place: int, size: int, last: bool = False) -> bytes:
    """Return a fragment of a UDP datagram.

    :param number: the datagram's identification. :param place: that of the fragment's first byte.
    """
    offset = place // 8 | (0 if last else 0x2000)
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + size, number, offset, 64, 17, 0)
    head += IPv4Address(source).packed + IPv4Address(to).packed
    return head[:10] + internet_sum(head).to_bytes(2, "big") + head[12:] + bytes(size)


def arp(operation: int, sender: tuple[str, str], target: tuple[str, str], lengths: bytes = b"\6\4") -> bytes:
    """Return an ARP packet. `sender` and `target` are hardware and protocol addresses."""
    head = struct.pack("!HH", 1, IPV4) + lengths + struct.pack("!H", operation)
    return head + b"".join(
        mac(hardware) + IPv4Address(address).packed for hardware, address in (sender, target)
    )


def icmpv6(kind: int, source: str, to: str, body: bytes) -> bytes:
    """Return an IPv6 packet with an ICMPv6 message, whose checksum is 0: the bridge does not look at it."""
    message = struct.pack("!BBH", kind, 0, 0) + body
    return (
        struct.pack("!IHBB", 6 << 28, len(message), 58, 255)
        + IPv6Address(source).packed
        + IPv6Address(to).packed
        + message
    )


class TapHost:
    """A host on the bridge: a tap, opened as QEMU opens it, through which frames are sent and received."""

    def __init__(self, name: str, address: str) -> None:
        self.port = BridgePort(name, address)
        self.address = address
        self.mac = mac_of(IPv4Address(address))
        self._tap = open_tap(name)

    def send(self, frame: bytes) -> None:
        """Send a frame. When this returns, the frame has been delivered or dropped."""
        os.write(self._tap, _VNET_HEADER + frame)

    def received(self) -> list[bytes]:
        """Return the frames that came since the last call."""
        found = []
        while True:
            try:
                found.append(os.read(self._tap, 65536)[len(_VNET_HEADER) :])
            except BlockingIOError:
                return found

    def close(self) -> None:
        """Remove the tap. Idempotent."""
        tap, self._tap = self._tap, -1
        if tap >= 0:
            os.close(tap)
