# SPDX-License-Identifier: Apache-2.0
"""The outcome of connections to an address, judged by the kernel's tables."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from ipaddress import ip_address, ip_network

import attrs

from infranetes_common.service_proxy.placement import DROPPED, Placement
from infranetes_common.service_proxy.rules import Key, Target


class Outcome(enum.Enum):
    TRANSLATED = "translated"
    REFUSED = "refused"
    DROPPED = "dropped"
    OTHER_PORT = "other port"  # a cluster IP's address with another port: refused
    UNALLOCATED = "unallocated"  # an address in the Services' ranges that no Service has: dropped
    UNTOUCHED = "untouched"  # no Service's address: packets are sent unchanged


@attrs.frozen
class Verdict:
    """The outcome of connections to an address.

    :ivar endpoints: the targets that they are spread over.
    :ivar affinity_seconds: how long a client keeps its endpoint; 0 for no affinity.
    """

    outcome: Outcome
    endpoints: tuple[Target, ...] = ()
    affinity_seconds: int = 0


def judge(
    key: Key,
    placed: Mapping[Key, Placement],
    cluster_ips: Mapping[tuple[int, str], int],
    ranges: Iterable[str],
) -> Verdict:
    """Return the outcome of connections to `key`.

    :param cluster_ips: family and address, and how many keys have them. :param ranges: of the key's family.
    """
    found = placed.get(key)
    if found is not None and found.slots:
        return Verdict(Outcome.TRANSLATED, tuple(found.numbered.values()), found.affinity_seconds)
    if found is not None:
        return Verdict(Outcome.DROPPED if found.chain == DROPPED else Outcome.REFUSED)
    if cluster_ips.get((key.version, key.address)):
        return Verdict(Outcome.OTHER_PORT)
    if any(ip_address(key.address) in ip_network(each) for each in ranges):
        return Verdict(Outcome.UNALLOCATED)
    return Verdict(Outcome.UNTOUCHED)
