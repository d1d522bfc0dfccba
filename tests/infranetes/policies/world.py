# SPDX-License-Identifier: Apache-2.0
"""A cluster's objects, put into a model, and questions about the result."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, TypeVar

from infranetes.kubernetes.kinds import Kind
from infranetes.kubernetes.watch import Put, Removed, Replaced
from infranetes.policies.interface import LocalPod
from infranetes.policies.kinds import Namespaces, Pods, Policies
from infranetes.policies.model import Model
from infranetes.policies.objects import Steps
from infranetes_common.pod_firewall import Allowed, PodFirewall
from tests.infranetes.policies.naive import Packet, passes

Json = dict[str, Any]  # Any: JSON
T = TypeVar("T")


def finish(steps: Iterable[None]) -> int:
    """Take all steps at once. Return how many there were."""
    counted = deque(enumerate(steps, 1), maxlen=1)
    return counted[0][0] if counted else 0


def result(steps: Steps[T]) -> T:
    """Take all steps at once. Return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            found: T = done.value
            return found


class World:
    """:ivar changed: the ids of pods whose firewalls the last `settle` changed."""

    def __init__(self) -> None:
        self.model = Model()
        self.pods, self.namespaces = Pods(self.model), Namespaces(self.model)
        self.policies = Policies(self.model)
        self.changed: set[str] = set()

    def put(self, kind: Kind, *items: Json) -> None:
        """Add or change objects."""
        for item in items:
            finish(kind.take(Put(kind.trimmed(item))))

    def remove(self, kind: Kind, *items: Json) -> None:
        """Remove objects."""
        for item in items:
            finish(kind.take(Removed(kind.trimmed(item))))

    def replace(self, kind: Kind, *items: Json) -> None:
        """Replace all objects of a kind, as after a list."""
        finish(kind.take(Replaced([kind.trimmed(item) for item in items])))

    def add_local(self, pod: Json) -> None:
        """Add a pod of this node, as kubelet describes it. Its id is its name; its namespace is `ns`."""
        about = pod["metadata"]
        namespace, name = about["namespace"], about["name"]
        labels = {**about["labels"], "io.kubernetes.pod.name": name}
        id = name if namespace == "ns" else f"{namespace}/{name}"
        self.model.add(LocalPod(id, namespace, name, about["uid"], labels))

    def settle(self) -> set[str]:
        """Compute all pending changes. Return the ids of the pods whose firewalls changed."""
        self.changed = set()
        finish(self.model.settle(self.changed))
        return self.changed

    def firewall(self, id: str) -> PodFirewall:
        """Return a local pod's current firewall."""
        self.settle()
        found = self.model.firewall(id)
        assert found is not None
        return found

    def receives(self, id: str, other: str, port: int | None = 80, protocol: str = "TCP") -> bool:
        """Return whether a pod of this node accepts connections from `other`."""
        return passes(self.firewall(id).ingress, Packet(other, protocol, port))

    def sends(self, id: str, other: str, port: int | None = 80, protocol: str = "TCP") -> bool:
        """Return whether a pod of this node may connect to `other`."""
        return passes(self.firewall(id).egress, Packet(other, protocol, port))


def addresses(allowed: Iterable[Allowed] | None) -> list[list[str]]:
    """Return the networks of each, as text."""
    assert allowed is not None
    return [[str(each) for each in one.networks] for one in allowed]
