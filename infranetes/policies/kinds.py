# SPDX-License-Identifier: Apache-2.0
"""The kinds of objects that NetworkPolicies depend on, and how they enter the model."""

from __future__ import annotations

from collections.abc import Iterable

from infranetes.kubernetes.fields import Fields, Name
from infranetes.kubernetes.kinds import Kind
from infranetes.kubernetes.watch import Json
from infranetes.policies import objects
from infranetes.policies.model import Model


class Policies(Kind):
    """NetworkPolicies."""

    path = "/apis/networking.k8s.io/v1/networkpolicies"

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    def put(self, item: Json) -> Iterable[None] | None:
        Fields(item, "NetworkPolicy").name()  # raises, so that a policy without a name is left out
        return self._put_steps(item)

    def _put_steps(self, item: Json) -> Iterable[None]:
        self._model.put_policy((yield from objects.policy(item)))

    def remove(self, name: Name) -> Iterable[None]:
        self._model.remove_policy(name)
        return ()


class Namespaces(Kind):
    """Namespaces, for their labels."""

    path = "/api/v1/namespaces"

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    def put(self, item: Json) -> Iterable[None] | None:
        name, labels = objects.namespace(item)
        return self._model.put_namespace(name.name, labels)

    def remove(self, name: Name) -> Iterable[None]:
        return self._model.remove_namespace(name.name)


class Pods(Kind):
    """Pods that have not ended."""

    path = "/api/v1/pods"

    def __init__(self, model: Model) -> None:
        ended = ",".join(f"status.phase!={phase}" for phase in objects.ENDED)
        super().__init__({"fieldSelector": ended})
        self._model = model

    def trimmed(self, item: Json) -> Json:
        return objects.trimmed_pod(item)

    def put(self, item: Json) -> Iterable[None] | None:
        pod = objects.pod(item)
        return None if pod is None else self._model.put_pod(pod)

    def remove(self, name: Name) -> Iterable[None]:
        return self._model.remove_pod(name)
