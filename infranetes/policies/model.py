# SPDX-License-Identifier: Apache-2.0
"""The model of NetworkPolicies, namespaces and pods, and the resulting firewalls of the local pods.

Only the selections that local pods need are kept up to date: those of the peers of policies that select a
local pod. A change marks the local pods that it affects; `settle` computes their firewalls again. All long
operations are generators, so that the caller can pause at each step; one must end before the next begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import chain

import attrs

from infranetes.kubernetes.fields import Name
from infranetes.policies.firewall import FirewallMaker, Parts
from infranetes.policies.interface import LocalPod
from infranetes.policies.objects import NamedPort, Pod, Policy, Steps
from infranetes.policies.selections import Criterion, Selection, Selections
from infranetes.policies.slots import Mask, Slots, mask
from infranetes_common.addresses import Network
from infranetes_common.pod_firewall import PodFirewall

STEP = 100  # pods or selections handled at a time
KUBELETS = "io.kubernetes."  # prefix of labels that kubelet adds for runtimes: the pod itself has none


@attrs.define
class _Local:
    """A pod of this node, with the labels and ports that the API server showed last."""

    pod: LocalPod
    labels: Mapping[str, str]
    ports: tuple[NamedPort, ...] = ()
    uses: frozenset[Criterion] = frozenset()
    unions: AbstractSet[Parts] = frozenset()
    firewall: PodFirewall | None = None

    def is_shown_as(self, pod: Pod) -> bool:
        """Return whether the API server's pod is this one, and not another one of the same name."""
        return pod.name == Name(self.pod.namespace, self.pod.name) and pod.uid == self.pod.uid


