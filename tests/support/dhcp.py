# SPDX-License-Identifier: Apache-2.0
"""DHCP's messages as clients write and read them, by RFC 2131's figures."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable
from ipaddress import IPv4Address

import attrs

from tests.support.frames import BROADCAST, IPV4, ethernet, internet_sum, mac, udp
from tests.support.waiting import until

DISCOVER, OFFER, REQUEST, DECLINE, ACK, NAK, RELEASE, INFORM = range(1, 9)
COOKIE = b"\x63\x82\x53\x63"
BROADCAST_FLAG = 0x8000
NOBODY, EVERYBODY = "0.0.0.0", "255.255.255.255"
TRANSACTION = b"abcd"


def option(code: int, value: bytes) -> bytes:
    """Return an option."""
    return bytes((code, len(value))) + value


def address(text: str) -> bytes:
    """The four bytes of an address."""
    return IPv4Address(text).packed


def message(
    client: str,
    kind: int | None,
    *options: bytes,
    flags: int = 0,
    own: str = NOBODY,
    relay: str = NOBODY,
    operation: int = 1,
    hardware: tuple[int, int] = (1, 6),
    name: bytes = b"",
    file: bytes = b"",
    cookie: bytes = COOKIE,
    transaction: bytes = TRANSACTION,
) -> bytes:
    """Return a client's message. :param kind: None: of BOOTP. :param own: the client's address."""
    said = b"" if kind is None else option(53, bytes([kind]))
    return (
        struct.pack("!BBBB4sHH", operation, *hardware, 0, transaction, 0, flags)
        + address(own)
        + bytes(8)
        + address(relay)
        + mac(client).ljust(16, b"\0")
        + name.ljust(64, b"\0")
        + file.ljust(128, b"\0")
        + cookie
        + said
        + b"".join(options)
        + b"\xff"
    )


def sent(
    client: str,
    said: bytes,
    source: str = NOBODY,
    to: str = EVERYBODY,
    to_mac: str = BROADCAST,
    ports: tuple[int, int] = (68, 67),
) -> bytes:
    """Return the frame in which a client sends its message, with UDP's checksum."""
    packet = with_checksum(udp(source, to, said, ports))
    return ethernet(to_mac, client, IPV4, packet)


def with_checksum(packet: bytes) -> bytes:
    """Return a packet of `frames.udp` with the checksum that it leaves out."""
    return packet[:26] + (udp_sum(packet) or 0xFFFF).to_bytes(2, "big") + packet[28:]


def udp_sum(packet: bytes) -> int:
    """Return the checksum over a packet's UDP and pseudo header: 0 if it contains its own."""
    datagram = packet[20:]
    pseudo = packet[12:20] + struct.pack("!BBH", 0, 17, len(datagram))
    return internet_sum(pseudo + datagram + bytes(len(datagram) % 2))


@attrs.frozen
class Reply:
    """What a server sent, as a client reads it."""

    to_mac: str
    from_mac: str
    source: str
    to: str
    ports: tuple[int, int]
    operation: int
    transaction: bytes
    flags: int
    own: str
    given: str
    next_server: str
    relay: str
    client: str
    file: bytes
    options: dict[int, bytes]
    size: int  # bytes of the message

    @property
    def kind(self) -> int | None:
        """What it says; None: it is BOOTP's."""
        return self.options[53][0] if 53 in self.options else None


def read(frame: bytes) -> Reply:
    """Read a server's frame, and check what every client checks."""
    packet = frame[14:]
    assert frame[12:14] == b"\x08\x00", frame[12:14]
    assert packet[0] == 0x45, packet[0]
    assert len(packet) == int.from_bytes(packet[2:4], "big"), "the packet's length"
    assert internet_sum(packet[:20]) == 0, "the checksum of IPv4"
    assert udp_sum(packet) == 0, "the checksum of UDP"
    source_port, to_port, length = struct.unpack_from("!HHH", packet, 20)
    assert length == len(packet) - 20, "the length of UDP"
    said = packet[28:]
    operation, kind, size, _, transaction, _, flags = struct.unpack_from("!BBBB4sHH", said)
    assert (kind, size) == (1, 6)
    assert said[236:240] == COOKIE
    options: dict[int, bytes] = {}
    rest = said[240:]
    while rest[0] != 255:
        code, length = rest[:2]
        if code == 0:
            rest = rest[1:]
            continue
        options[code] = options.get(code, b"") + rest[2 : 2 + length]
        rest = rest[2 + length :]
    assert not rest[1:].strip(b"\0")
    own, given, server, relay = (str(IPv4Address(said[at : at + 4])) for at in range(12, 28, 4))
    return Reply(
        frame[:6].hex(":"), frame[6:12].hex(":"),
        str(IPv4Address(packet[12:16])), str(IPv4Address(packet[16:20])), (source_port, to_port),
        operation, transaction, flags, own, given, server, relay,
        said[28:34].hex(":"), said[108:236], options, len(said),
    )  # fmt: skip


def replies(frames: Iterable[bytes]) -> list[Reply]:
    """Return those frames that are servers' messages."""
    return [read(each) for each in frames if each[12:14] == b"\x08\x00" and each[34:36] == b"\0\x43"]


async def replies_on(tap: int) -> list[Reply]:
    """Wait for servers' messages at a tap, and return those that have come, without all else."""
    found: list[bytes] = []

    def come() -> bool:
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(os.read(tap, 65536)[10:])
        return bool(replies(found))

    await until(come, "a server's message")
    return replies(found)
