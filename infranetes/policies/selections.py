# SPDX-License-Identifier: Apache-2.0
"""The pods that some peer of a policy means, kept as pods come, change and go."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping

from infranetes.kubernetes.fields import Name
from infranetes.policies.addresses import networks
from infranetes.policies.objects import Pod, PodPeer, PortName
from infranetes_common.pod_firewall import Network

Wanted = PodPeer | PortName


class Selection:
    """The pods that are meant by a peer, or that have a port of some name.

    :ivar users: the ids of the local pods whose firewalls it is in.
    :ivar namespaces: those whose pods it may mean; None: every one.
    :ivar members: by name; all have a network of their own.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.users: set[str] = set()
        self.members: dict[Name, Pod] = {}
        self.namespaces: set[str] | None = None
        if isinstance(wanted, PodPeer):
            self.namespaces = {wanted.namespace} if wanted.namespaces is None else set()
        self._networks: tuple[Network, ...] | None = None

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
        before = self.members.get(name)
        if pod is not None and self._means(pod):
            self.members[name] = pod
            changed = before is None or before.addresses != pod.addresses or self._other_ports(before, pod)
        else:
            changed = self.members.pop(name, None) is not None
        if changed:
            self._networks = None
        return changed

    def _means(self, pod: Pod) -> bool:
        if isinstance(self.wanted, PortName):
            return any(
                (each.name, each.protocol) == (self.wanted.name, self.wanted.protocol) for each in pod.ports
            )
        assert self.namespaces is not None
        return pod.name.namespace in self.namespaces and self.wanted.pods.matches(pod.labels)

    def _other_ports(self, before: Pod, pod: Pod) -> bool:
        return isinstance(self.wanted, PortName) and before.ports != pod.ports

    def networks(self) -> Generator[None, None, tuple[Network, ...]]:
        """Return the pods' addresses as networks, in small steps."""
        if self._networks is None:
            found = yield from networks(each for pod in self.members.values() for each in pod.addresses)
            self._networks = found
        return self._networks


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
