# SPDX-License-Identifier: Apache-2.0
"""The service proxy itself, which keeps the kernel's tables equal to the node's rules.

The proxy remembers what it put into the kernel, and reads the tables only when that is unsure: when the agent
starts, and after a change that failed. So a restarted agent changes only the differences.

state     the tables                      what follows
UNSURE    may be anything                 they are read; those that can't be are made anew
KNOWN     are what `_placed` says         changes; one that fails leads to UNSURE
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network
from itertools import islice
from socket import AF_INET, AF_INET6, inet_ntop

import attrs
from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes_common.addresses import Network
from infranetes_common.concurrency import shielded
from infranetes_common.errors import InfranetesError, InvalidArgument, Unavailable
from infranetes_common.service_proxy import script
from infranetes_common.service_proxy.kernel import Kernel
from infranetes_common.service_proxy.placement import Placement, place
from infranetes_common.service_proxy.rules import Key, Rule
from infranetes_common.service_proxy.verdict import Verdict, judge

BATCH = 500  # keys changed in one transaction
MAX_KEYS = 200_000
SPARE_CHAINS = 200  # the most chains that no rule uses, beside as many as are used

_log = Logger()


@attrs.frozen
class Version:
    """The version of the rules: the node's table, and a number in it. Unknown if `table` is empty."""

    table: str = ""
    number: int = 0


@attrs.frozen
class Update:
    """One part of an update to a version. Fields as in `ServiceRulesUpdate`."""

    version: Version
    changed: Mapping[Key, Rule]
    removed: Sequence[Key] = ()
    all: bool = False
    more: bool = False
    ranges: Sequence[str] | None = None


@attrs.frozen
class Report:
    """A report on the service proxy's state. Fields as in `ServiceReportResponse`."""

    version: Version
    rules: int
    counters: Mapping[str, int]
    flows: int
    max_flows: int
    verdict: Verdict | None


