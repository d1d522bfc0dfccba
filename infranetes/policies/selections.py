# SPDX-License-Identifier: Apache-2.0
"""The pods that a policy's peer selects, kept up to date as pods come, change and go."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from infranetes.policies.objects import Block, Pod, PodPeer, PortName, Steps
from infranetes.policies.slots import Mask, Slots

Criterion = PodPeer | PortName
Named = Mapping[int, Mask]  # addresses by port number


class Selection:
    """The pods that a peer selects, or that have a port of some name.

    :ivar users: the ids of the local pods whose firewalls use the selection.
    :ivar namespaces: the namespaces whose pods it may select; None: all.
    :ivar mask: the slots of the selected pods' addresses.
    """

    def __init__(self, criterion: Criterion, slots: Slots) -> None:
        self.criterion = criterion
        self.users: set[str] = set()
        self.namespaces: set[str] | None = None
        if isinstance(criterion, PodPeer):
            self.namespaces = {criterion.namespace} if criterion.namespaces is None else set()
        self.mask: Mask = 0
        self._slots = slots
        self._named: dict[tuple[PortName, Block | None], Named] = {}

    def take_namespace(self, name: str, labels: Mapping[str, str] | None) -> bool:
        """Handle a namespace's labels; None: it was deleted.

        Return whether its pods may be selected differently."""
        if isinstance(self.criterion, PortName) or self.criterion.namespaces is None:
            return False
        assert self.namespaces is not None
        there = labels is not None and self.criterion.namespaces.matches(labels)
        if there == (name in self.namespaces):
            return False
        if there:
            self.namespaces.add(name)
        else:
            self.namespaces.discard(name)
        return True

    def take(self, before: Mask, pod: Pod | None, now: Mask) -> bool:
        """Handle a pod; None: it was deleted. Return whether the selection has changed.

        :param before: the slots that the pod had. :param now: the slots that it has."""
        return self.have(
            (self.mask ^ (self.mask & before)) | (now if pod is not None and self.means(pod) else 0)
        )

    def have(self, mask: Mask) -> bool:
        """Set the selected addresses. Return whether the selection has changed."""
        if mask == self.mask:
            return False
        self.mask = mask
        self._named.clear()
        return True

    def means(self, pod: Pod) -> bool:
        """Return whether a pod is selected."""
        if isinstance(self.criterion, PortName):
            return any(self.criterion.is_of(each) for each in pod.ports)
        assert self.namespaces is not None
        return pod.name.namespace in self.namespaces and self.criterion.pods.matches(pod.labels)

    def named(self, port: PortName, within: Block | None = None) -> Steps[Named]:
        """Return the slots of selected pods with a port of this name, by its number, in small steps.

        :param within: include only addresses in this block; None: all."""
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
    """The selections in use, by peer or port name."""

    def __init__(self) -> None:
        self._all: dict[Criterion, Selection] = {}
        # By the only namespace; None: several.
        self._within: dict[str | None, dict[Criterion, Selection]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def get(self, criterion: Criterion) -> Selection | None:
        """Return the selection, or None if it is not in use."""
        return self._all.get(criterion)

    def add(self, selection: Selection) -> None:
        """Add a selection, to be kept up to date from now on."""
        criterion = selection.criterion
        self._all[criterion] = selection
        self._within.setdefault(_only_namespace(criterion), {})[criterion] = selection

    def release(self, criteria: Iterable[Criterion], user: str) -> None:
        """Record that a local pod no longer uses these. Drop those without another user. Idempotent."""
        for each in criteria:
            selection = self._all.get(each)
            if selection is None:  # the pod was removed while its firewall was being computed
                continue
            selection.users.discard(user)
            if not selection.users:
                namespace = _only_namespace(each)
                del self._all[each], self._within[namespace][each]
                if not self._within[namespace]:
                    del self._within[namespace]

    def of_namespace(self, namespace: str) -> list[Selection]:
        """Return the selections that may select pods of a namespace."""
        return [*self._within.get(namespace, {}).values(), *self.wide()]

    def wide(self) -> list[Selection]:
        """Return the selections that may select pods of several namespaces."""
        return list(self._within.get(None, {}).values())


def _only_namespace(criterion: Criterion) -> str | None:
    """Return the namespace whose pods are selected; None: there may be several."""
    if isinstance(criterion, PodPeer) and criterion.namespaces is None:
        return criterion.namespace
    return None
