# SPDX-License-Identifier: Apache-2.0
"""The callers at the agent's port that have not shown a certificate yet: how often each may call, who waits.

Nothing is known of them but their address. So each address, and of IPv6 each network of 64 bits, has a budget
of its own, and whoever has the most connections that wait is the one to lose them. The node's own addresses
are trusted, so that others take nothing of theirs: those that the VM's certificate names, and those that have
shown the node's certificate.

The others have budgets together, too: one for those that have called little of late, which a node may be that
nobody knows yet, and one for those that call all the time, however many addresses they have.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from ipaddress import ip_network
from typing import Generic, TypeVar

import attrs
from twisted.internet.interfaces import IReactorTime

from infranetes_common.addresses import Address, Network

REMEMBERED = 1024  # sources whose budgets are kept; those that called longest ago are forgotten
TRUSTED = 16  # sources that have shown the node's certificate, the last of them
STRANGERS = 8.0  # how many times one source's budget all those together have that are not trusted
NEWCOMERS = 16.0  # the same, of those that have called little of late
LITTLE = 0.75  # the part of its budget that such a source has left
BURST_SECONDS = 8.0  # a source that has not called for so long may do at once what it might have done

C = TypeVar("C")


def address_of(host: str) -> Address | None:
    """Return a connection's address as it is in packets; None: it has none."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def source_of(host: str) -> str:
    """Return whom an address counts as: itself, or its network of 64 bits. "": what is not an IP address."""
    address = address_of(host)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
    return "" if address is None else str(address)


@attrs.define
class _Bucket:
    tokens: float
    at: float

    def take(self, now: float, rate: float) -> bool:
        """Take one token, if there is one."""
        self.tokens = min(self.tokens + (now - self.at) * rate, max(rate * BURST_SECONDS, 1.0))
        self.at = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


class Callers(Generic[C]):
    """The connections that have not shown a certificate yet, by source, and the sources' budgets.

    :param rate: connections a second that one source may make.
    """

    def __init__(self, clock: IReactorTime, rate: float) -> None:
        self.rate = rate
        self._clock = clock
        self._budgets: dict[str, _Bucket] = {}  # the source that has called last is the last
        self._strangers = self._full(STRANGERS)
        self._newcomers = self._full(NEWCOMERS)
        self._named: frozenset[str] = frozenset()
        self._networks: Sequence[Network] = ()
        self._trusted: dict[str, None] = {}
        self._waiting: dict[str, dict[C, None]] = {}  # by source, oldest first

    def admits(self, source: str) -> bool:
        """Take one connection of a source's budget. Returns whether it had one left."""
        now = self._clock.seconds()
        budget = self._budgets.pop(source, None) or self._full()
        self._budgets[source] = budget
        if len(self._budgets) > REMEMBERED:
            del self._budgets[next(iter(self._budgets))]
        if not budget.take(now, self.rate):
            return False
        if self._trusts(source):
            return True
        if budget.tokens >= LITTLE * self.rate * BURST_SECONDS:
            return self._newcomers.take(now, self.rate * NEWCOMERS)
        return self._strangers.take(now, self.rate * STRANGERS)

    def name(self, node: Iterable[Network]) -> None:
        """Set the addresses and networks that are the node's, as the VM's certificate says."""
        node = list(node)
        single = [each for each in node if each.prefixlen == each.max_prefixlen]
        self._named = frozenset(source_of(str(each.network_address)) for each in single)
        self._networks = [each for each in node if each not in single]

    def trust(self, source: str) -> None:
        """Note that a source has shown the node's certificate."""
        self._trusted.pop(source, None)
        self._trusted[source] = None
        if len(self._trusted) > TRUSTED:
            del self._trusted[next(iter(self._trusted))]

    def add(self, source: str, connection: C) -> None:
        """Add a connection that waits."""
        self._waiting.setdefault(source, {})[connection] = None

    def remove(self, source: str, connection: C) -> None:
        """Remove a connection that waits no longer. Idempotent."""
        waiting = self._waiting.get(source, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(source, None)

    def one_too_many(self, newest: str) -> C:
        """Return the connection that has to go: the oldest of the source that has most. Trusted sources lose
        none to others.

        :param newest: the source that connected last; of sources that have as many, it displaces its own."""
        candidates = [each for each in self._waiting if each == newest or not self._trusts(each)]
        mine = len(self._waiting[newest]) > 1  # otherwise it would be refused by as many as may wait
        most = max(candidates, key=lambda each: (len(self._waiting[each]), mine and each == newest))
        return next(iter(self._waiting[most]))

    def _trusts(self, source: str) -> bool:
        if source in self._trusted or source in self._named:
            return True
        return bool(self._networks and source) and any(
            ip_network(source).version == each.version and ip_network(source).overlaps(each)
            for each in self._networks
        )

    def _full(self, times: float = 1.0) -> _Bucket:
        return _Bucket(max(self.rate * times * BURST_SECONDS, 1.0), self._clock.seconds())
