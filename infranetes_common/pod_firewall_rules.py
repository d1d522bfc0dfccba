# SPDX-License-Identifier: Apache-2.0
"""A pod's firewall as nftables rules, for the node and the VM to enforce.

Every packet is judged by the connection that it belongs to, as the kernel tracks it: by who opened it (the
source of its original direction) and whom it reaches (the source of its reply direction). So a rule applies
to both directions, whichever Services' addresses were translated, and to ICMP errors about the connection.
No packet passes just because its connection is known, so a change also applies to existing connections.

The rules accept allowed packets and drop the rest. If both directions of connections are judged, each has a
base chain of its own, because accepting a packet ends only that chain.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping, Sequence

from infranetes_common.addresses import Network, nft_address
from infranetes_common.pod_firewall import Allowed, PodFirewall, Ports

FAMILIES = {4: "ip", 6: "ip6"}
ERRORS = "destination-unreachable, time-exceeded, parameter-problem"
"""The types of ICMP that tell of an error, in nft's words; of those that are still in use."""
QUOTED_TO = "@th,192,32"
"""The destination of the packet that an ICMP error quotes, in nft's words."""
Chains = Mapping[str, Sequence[str]]
"""Rules by the name of their chain; chains that others jump to come first."""


class Way(enum.Enum):
    """A direction of connections to judge; its value tells nft which tuple has the other side as source."""

    INGRESS = "original"
    EGRESS = "reply"

    def of(self, firewall: PodFirewall) -> tuple[Allowed, ...] | None:
        """Return the firewall's allowed peers in this direction; None for everyone."""
        return firewall.ingress if self is Way.INGRESS else firewall.egress


def chains(
    name: str, firewall: PodFirewall, way: Way, own: Iterable[str] = (), versions: Iterable[int] = (4,)
) -> dict[str, list[str]]:
    """Return the chain `name`, and the chains it jumps to, which other chains may share.

    :param own: the pod's addresses; it may always connect to itself.
    :param versions: of IP. Networks of other versions are left out.
    """
    allowed = way.of(firewall)
    if allowed is None:
        return {name: []}
    made: dict[str, list[str]] = {}
    rules = [f"ct {way.value} {_family(address)} saddr {nft_address(address)} accept" for address in own]
    for each in allowed:
        verdict = "accept"
        if each.ports is not None:
            chain, judged = _port_chain(each.ports)
            made[chain] = judged
            verdict = f"jump {chain}"
        for version in versions:
            if networks := _set(each.networks, version):
                rules.append(f"ct {way.value} {FAMILIES[version]} saddr {networks} {verdict}")
    return {**made, name: [*rules, "drop"]}


def replacing(family: str, table: str, new: Chains) -> str:
    """Return the part of a script that adds these chains to a table; existing ones get the new rules."""
    emptied = "".join(
        f"add chain {family} {table} {name}\nflush chain {family} {table} {name}\n" for name in new
    )
    return f"{emptied}table {family} {table} {{\n{listed(new)}}}\n"


def listed(new: Chains) -> str:
    """Return the chains in nft's syntax, as a table's definition contains them."""
    return "".join(
        f"chain {name} {{\n{''.join(f'{rule}{chr(10)}' for rule in rules)}}}\n" for name, rules in new.items()
    )


def _port_chain(ports: Sequence[Ports]) -> tuple[str, list[str]]:
    """Return its name, which describes its content."""
    written = [
        f"ct original protocol {each.protocol.lower()} ct reply proto-src "
        f"{each.first if each.first == each.last else f'{each.first}-{each.last}'} accept"
        for each in ports
    ]
    return f"ports-{hashlib.sha256(repr(written).encode()).hexdigest()[:20]}", written


def _set(networks: Iterable[Network], version: int) -> str:
    texts: list[str] = []
    for each in networks:
        if each.version == version:
            # A set can't contain the network of all addresses, but it can contain both halves of it.
            texts += map(nft_address, each.subnets() if each.prefixlen == 0 else [each])
    return f"{{ {', '.join(texts)} }}" if texts else ""


def _family(address: str) -> str:
    return FAMILIES[6 if ":" in address else 4]
