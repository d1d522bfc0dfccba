# SPDX-License-Identifier: Apache-2.0
"""Sets of addresses, as ranges of numbers: thousands of them are united in milliseconds."""

from __future__ import annotations

import socket
from bisect import bisect_right
from collections.abc import Generator, Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network

from infranetes_common.pod_firewall import Network

Range = tuple[int, int, int]  # version of IP, first and last address

BITS = {4: 32, 6: 128}
STEP = 500  # ranges that are worked on at a time


def address(text: str) -> Range:
    """Read an address. :raise ValueError: it is none."""
    version, number = _parsed(text)
    return version, number, number


def block(text: str) -> Range:
    """Read a network in CIDR notation. Bits of the host are allowed, as older API servers take them.

    :raise ValueError: it is none."""
    start, slash, length = text.partition("/")
    version, number = _parsed(start)
    if not slash or not (length.isascii() and length.isdecimal()) or len(length) > 3:
        raise ValueError(f"{text[:100]!r} has no length of its prefix")
    hosts = BITS[version] - int(length)
    if hosts < 0:
        raise ValueError(f"{text[:100]!r} has a prefix that is too long")
    first = number >> hosts << hosts
    return version, first, first + (1 << hosts) - 1


def _parsed(text: str) -> tuple[int, int]:
    version, family = (6, socket.AF_INET6) if ":" in text else (4, socket.AF_INET)
    try:
        return version, int.from_bytes(socket.inet_pton(family, text), "big")
    except (OSError, ValueError):
        raise ValueError(f"{text[:100]!r} is no address") from None


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the same addresses as sorted ranges with a gap between any two."""
    found: list[Range] = []
    for version, first, last in sorted(ranges):
        if found and found[-1][0] == version and first <= found[-1][2] + 1:
            if last > found[-1][2]:
                found[-1] = (version, found[-1][1], last)
        else:
            found.append((version, first, last))
    return found


def without(whole: Range, excepted: Iterable[Range]) -> list[Range]:
    """Return what is left of `whole`, sorted."""
    version, first, end = whole
    left = []
    for other, start, last in merged(excepted):
        if other == version and last >= first and start <= end:
            if start > first:
                left.append((version, first, start - 1))
            first = last + 1
    if first <= end:
        left.append((version, first, end))
    return left


def contains(ranges: Sequence[Range], wanted: Range) -> bool:
    """Whether a range is within one of `ranges`, which are as `merged` returns them."""
    version, first, last = wanted
    place = bisect_right(ranges, (version, first, 1 << 128)) - 1
    return place >= 0 and ranges[place][0] == version and last <= ranges[place][2]


def networks(ranges: Iterable[Range]) -> Generator[None, None, tuple[Network, ...]]:
    """Return the same addresses as the fewest networks, sorted, in small steps."""
    found: list[Network] = []
    for number, (version, first, last) in enumerate(merged(ranges)):
        if first == last:
            found.append(_network(version, first, BITS[version]))
        else:
            found.extend(_cover(version, first, last))
        if number % STEP == STEP - 1:
            yield
    return tuple(found)


def _cover(version: int, first: int, last: int) -> Iterable[Network]:
    """The fewest networks that a range consists of."""
    bits = BITS[version]
    while first <= last:
        aligned = (first & -first).bit_length() - 1 if first else bits
        hosts = min(aligned, (last - first + 1).bit_length() - 1)
        yield _network(version, first, bits - hosts)
        first += 1 << hosts


@lru_cache(maxsize=1 << 16)
def _network(version: int, first: int, length: int) -> Network:
    """A network; the same object each time, which makes comparing and making firewalls fast."""
    return IPv4Network((first, length)) if version == 4 else IPv6Network((first, length))
