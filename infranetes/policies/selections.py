# SPDX-License-Identifier: Apache-2.0
"""The pods that some peer of a policy means, kept as pods come, change and go."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from infranetes.policies.objects import Block, Pod, PodPeer, PortName, Steps
from infranetes.policies.slots import Mask, Slots

Wanted = PodPeer | PortName
Named = Mapping[int, Mask]  # by the number of a port


class Selection:
    """The pods that are meant by a peer, or that have a port of some name.

    :ivar users: the ids of the local pods whose firewalls it is in.
    :ivar namespaces: those whose pods it may mean; None: every one.
    :ivar mask: their addresses.
    """

    def __init__(self, wanted: Wanted, slots: Slots) -> None:
        self.wanted = wanted
        self.users: set[str] = set()
        self.namespaces: set[str] | None = None
        if isinstance(wanted, PodPeer):
            self.namespaces = {wanted.namespace} if wanted.namespaces is None else set()
        self.mask: Mask = 0
        self._slots = slots
        self._named: dict[tuple[PortName, Block | None], Named] = {}

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

    def take(self, before: Mask, pod: Pod | None, now: Mask) -> bool:
        """Note a pod; None: it is gone. Returns whether that makes a difference.

        :param before: the slots that it had. :param now: those that it has."""
        return self.have(
            (self.mask ^ (self.mask & before)) | (now if pod is not None and self.means(pod) else 0)
        )

    def have(self, mask: Mask) -> bool:
        """Mean these addresses. Returns whether that makes a difference."""
        if mask == self.mask:
            return False
        self.mask = mask
        self._named.clear()
        return True

    def means(self, pod: Pod) -> bool:
        """Whether a pod is meant."""
        if isinstance(self.wanted, PortName):
            return any(self.wanted.is_of(each) for each in pod.ports)
        assert self.namespaces is not None
        return pod.name.namespace in self.namespaces and self.wanted.pods.matches(pod.labels)

    def named(self, port: PortName, within: Block | None = None) -> Steps[Named]:
        """Return the addresses of pods that have a port of this name, by its number, in small steps.

        :param within: only addresses in it count."""
        found = self._named.get((port, within))
        if found is None:
            if within is None:
                found = yield from self._slots.having(self.mask, port.is_of)
            else:
                found = yield from self._within(port, within)
            self._named[port, within] = found
        return found

    def _within(self, port: PortName, block: Block) -> Steps[Named]:
        starts = [first for first, _ in block.ranges]

        def holds(address: int) -> bool:
            place = bisect_right(starts, address) - 1
            return place >= 0 and address <= block.ranges[place][1]

        found = {}
        for number, mask in (yield from self.named(port)).items():
            if its := (yield from self._slots.within(mask, holds)):
                found[number] = its
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