class ServiceProxy:
    """The service proxy of this VM.

    :ivar version: the version in force.
    :ivar watch: once begun, it soon restores tables that another program has changed.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._lock = DeferredLock()
        self._known = False
        self._placed: dict[Key, Placement] = {}
        self._cluster_ips: Counter[tuple[int, str]] = Counter()
        self._chains: set[tuple[int, str]] = set()
        self._used_chains = 0  # how many there were when those that no rule used were last removed
        self._ranges: dict[int, tuple[str, ...]] = {}
        self._coming: tuple[Version, set[Key]] | None = None  # the full update under way: its keys so far
        self.version = Version()
        self.watch = kernel.watch(lambda _sure: self.mend())

    async def prepare(self) -> None:
        """Make the tables, or read those that are there. :raise InfranetesError: why that fails."""
        async with self._lock:
            with self.watch.ours():
                await self._learn()

    async def apply(self, update: Update) -> None:
        """Put a part of an update into force.

        :raise InvalidArgument: there would be too many rules.
        :raise Unavailable: the kernel refuses. No version is in force until an update of all has come.
        """
        await shielded(self._applied(update))

    async def _applied(self, update: Update) -> None:
        async with self._lock:
            try:
                with self.watch.ours():
                    if not self._known:
                        await self._learn()
                    await self._change(update)
            except InfranetesError as error:
                self._known, self._coming, self.version = False, None, Version()
                if isinstance(error, InvalidArgument):
                    raise
                raise Unavailable(f"the service proxy's tables can't be changed: {error}") from error

    async def mend(self) -> bool:
        """Compare the tables with what was put there, and mend them. Returns whether that was needed.

        :raise InfranetesError: they can't be read or mended; the next update tries again.
        """
        return await shielded(self._mended())

    async def _mended(self) -> bool:
        async with self._lock:
            if not self._known:
                return False  # the next update reads the tables first
            wanted, ranges = dict(self._placed), dict(self._ranges)
            self._known = False
            with self.watch.ours():
                await self._learn()
                if self._placed == wanted and self._ranges == ranges:
                    return False
                _log.warn("the service proxy's tables were changed by somebody else, and are restored")
                await self._place({**dict.fromkeys(self._placed), **wanted})
                await self._drop(ranges)
            return True

    async def report(self, key: Key | None) -> Report:
        """Report the state in force. :param key: also report the outcome of connections to this.

        :raise InfranetesError: another program has changed the tables, and they can't be mended.
        """
        placed = None if key is None else self._placed.get(key)
        if key is not None and await self._kernel.chain(key) != (placed.chain if placed else None):
            await self.mend()
        counters = Counter[str]()
        for version in self._kernel.tables.versions:
            counters.update(await self._kernel.counters(version))
        flows, max_flows = await self._kernel.flows()
        verdict = None
        if key is not None:
            verdict = judge(key, self._placed, self._cluster_ips, self._ranges.get(key.version, ()))
        return Report(self.version, len(self._placed), counters, flows, max_flows, verdict)

    # With the lock held

    async def _learn(self) -> None:
        """Read the kernel's tables, and make those that are missing or broken."""
        self._placed, self._chains = {}, set()
        self._ranges = dict.fromkeys(self._kernel.tables.versions, ())
        for version in self._kernel.tables.versions:
            found = await self._kernel.read(version)
            if found is None or not found.chains >= script.CHAINS:
                await self._kernel.change(self._kernel.tables.table(version))
                continue
            self._placed |= found.placements
            self._ranges[version] = found.ranges
            self._chains |= {(version, name) for name in found.chains}
            used = {key.address for key, its in found.placements.items() if its.cluster_ip}
            if unused := found.cluster_ips - used:
                await self._kernel.change(self._kernel.tables.changes(version, {}, old_addresses=unused))
        self._cluster_ips = Counter(_addresses(self._placed.items()))
        self._known = True

    async def _change(self, update: Update) -> None:
        if not update.all or self._coming is None or self._coming[0] != update.version:
            self._coming = (update.version, set())
        coming = self._coming[1]
        coming.update(update.changed)
        if len(self._placed.keys() | update.changed.keys()) > MAX_KEYS:
            raise InvalidArgument(f"a VM takes at most {MAX_KEYS} rules of Services")
        ranged = any(rule.source_ranges for rule in update.changed.values())
        own = await self._kernel.addresses() if ranged else []
        wanted: dict[Key, Placement | None] = dict.fromkeys(update.removed)
        for key, rule in update.changed.items():
            wanted[key] = place(rule, own, self._placed.get(key))
        if update.all and not update.more:
            wanted |= dict.fromkeys(self._placed.keys() - coming)
        await self._place(wanted)
        if not update.more:
            if update.all or update.ranges is not None:
                await self._drop(by_version(update.ranges or ()))
            self.version, self._coming = update.version, None

    async def _place(self, wanted: Mapping[Key, Placement | None]) -> None:
        """Change the tables, some keys at a time."""
        for version in self._kernel.tables.versions:
            changed = (
                (key, (self._placed.get(key), its))
                for key, its in wanted.items()
                if key.version == version and self._placed.get(key) != its
            )
            while batch := dict(islice(changed, BATCH)):
                await self._change_batch(version, batch)
        if len(self._chains) > 2 * self._used_chains + SPARE_CHAINS:
            await self._remove_unused_chains()

    async def _remove_unused_chains(self) -> None:
        """Remove the chains that no rule uses: Services may ask for others and others."""
        used = {(key.version, its.chain) for key, its in self._placed.items()}
        unused = [each for each in self._chains - used if script.CHAIN.fullmatch(each[1])]
        for version in self._kernel.tables.versions:
            names = (name for its, name in unused if its == version)
            while batch := list(islice(names, BATCH)):
                await self._kernel.change(self._kernel.tables.without_chains(version, batch))
        self._chains.difference_update(unused)
        self._used_chains = len(self._chains)

    async def _drop(self, wanted: Mapping[int, tuple[str, ...]]) -> None:
        """Drop packets to these address ranges that go to no Service. :param wanted: by IP version."""
        for version, networks in wanted.items():
            if networks != self._ranges.get(version, networks):
                await self._kernel.change(self._kernel.tables.ranges(version, networks))
                self._ranges[version] = networks

    async def _change_batch(self, version: int, batch: Mapping[Key, script.Change]) -> None:
        chains = {its.chain for _, its in batch.values() if its is not None and its.slots}
        chains -= {name for _version, name in self._chains if _version == version}
        new = Counter(_addresses((key, its) for key, (_, its) in batch.items()))
        old = Counter(_addresses((key, its) for key, (its, _) in batch.items()))
        counts = Counter({each: self._cluster_ips[each] + new[each] - old[each] for each in new | old})
        await self._kernel.change(
            self._kernel.tables.chains(version, sorted(chains))
            + self._kernel.tables.changes(
                version,
                batch,
                new_addresses=[each[1] for each in counts if counts[each] and not self._cluster_ips[each]],
                old_addresses=[each[1] for each in counts if not counts[each] and self._cluster_ips[each]],
            )
        )
        self._chains |= {(version, name) for name in chains}
        self._cluster_ips.update(new)
        self._cluster_ips.subtract(old)
        for key, (_, its) in batch.items():
            if its is None:
                self._placed.pop(key, None)
            else:
                self._placed[key] = its
        await self._kernel.forget_flows(
            {key: its.numbered.values() if its else () for key, (_, its) in batch.items()}
        )


def by_version(ranges: Iterable[str]) -> dict[int, tuple[str, ...]]:
    """Return the ranges of each family, none within another."""
    networks = [ip_network(each) for each in ranges]
    return {
        4: tuple(
            map(_written, collapse_addresses(each for each in networks if isinstance(each, IPv4Network)))
        ),
        6: tuple(
            map(_written, collapse_addresses(each for each in networks if isinstance(each, IPv6Network)))
        ),
    }


def _written(network: Network) -> str:
    """Return a network as nft lists it."""
    family = AF_INET if network.version == 4 else AF_INET6
    return f"{inet_ntop(family, network.network_address.packed)}/{network.prefixlen}"


def _addresses(placed: Iterable[tuple[Key, Placement | None]]) -> Iterator[tuple[int, str]]:
    """Yield the address of each key whose other ports are refused."""
    return ((key.version, key.address) for key, its in placed if its is not None and its.cluster_ip)
