# SPDX-License-Identifier: Apache-2.0
"""The table of all rules of the cluster's Services, and the changes that a VM lacks.

Changes of rules are numbered. A VM reports the number up to which it has them, and is sent the rules that
changed since, in their present state: two changes of one rule are sent once, and no log of changes is kept
for VMs that are away. The table remembers the last `REMEMBERED` removals; a VM that may have missed an
earlier one is sent all rules.
"""

from __future__ import annotations

import itertools
import secrets
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping

import attrs
from twisted.logger import Logger

from infranetes.kubernetes.fields import Name
from infranetes.services.objects import EndpointSlice, OwnNode, Service
from infranetes.services.rules import Key, Rule, rules
from infranetes.services.timing import News
from infranetes_common.addresses import Network

REMEMBERED = 20_000  # the most removed rules that are remembered
STEP = 50  # Services handled in one step
MOST_RULES = 100_000  # a VM takes twice as many, since it may get new ones before others are removed
MOST_RANGES = 1000  # the most of ServiceCIDRs that a VM takes; with more, no connections are dropped

_log = Logger()


@attrs.frozen
class Change:
    """The last change of a rule. :ivar rule: its present state; None: it was removed."""

    number: int
    key: Key
    rule: Rule | None


class RuleTable:
    """The rules of all Services.

    :param node: this daemon's node, which decides which endpoints are local or near.
    :ivar id: identifies this table: numbers of other tables, such as an earlier daemon's, do not apply.
    :ivar number: the number of the last change.
    :ivar news: the times at which changes were received.
    :ivar ranges: the ranges of Services' addresses; connections to an unused address in them are dropped.
    :ivar ranges_number: the number of the change that set `ranges`.
    :ivar complete: whether all Services and endpoints have been received; nothing is sent before.
    """

    def __init__(self, node: OwnNode) -> None:
        self.id = secrets.token_hex(16)
        self._node = node
        self._services: dict[Name, Service] = {}
        self._slices: dict[Name, dict[Name, EndpointSlice]] = {}  # by service, by name
        self._service_of: dict[Name, Name] = {}  # by the slice's name
        self._keys: dict[Name, frozenset[Key]] = {}  # of each service
        self._keys_count = 0  # of all services
        self._left_out: dict[Name, None] = {}  # Services for which there was no room
        self._wanted: dict[Key, dict[Name, Rule]] = {}  # by service; the first one of `_order` has the key
        self._changes: OrderedDict[Key, Change] = OrderedDict()  # the last change of each key, oldest first
        self._removed: OrderedDict[Key, None] = OrderedDict()  # the keys whose last change is a removal
        self._forgotten = 0  # the number of the last change that was forgotten
        self._ranges_of: dict[Name, tuple[Network, ...]] = {}
        self.news = News()
        self.number = 0
        self.ranges: tuple[Network, ...] = ()
        self.ranges_number = 0
        self.complete = False

    @property
    def rules(self) -> Mapping[Key, Rule]:
        """The rules by key."""
        return {change.key: change.rule for change in self._changes.values() if change.rule is not None}

    def everything(self) -> Iterator[Change]:
        """Yield all present rules, as changes."""
        return (change for change in self._changes.values() if change.rule is not None)

    @property
    def count(self) -> int:
        """The number of rules."""
        return len(self._changes) - len(self._removed)

    def rule(self, key: Key) -> Rule | None:
        """Return a key's rule, or None if there is none."""
        change = self._changes.get(key)
        return None if change is None else change.rule

    def services(self, key: Key) -> list[Name]:
        """Return the Services that have this address, protocol and port. The first one is served."""
        its = self._wanted.get(key, {})
        return sorted(its, key=lambda name: _order(its, name))

    def since(self, number: int) -> Iterator[Change] | None:
        """Return the changes after `number`, oldest first, or None if they are not known any more."""
        if number < self._forgotten or number > self.number:
            return None
        late = itertools.takewhile(lambda change: change.number > number, reversed(self._changes.values()))
        return reversed(list(late))

    # Objects from the API server

    def put_service(self, service: Service) -> None:
        """Add or change a Service."""
        self._services[service.name] = service
        self._renew(service.name)

    def remove_service(self, name: Name) -> None:
        """Remove a Service, which may still exist without addresses. Idempotent."""
        self._services.pop(name, None)
        self._renew(name)

    def put_slice(self, endpoint_slice: EndpointSlice) -> None:
        """Add or change an EndpointSlice. Its Service may come later."""
        if self._service_of.get(endpoint_slice.name, endpoint_slice.service) != endpoint_slice.service:
            self.remove_slice(endpoint_slice.name)
        self._keep(endpoint_slice)
        self._renew(endpoint_slice.service)

    def remove_slice(self, name: Name) -> None:
        """Remove an EndpointSlice. Idempotent."""
        service = self._service_of.pop(name, None)
        if service is not None:
            its = self._slices[service]
            del its[name]
            if not its:
                del self._slices[service]
            self._renew(service)

    def replace(self, services: Collection[Service], slices: Collection[EndpointSlice]) -> None:
        """Replace all Services and slices, as after a list. Unchanged rules keep their numbers."""
        before = self._services.keys() | self._slices.keys()
        self._services = {each.name: each for each in services}
        self._slices, self._service_of = {}, {}
        for each in slices:
            self._keep(each)
        for name in sorted(before | self._services.keys() | self._slices.keys(), key=str):
            self._renew(name)

    def put_ranges(self, name: Name, ranges: tuple[Network, ...]) -> None:
        """Record the ranges of a ServiceCIDR; no ranges: it was deleted."""
        self._ranges_of[name] = ranges
        if not ranges:
            del self._ranges_of[name]
        now = tuple(sorted(set(itertools.chain(*self._ranges_of.values())), key=str))
        if len(now) > MOST_RANGES:
            now = ()
        if now != self.ranges:
            self.number += 1
            self.ranges, self.ranges_number = now, self.number

    def move(self, node: OwnNode) -> Iterator[None]:
        """Record this node's name and zone, which may change, in small steps."""
        if node != self._node:
            self._node = node
            for number, name in enumerate(tuple(self._services), 1):
                self._renew(name)
                if number % STEP == 0:
                    yield

    def _keep(self, endpoint_slice: EndpointSlice) -> None:
        self._slices.setdefault(endpoint_slice.service, {})[endpoint_slice.name] = endpoint_slice
        self._service_of[endpoint_slice.name] = endpoint_slice.service

    # Rules

    def _renew(self, name: Name) -> None:
        """Compute a Service's rules anew, and number those that have changed."""
        service = self._services.get(name)
        slices = self._slices.get(name, {}).values()
        wanted = {} if service is None else rules(service, slices, self._node)
        before = self._keys.pop(name, frozenset())
        wanted = self._admitted(name, len(before), wanted)
        for key in before - wanted.keys():
            services = self._wanted[key]
            del services[name]
            self._settle(key, services)
            if not services:
                del self._wanted[key]
        for key, rule in wanted.items():
            services = self._wanted.setdefault(key, {})
            services[name] = rule
            self._settle(key, services)
        if wanted:
            self._keys[name] = frozenset(wanted)
        if len(wanted) < len(before) and self._left_out:
            self._renew(next(iter(self._left_out)))

    def _admitted(self, name: Name, before: int, wanted: dict[Key, Rule]) -> dict[Key, Rule]:
        """Return a Service's rules; none if there is no room for all of them.

        :param before: how many it has had."""
        others = self._keys_count - before
        self._left_out.pop(name, None)
        if wanted and others + len(wanted) > MOST_RULES:
            self._left_out[name] = None
            _log.warn(
                "Service {name} is left out: the Services before it have {others} of at most {most} rules",
                name=str(name),
                others=others,
                most=MOST_RULES,
            )
            wanted = {}
        self._keys_count = others + len(wanted)
        return wanted

    def _settle(self, key: Key, services: Mapping[Name, Rule]) -> None:
        """Number a change, if the key's rule has changed."""
        rule = services[min(services, key=lambda name: _order(services, name))] if services else None
        last = self._changes.get(key)
        if rule == (last.rule if last is not None else None):
            return
        self.number += 1
        self._changes[key] = Change(self.number, key, rule)
        self._changes.move_to_end(key)
        self._removed.pop(key, None)
        if rule is None:
            self._removed[key] = None
            self._forget()

    def _forget(self) -> None:
        while len(self._removed) > REMEMBERED:
            key, _ = self._removed.popitem(last=False)
            self._forgotten = self._changes.pop(key).number


def _order(services: Mapping[Name, Rule], name: Name) -> tuple[bool, str]:
    """Order those that want a key: whose cluster IP it is, whatever others say of external ones; by name."""
    return not services[name].cluster_ip, str(name)
