# SPDX-License-Identifier: Apache-2.0
"""The pods that some peer of a policy means, kept as pods come, change and go."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from itertools import chain, count
from typing import TypeVar

from infranetes.kubernetes.fields import Name
from infranetes.policies.addresses import between
from infranetes.policies.objects import Block, Pod, PodPeer, PortName

T = TypeVar("T")
Steps = Generator[None, None, T]
Wanted = PodPeer | PortName
Named = Mapping[int, Sequence[int]]  # sorted addresses, by the number of a port

STEP = 200  # pods that are looked at at a time


class Selection:
    """The pods that are meant by a peer, or that have a port of some name.

    :ivar users: the ids of the local pods whose firewalls it is in.
    :ivar namespaces: those whose pods it may mean; None: every one.
    :ivar version: another one after each change, and never one that any selection has had.
    """

    _versions = count()

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.users: set[str] = set()
        self.namespaces: set[str] | None = None
        if isinstance(wanted, PodPeer):
            self.namespaces = {wanted.namespace} if wanted.namespaces is None else set()
        self._members: dict[Name, Pod] = {}
        self._named: dict[tuple[PortName, Block | None], Named] = {}
        self._addresses: frozenset[int] | None = None
        self.version = next(self._versions)

    def take_namespace(self, name: str, labels: Mapping[str, str] | None) -> bool:
        """Note a namespace's labels; None: it is gone. Returns whether other pods are meant now."""
        if isinstance(self.wanted, PortName) or self.wanted.namespaces is None:
            return False
        assert self.namespaces is not None
        there = labels is not None and self.wanted.namespaces.matches(labels)
        if there == (name in self.namespaces):
            return False
        if there:
            self.namespaces.add(name)
        else:
            self.namespaces.discard(name)
        return True

    def take(self, name: Name, pod: Pod | None) -> bool:
        """Note a pod; None: it is gone. Returns whether that makes a difference."""
        before = self._members.get(name)
        if pod is not None and self._means(pod):
            self._members[name] = pod
            changed = before is None or (before.addresses, before.ports) != (pod.addresses, pod.ports)
        else:
            changed = self._members.pop(name, None) is not None
        if changed:
            self._addresses = None
            self._named.clear()
            self.version = next(self._versions)
        return changed

    def _means(self, pod: Pod) -> bool:
        if isinstance(self.wanted, PortName):
            return any(self.wanted.is_of(each) for each in pod.ports)
        assert self.namespaces is not None
        return pod.name.namespace in self.namespaces and self.wanted.pods.matches(pod.labels)

    def addresses(self) -> Collection[int]:
        """The pods' addresses."""
        if self._addresses is None:
            its = (pod.addresses for pod in self._members.values())
            self._addresses = frozenset(chain.from_iterable(its))
        return self._addresses

    def named(self, port: PortName, within: Block | None = None) -> Steps[Named]:
        """Return the addresses of pods that have a port of this name, by its number, in small steps.

        :param within: only addresses in it count."""
        found = self._named.get((port, within))
        if found is None:
            found = yield from (self._all_named(port) if within is None else self._within(port, within))
            self._named[port, within] = found
        return found

    def _all_named(self, port: PortName) -> Steps[Named]:
        by_number: dict[int, set[int]] = {}
        for number, pod in enumerate(self._members.values(), 1):
            for each in pod.ports:
                if port.is_of(each):
                    by_number.setdefault(each.number, set()).update(pod.addresses)
            if number % STEP == 0:
                yield
        return {number: sorted(its) for number, its in by_number.items()}

    def _within(self, port: PortName, block: Block) -> Steps[Named]:
        found = {}
        for number, addresses in (yield from self.named(port)).items():
            its = chain.from_iterable(between(addresses, first, last) for first, last in block.ranges)
            found[number] = list(its)
            yield
        return found


class Selections:
    """All selections that are in use, by what is wanted."""

    def __init__(self) -> None:
        self._all: dict[Wanted, Selection] = {}
        self._within: dict[str, dict[Wanted, Selection]] = {}  # those of one namespace's pods
        self._wide: dict[Wanted, Selection] = {}

    def __len__(self) -> int:
        return len(self._all)

    def get(self, wanted: Wanted) -> Selection | None:
        """The selection, if it is in use."""
        return self._all.get(wanted)

    def add(self, selection: Selection) -> None:
        """Keep one up to date from now on."""
        wanted = selection.wanted
        self._all[wanted] = self._group(wanted)[wanted] = selection

    def release(self, wanted: Iterable[Wanted], user: str) -> None:
        """Note that a local pod uses these no more."""
        for each in wanted:
            selection = self._all.get(each)
            if selection is not None:
                selection.users.discard(user)
                if not selection.users:
                    del self._all[each], self._group(each)[each]
                    self._forget_empty(each)

    def of_namespace(self, namespace: str) -> list[Selection]:
        """Those that may mean pods of a namespace."""
        return [*self._within.get(namespace, {}).values(), *self._wide.values()]

    def wide(self) -> list[Selection]:
        """Those that may mean pods of several namespaces."""
        return list(self._wide.values())

    def _group(self, wanted: Wanted) -> dict[Wanted, Selection]:
        if isinstance(wanted, PodPeer) and wanted.namespaces is None:
            return self._within.setdefault(wanted.namespace, {})
        return self._wide

    def _forget_empty(self, wanted: Wanted) -> None:
        if isinstance(wanted, PodPeer) and not self._within.get(wanted.namespace, True):
            del self._within[wanted.namespace]
