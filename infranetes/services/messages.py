# SPDX-License-Identifier: Apache-2.0
"""The messages that bring VMs up to date with a table, made once for all VMs that lack the same changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from infranetes.services.rules import Key, Rule, Without
from infranetes.services.table import Change, RuleTable
from infranetes_common.wire import vmserver

PART = 500  # rules in one message
ADDRESSES_IN_PART = 5000  # endpoints and source ranges

_PROTOCOLS = {"TCP": 6, "UDP": 17, "SCTP": 132}


def updates(table: RuleTable, since: int | None) -> Iterator[vmserver.ServiceRulesUpdate]:
    """Yield the messages that bring a VM up to date.

    :param since: the number up to which the VM has the changes; None: not known."""
    return iter(Batch(table, since))


class Batch:
    """The messages that bring VMs up to date.

    Each is made when first asked for, from the table as it was when the batch was made.

    :param since: the number up to which the VMs have the changes; None: not known.
    :ivar number: the number up to which the VMs have the changes afterwards.
    """

    def __init__(self, table: RuleTable, since: int | None) -> None:
        changes = None if since is None else table.since(since)
        self.number = table.number
        self._table = table.id
        self._all = changes is None
        self._ranges: vmserver.ServiceRanges | None = None
        if since is None or changes is None or table.ranges_number > since:
            self._ranges = vmserver.ServiceRanges(ranges=map(str, table.ranges))
        self._parts = list(_parts(table.everything() if changes is None else changes)) or [[]]
        self._made: dict[int, vmserver.ServiceRulesUpdate] | None = {}

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[vmserver.ServiceRulesUpdate]:
        return map(self.message, range(len(self)))

    def message(self, place: int) -> vmserver.ServiceRulesUpdate:
        """Return the message at this place."""
        made = {} if self._made is None else self._made
        if place not in made:
            made[place] = self._make(place)
        return made[place]

    def forget(self) -> None:
        """Stop caching messages: there are newer ones, and few VMs may still need these."""
        self._made = None

    def _make(self, place: int) -> vmserver.ServiceRulesUpdate:
        part, last = self._parts[place], place == len(self) - 1
        return vmserver.ServiceRulesUpdate(
            table=self._table,
            number=self.number,
            all=self._all,
            more=not last,
            changed=[_rule(each.key, each.rule) for each in part if each.rule is not None],
            removed=[message_key(each.key) for each in part if each.rule is None],
            ranges=self._ranges if last else None,
        )


class Batches:
    """The batches for the table's present state. VMs that lack the same changes share a batch."""

    def __init__(self, table: RuleTable) -> None:
        self._table = table
        self._batches: dict[int | None, Batch] = {}
        self._number = -1

    def since(self, number: int | None) -> Batch:
        """Return the messages that a VM lacks.

        :param number: the number up to which it has the changes; None: not known."""
        if self._number != self._table.number:
            for batch in self._batches.values():
                batch.forget()
            self._batches.clear()
            self._number = self._table.number
        if number not in self._batches:
            self._batches[number] = Batch(self._table, number)
        return self._batches[number]


def _parts(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """Yield the changes in groups, so that no message is too large."""
    part: list[Change] = []
    addresses = 0
    for change in changes:
        rule = change.rule
        size = len(rule.endpoints) + len(rule.source_ranges) if rule is not None else 0
        if part and (len(part) >= PART or addresses + size > ADDRESSES_IN_PART):
            yield part
            part, addresses = [], 0
        part.append(change)
        addresses += size
    if part:
        yield part


def message_key(key: Key) -> vmserver.ServiceKey:
    """Return the agent's message of a key."""
    return vmserver.ServiceKey(address=key.address.packed, protocol=_PROTOCOLS[key.protocol], port=key.port)


def _rule(key: Key, rule: Rule) -> vmserver.ServiceRule:
    return vmserver.ServiceRule(
        key=message_key(key),
        endpoints=[
            vmserver.ServiceEndpoint(address=address.packed, port=port) for address, port in rule.endpoints
        ],
        dropped=rule.without is Without.DROPPED,
        cluster_ip=rule.cluster_ip,
        affinity_seconds=rule.affinity_seconds,
        source_ranges=map(str, rule.source_ranges),
    )
