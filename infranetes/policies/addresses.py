# SPDX-License-Identifier: Apache-2.0
"""Sets of addresses, as numbers and ranges of numbers: thousands are merged in milliseconds.

An address is a number: an IPv4 address its own value, an IPv6 address its value plus BASE_6.
"""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import lru_cache
from heapq import merge
from ipaddress import IPv4Network, IPv6Network
from itertools import islice
from typing import TypeVar

from infranetes_common.addresses import Network

Range = tuple[int, int]  # first and last address
T = TypeVar("T", int, Range)

BASE_6 = 1 << 128
STEP = 1000  # ranges processed at a time
SORTED = 5_000  # values sorted at a time


def address(text: str) -> int:
    """Return an address as a number. :raise ValueError: the text is not an address."""
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    try:
        number = int.from_bytes(socket.inet_pton(family, text), "big")
    except (OSError, ValueError):
        raise ValueError(f"{text[:100]!r} is no address") from None
    return number + BASE_6 if ":" in text else number


def block(text: str) -> Range:
    """Return a network in CIDR notation as a range. Host bits may be set, since older API servers allow them.

    :raise ValueError: the text is not a network."""
    start, _, length = text.partition("/")
    number = address(start)
    if not (length.isascii() and length.isdecimal()):
        raise ValueError(f"{text[:100]!r} has no prefix length")
    hosts = _bits(number) - int(length)
    if hosts < 0:
        raise ValueError(f"{text[:100]!r} has a prefix that is too long")
    first = number >> hosts << hosts
    return first, first + (1 << hosts) - 1


def _bits(number: int) -> int:
    return 128 if number >= BASE_6 else 32


def ordered(values: Iterable[T]) -> Generator[None, None, list[T]]:
    """Sort the given values. A generator, so that callers can pause."""
    parts = []
    left = iter(values)
    while part := sorted(islice(left, SORTED)):
        parts.append(part)
        yield
    found: list[T] = []
    united = merge(*parts)
    while part := list(islice(united, STEP)):
        found += part
        yield
    return found


def merged(ranges: Iterable[Range]) -> Generator[None, None, list[Range]]:
    """Return the same addresses as sorted ranges with a gap between any two. A generator, like `ordered`."""
    found: list[Range] = []
    given = iter((yield from ordered(ranges)))
    while part := list(islice(given, STEP)):
        _unite(found, part)
        yield
    return found


def _unite(found: list[Range], ranges: Iterable[Range]) -> None:
    """Append sorted ranges, none of which begins before the last one of `found`."""
    for first, last in ranges:
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))


def runs(numbers: Iterable[int]) -> list[Range]:
    """Return sorted numbers as ranges with a gap between any two."""
    found: list[Range] = []
    start, end = -1, -2
    for number in numbers:
        if number != end + 1:
            if start >= 0:
                found.append((start, end))
            start = number
        end = number
    if start >= 0:
        found.append((start, end))
    return found


def without(whole: Range, excepted: Iterable[Range]) -> list[Range]:
    """Return `whole` without the excepted ranges, as sorted ranges."""
    first, end = whole
    left = []
    taken: list[Range] = []
    _unite(taken, sorted(excepted))
    for start, last in taken:
        if last >= first and start <= end:
            if start > first:
                left.append((first, start - 1))
            first = last + 1
    if first <= end:
        left.append((first, end))
    return left


def networks(ranges: Sequence[Range]) -> Generator[None, None, tuple[Network, ...]]:
    """Return the fewest networks that cover the ranges, sorted. A generator, so that callers can pause.

    :param ranges: sorted, with a gap between any two, as `merged` returns them.
    """
    found: list[Network] = []
    for place in range(0, len(ranges), STEP):
        for first, last in ranges[place : place + STEP]:
            if first == last:
                found.append(_single(first))
            else:
                found.extend(_cover(first, last))
        yield
    return tuple(found)


def _cover(first: int, last: int) -> Iterator[Network]:
    """Yield the fewest networks that make up a range."""
    bits = _bits(first)
    while first <= last:
        aligned = (first & -first).bit_length() - 1 if first else bits
        hosts = min(aligned, bits, (last - first + 1).bit_length() - 1)
        yield _network(first, bits - hosts)
        first += 1 << hosts


def _network(first: int, length: int) -> Network:
    return IPv6Network((first - BASE_6, length)) if first >= BASE_6 else IPv4Network((first, length))


@lru_cache(maxsize=1 << 16)
def _single(number: int) -> Network:
    """Return the network of one address: the same object each time, so that comparing it is cheap."""
    return _network(number, _bits(number))
