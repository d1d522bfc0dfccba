# SPDX-License-Identifier: Apache-2.0
"""DHCP's messages and options (RFC 2131, 2132), and those of BOOTP, from which they come."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address

import attrs

from infranetes.providers.qemu.dhcp.packets import Malformed

_HEADER = struct.Struct("!BBBB4sHH4s4s4s4s16s64s128s")
_COOKIE = b"\x63\x82\x53\x63"
_REQUEST, _REPLY = 1, 2
_ETHERNET, _MAC_BYTES = 1, 6
_BROADCAST = 0x8000
_SHORTEST = 300  # bytes of BOOTP's messages: some clients drop shorter ones
_LONGEST_PART = 255  # of an option; longer ones are written in parts (RFC 3396)
_NOBODY = IPv4Address(0)


class Kind(enum.IntEnum):
    """What a DHCP message says."""

    DISCOVER = 1
    OFFER = 2
    REQUEST = 3
    DECLINE = 4
    ACK = 5
    NAK = 6
    RELEASE = 7
    INFORM = 8


class Option(enum.IntEnum):
    """The options that are read or written, by their numbers."""

    PAD = 0
    SUBNET_MASK = 1
    ROUTERS = 3
    NAME_SERVERS = 6
    HOST_NAME = 12
    DOMAIN = 15
    MTU = 26
    BROADCAST = 28
    REQUESTED_ADDRESS = 50
    LEASE_SECONDS = 51
    OVERLOAD = 52
    KIND = 53
    SERVER = 54
    REQUESTED = 55
    MESSAGE = 56
    LONGEST_MESSAGE = 57
    RENEWAL_SECONDS = 58
    REBINDING_SECONDS = 59
    CLIENT_ID = 61
    SEARCH = 119
    ROUTES = 121
    ROUTES_OF_MICROSOFT = 249
    END = 255


@attrs.frozen
class Request:
    """A client's message."""

    kind: Kind | None  # None: the client knows BOOTP alone
    transaction: bytes
    mac: bytes
    broadcast: bool = False  # whether it can't receive answers to its own address yet
    address: IPv4Address = _NOBODY  # that it has
    relay: IPv4Address = _NOBODY
    requested_address: IPv4Address | None = None
    server: IPv4Address | None = None  # whose offer it takes
    requested: frozenset[int] | None = None  # options that it asks for; None: it does not say
    client_id: bytes = b""
    longest: int = 576  # bytes of the longest IPv4 packet that it takes


def decode(message: bytes) -> Request:
    """Read a client's message. :raise Malformed: it is none of an Ethernet card's."""
    if len(message) < _HEADER.size:
        raise Malformed("too short")
    (operation, hardware, length, _, transaction, _, flags, address, _, _, relay, card, name, file) = (
        _HEADER.unpack_from(message)
    )
    if (operation, hardware, length) != (_REQUEST, _ETHERNET, _MAC_BYTES):
        raise Malformed("no request of an Ethernet card")
    options = _options(message[_HEADER.size :], name, file)
    kind = options.get(Option.KIND)
    if kind is not None and (len(kind) != 1 or kind[0] not in set(Kind)):
        raise Malformed("an unknown kind of message")
    requested = options.get(Option.REQUESTED)
    longest = options.get(Option.LONGEST_MESSAGE, b"")
    return Request(
        Kind(kind[0]) if kind else None,
        transaction,
        card[:_MAC_BYTES],
        bool(flags & _BROADCAST),
        IPv4Address(address),
        IPv4Address(relay),
        _address(options, Option.REQUESTED_ADDRESS),
        _address(options, Option.SERVER),
        None if requested is None else frozenset(requested),
        options.get(Option.CLIENT_ID, b"")[:_LONGEST_PART],
        max(576, int.from_bytes(longest, "big")) if len(longest) == 2 else 576,
    )


def _options(area: bytes, name: bytes, file: bytes) -> dict[int, bytes]:
    if area[:4] != _COOKIE:
        return {}  # BOOTP's vendor area, of whichever vendor
    options: dict[int, bytes] = {}
    _add_options(options, area[4:])
    overload = options.get(Option.OVERLOAD, b"")
    for bit, more in ((1, file), (2, name)):
        if len(overload) == 1 and overload[0] & bit:
            _add_options(options, more)
    return options


def _add_options(options: dict[int, bytes], area: bytes) -> None:
    position = 0
    while position < len(area) and (code := area[position]) != Option.END:
        position += 1
        if code == Option.PAD:
            continue
        if position == len(area):
            raise Malformed("an option without length")
        begin, position = position + 1, position + 1 + area[position]
        if position > len(area):
            raise Malformed("an option is cut off")
        options[code] = options.get(code, b"") + area[begin:position]  # parts of one (RFC 3396)


def _address(options: Mapping[int, bytes], code: Option) -> IPv4Address | None:
    value = options.get(code)
    if value is None:
        return None
    if len(value) != 4:
        raise Malformed("an address")
    return IPv4Address(value)


@attrs.frozen
class Reply:
    """A server's message.

    :ivar options: the most important first: the last are left out where the client can't take all.
    """

    request: Request
    assigned: IPv4Address  # 0.0.0.0: none
    address: IPv4Address = _NOBODY  # that the client has, as it says itself
    options: tuple[tuple[int, bytes], ...] = ()


def encode(reply: Reply, most: int) -> bytes:
    """Return the message. :param most: how many bytes it may have."""
    request = reply.request
    head = _HEADER.pack(
        _REPLY,
        _ETHERNET,
        _MAC_BYTES,
        0,
        request.transaction,
        0,
        _BROADCAST if request.broadcast else 0,
        reply.address.packed,
        reply.assigned.packed,
        _NOBODY.packed,
        request.relay.packed,
        request.mac,
        b"",
        b"",
    )
    options = b""
    for code, value in reply.options:
        written = b"".join(bytes((code, len(part))) + part for part in _parts(value))
        if len(head) + len(_COOKIE) + len(options) + len(written) + 1 <= most:
            options += written
    return (head + _COOKIE + options + bytes([Option.END])).ljust(_SHORTEST, b"\0")


def _parts(value: bytes) -> Iterable[bytes]:
    return (value[begin : begin + _LONGEST_PART] for begin in range(0, len(value), _LONGEST_PART))


def labels(domain: str) -> bytes:
    """Return a domain as DNS writes it; b"": it is none."""
    parts = domain.rstrip(".").split(".")
    if not all(0 < len(each) <= 63 and each.isascii() for each in parts) or len(domain) > 253:
        return b""
    return b"".join(bytes([len(each)]) + each.encode() for each in parts) + b"\0"


def search_list(domains: Iterable[str], most: int) -> bytes:
    """Return the value of option 119 (RFC 3397), of as many of the domains as fit into `most` bytes.

    Names that are none are left out."""
    encoded = b""
    ends: dict[tuple[str, ...], int] = {}  # where the ends of names are that are there already
    for domain in domains:
        if not labels(domain):
            continue
        parts = tuple(domain.rstrip(".").split("."))
        more, own = b"", {}
        for index, label in enumerate(parts):
            if (offset := ends.get(parts[index:])) is not None:
                more += (0xC000 | offset).to_bytes(2, "big")
                break
            own[parts[index:]] = len(encoded) + len(more)
            more += bytes([len(label)]) + label.encode()
        else:
            more += b"\0"
        if len(encoded) + len(more) <= most:
            encoded += more
            ends.update(own)
    return encoded
