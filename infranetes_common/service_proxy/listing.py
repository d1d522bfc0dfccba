# SPDX-License-Identifier: Apache-2.0
"""The content of the kernel's tables, parsed from the output of `nft list table`.

nft's JSON takes twenty times the memory of its text. The parser understands only what `script` writes; a
table that contains anything else has to be made anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_address

import attrs

from infranetes_common.service_proxy import script
from infranetes_common.service_proxy.placement import DROPPED, Placement
from infranetes_common.service_proxy.rules import MAX_ENDPOINTS, Key, Target

_BLOCK = re.compile(r"^\t(map|set|chain) (\S+) \{$")
_ELEMENT = re.compile(r"[^,]+")
_RANGE = re.compile(rf"ip6? daddr (\S+) goto {DROPPED}")
_CHAIN = re.compile(r" : goto (\S+)")
_COUNTER = re.compile(r"counter (\S+) \{\s*packets (\d+) ")


class Unreadable(Exception):
    """The table is not as `script` makes it."""


@attrs.frozen
class Listing:
    """The content of a table.

    :ivar placements: by key; the remains of a broken one are listed as they are. :ivar chains: their names.
    :ivar cluster_ips: the addresses in that set. :ivar ranges: address ranges, in that chain's order.
    """

    placements: dict[Key, Placement]
    chains: frozenset[str]
    cluster_ips: frozenset[str]
    ranges: tuple[str, ...] = ()


def read(version: int, text: str) -> Listing:
    """Read what nft has listed. :raise Unreadable: it is not a table as `script` makes it."""
    chains: set[str] = set()
    verdicts: dict[Key, str] = {}
    slots: dict[Key, dict[int, Target]] = {}
    numbers: dict[Key, dict[int, int]] = {}
    addresses: set[str] = set()
    ranges: tuple[str, ...] = ()
    for kind, name, block in _blocks(text):
        if kind == "chain":
            chains.add(name)
            if name == script.RANGES:
                ranges = tuple(_range(line) for line in block)
        elif name in ("services", "refusals"):
            for element, value in _elements(block):
                verdicts[_key(version, element)] = value.removeprefix("goto ")
        elif name == "endpoints":
            for element, value in _elements(block):
                of, _, number = element.rpartition(" . ")
                address, _, port = value.partition(" . ")
                slots.setdefault(_key(version, of), {})[int(number, 0)] = Target(address, int(port))
        elif name == "numbers":
            for element, value in _elements(block):
                of, _, place = element.rpartition(" . ")
                numbers.setdefault(_key(version, of), {})[int(place, 0)] = int(value, 0)
        elif name == "cluster-ips":
            addresses |= {element for element, _ in _elements(block)}
    placements = {}
    for key, chain in verdicts.items():
        numbered = slots.pop(key, {})
        if max(numbered, default=0) >= MAX_ENDPOINTS:
            raise Unreadable(f"{key} has an endpoint {max(numbered)}")
        its = tuple(numbered.get(number) for number in range(max(numbered, default=-1) + 1))
        found = placements[key] = Placement(chain, its, key.address in addresses)
        if not _in_order(found, numbers.pop(key, {})):
            raise Unreadable(f"{key} has endpoints {sorted(numbered)} in another row than they make")
    if slots or numbers:
        raise Unreadable(f"{len(slots.keys() | numbers.keys())} keys have endpoints and no chain")
    return Listing(placements, frozenset(chains), frozenset(addresses), ranges)


def _in_order(placement: Placement, row: dict[int, int]) -> bool:
    """Return whether connections draw exactly the numbers of all endpoints. :param row: that of `numbers`."""
    numbers = list(placement.numbered)
    if placement.affinity_seconds:
        return row == dict(enumerate(numbers))
    return not row and numbers == list(range(len(numbers)))


def chain(text: str) -> str | None:
    """Read the chain of the only element that nft has listed."""
    found = _CHAIN.search(text)
    return found[1] if found is not None else None


def counters(text: str) -> dict[str, int]:
    """Read the packets of each counter that nft has listed."""
    return {name: int(packets) for name, packets in _COUNTER.findall(text)}


def _range(line: str) -> str:
    found = _RANGE.fullmatch(line)
    if found is None:
        raise Unreadable(f"{line!r} is no range of addresses")
    address, _, bits = found[1].partition("/")
    return f"{address}/{bits or ip_address(address).max_prefixlen}"


def _blocks(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the kind, the name and the lines of each map, set and chain."""
    found: tuple[str, str, list[str]] | None = None
    for line in text.splitlines():
        if match := _BLOCK.match(line):
            found = (match[1], match[2], [])
        elif line == "\t}" and found is not None:
            yield found
            found = None
        elif found is not None:
            found[2].append(line.strip())


def _elements(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each element's key and value."""
    text = " ".join(lines).partition("elements = {")[2].rpartition("}")[0]
    for match in _ELEMENT.finditer(text):
        key, _, value = match[0].strip().partition(" : ")
        if key:
            yield key, value


def _key(version: int, text: str) -> Key:
    try:
        address, protocol, port = text.split(" . ")
        return Key(version, address, protocol, int(port))
    except ValueError:
        raise Unreadable(f"{text!r} is no key") from None