class Model:
    """The part of the cluster's state that matters to NetworkPolicies."""

    def __init__(self) -> None:
        self._namespaces: dict[str, Mapping[str, str]] = {}
        self._pods: dict[str, dict[Name, Pod]] = {}  # by namespace
        self._policies: dict[str, dict[Name, Policy]] = {}  # by namespace
        self._local: dict[str, _Local] = {}
        self._local_ids: dict[Name, set[str]] = {}
        self._slots = Slots()
        self._selections = Selections()
        self._unions: dict[Parts, tuple[Network, ...]] = {}
        self._marked: dict[str, None] = {}  # ids of local pods whose firewalls may have changed, oldest first

    @property
    def unsettled(self) -> bool:
        """Whether there are firewalls to settle."""
        return bool(self._marked)

    # Objects from the API server

    def put_policy(self, policy: Policy) -> None:
        """Add or change a policy."""
        before = self._policies.setdefault(policy.name.namespace, {}).get(policy.name)
        if policy != before:
            self._policies[policy.name.namespace][policy.name] = policy
            self._mark_selected(before)
            self._mark_selected(policy)

    def remove_policy(self, name: Name) -> None:
        """Remove a policy. Idempotent."""
        its = self._policies.get(name.namespace, {})
        before = its.pop(name, None)
        self._mark_selected(before)
        if not its:
            self._policies.pop(name.namespace, None)

    def _mark_selected(self, policy: Policy | None) -> None:
        if policy is not None:
            for id, local in self._local.items():
                if local.pod.namespace == policy.name.namespace and policy.pods.matches(local.labels):
                    self._marked[id] = None

    def put_namespace(self, name: str, labels: Mapping[str, str]) -> Iterator[None]:
        """Add a namespace or change its labels, in small steps."""
        if self._namespaces.get(name) != labels:
            self._namespaces[name] = labels
            yield from self._namespace_changed(name, labels)

    def remove_namespace(self, name: str) -> Iterator[None]:
        """Remove a namespace, in small steps. Idempotent."""
        if self._namespaces.pop(name, None) is not None:
            yield from self._namespace_changed(name, None)

    def _namespace_changed(self, name: str, labels: Mapping[str, str] | None) -> Iterator[None]:
        for selection in self._selections.wide():
            if selection.take_namespace(name, labels):
                for number, pod in enumerate(self._pods.get(name, {}).values()):
                    its = self._slots.mask(pod.name)
                    self._tell(selection, its, pod, its)
                    if number % STEP == STEP - 1:
                        yield
            yield

    def put_pod(self, pod: Pod) -> Iterator[None]:
        """Add or change a pod that has its own network, in small steps."""
        its = self._pods.setdefault(pod.name.namespace, {})
        if its.get(pod.name) == pod:
            return
        its[pod.name] = pod
        for id in sorted(self._local_ids.get(pod.name, ())):
            if self._local[id].is_shown_as(pod):
                self._show(id, self._local[id], pod)
        before = self._slots.mask(pod.name)
        self._slots.put(pod)
        yield from self._pod_changed(pod.name, before, pod)

    def remove_pod(self, name: Name) -> Iterator[None]:
        """Remove a pod, in small steps. A local pod keeps its last labels and ports. Idempotent."""
        its = self._pods.get(name.namespace, {})
        if its.pop(name, None) is not None:
            if not its:
                del self._pods[name.namespace]
            before = self._slots.mask(name)
            self._slots.remove(name)
            yield from self._pod_changed(name, before, None)

    def _pod_changed(self, name: Name, before: Mask, pod: Pod | None) -> Iterator[None]:
        now = self._slots.mask(name)
        for number, selection in enumerate(self._selections.of_namespace(name.namespace)):
            self._tell(selection, before, pod, now)
            if number % STEP == STEP - 1:
                yield

    def _tell(self, selection: Selection, before: Mask, pod: Pod | None, now: Mask) -> None:
        if selection.take(before, pod, now):
            self._marked.update(dict.fromkeys(sorted(selection.users)))

    # The pods of this node

    def add(self, pod: LocalPod) -> None:
        """Compute a firewall for a local pod, from the next `settle` on."""
        labels = {key: value for key, value in pod.labels.items() if not key.startswith(KUBELETS)}
        self.remove(pod.id)
        local = self._local[pod.id] = _Local(pod, labels)
        name = Name(pod.namespace, pod.name)
        self._local_ids.setdefault(name, set()).add(pod.id)
        shown = self._pods.get(pod.namespace, {}).get(name)
        if shown is not None and local.is_shown_as(shown):
            self._show(pod.id, local, shown)
        self._marked[pod.id] = None

    def remove(self, id: str) -> None:
        """Stop computing the local pod's firewall. Idempotent."""
        local = self._local.pop(id, None)
        if local is not None:
            self._selections.release(local.uses, id)
            name = Name(local.pod.namespace, local.pod.name)
            self._local_ids[name].discard(id)
            if not self._local_ids[name]:
                del self._local_ids[name]

    def firewall(self, id: str) -> PodFirewall | None:
        """Return a local pod's firewall as last settled, or None if it was not."""
        local = self._local.get(id)
        return local.firewall if local is not None else None

    def policies(self, id: str) -> list[Policy]:
        """Return the policies that select a local pod, sorted by name."""
        local = self._local.get(id)
        if local is None:
            return []
        its = self._policies.get(local.pod.namespace, {})
        return [its[name] for name in sorted(its, key=str) if its[name].pods.matches(local.labels)]

    def _show(self, id: str, local: _Local, pod: Pod) -> None:
        if (local.labels, local.ports) != (pod.labels, pod.ports):
            local.labels, local.ports = pod.labels, pod.ports
            self._marked[id] = None

    # Firewalls

    def settle(self, changed: set[str]) -> Iterator[None]:
        """Compute the firewalls that may have changed, in small steps.

        :param changed: the ids of the pods whose firewalls have changed are added to it."""
        while self._marked:
            id = next(iter(self._marked))
            del self._marked[id]
            local = self._local.get(id)
            if local is not None:
                firewall = yield from self._computed(id, local)
                if firewall != local.firewall:
                    local.firewall = firewall
                    changed.add(id)
            yield
        self._forget_unions()

    def _computed(self, id: str, local: _Local) -> Steps[PodFirewall]:
        policies = []
        for number, policy in enumerate(self._policies.get(local.pod.namespace, {}).values()):
            if policy.pods.matches(local.labels):
                policies.append(policy)
            if number % STEP == STEP - 1:
                yield
        uses: set[Criterion] = set()

        def select(criterion: Criterion) -> Steps[Selection]:
            uses.add(criterion)
            return self._select(criterion, id)

        made = FirewallMaker(select, self._slots, self._unions)
        ingress = [policy.ingress for policy in policies if policy.ingress is not None]
        egress = [policy.egress for policy in policies if policy.egress is not None]
        firewall = PodFirewall(
            (yield from made.ingress(chain.from_iterable(ingress), local.ports)) if ingress else None,
            (yield from made.egress(chain.from_iterable(egress))) if egress else None,
        )
        self._selections.release(local.uses - uses, id)
        local.uses, local.unions = frozenset(uses), made.used
        return firewall

    def _forget_unions(self) -> None:
        """Drop the unions that no firewall uses or that have a freed slot, and let freed slots be reused."""
        used = set().union(*(local.unions for local in self._local.values()))
        left = self._slots.reuse()
        for parts in [each for each in self._unions if each not in used or each[0] & left]:
            del self._unions[parts]

    def _select(self, criterion: Criterion, user: str) -> Steps[Selection]:
        """Return the selection of a peer or port name, making it in small steps if it is new."""
        selection = self._selections.get(criterion)
        if selection is None:
            selection = Selection(criterion, self._slots)
            for name, labels in self._namespaces.items():
                selection.take_namespace(name, labels)
            meant: list[int] = []
            for number, pod in enumerate(self._pods_in(selection.namespaces)):
                if selection.means(pod):
                    meant += self._slots.of(pod.name)
                if number % STEP == STEP - 1:
                    yield
            selection.have(mask(meant))
            yield
            self._selections.add(selection)
        selection.users.add(user)
        return selection

    def _pods_in(self, namespaces: Iterable[str] | None) -> Iterable[Pod]:
        names = self._pods if namespaces is None else namespaces
        return chain.from_iterable(self._pods[name].values() for name in names if name in self._pods)
