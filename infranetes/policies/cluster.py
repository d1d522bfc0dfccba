# SPDX-License-Identifier: Apache-2.0
"""The cluster's present NetworkPolicies: followed at the API server, for the pods of this node."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger

from infranetes.kubernetes.cluster import Cluster
from infranetes.kubernetes.kept import KeptObjects
from infranetes.kubernetes.requests import Requests
from infranetes.policies.interface import LocalPod
from infranetes.policies.kinds import Namespaces, Pods, Policies
from infranetes.policies.model import Model
from infranetes.policies.objects import Policy
from infranetes_common.pod_firewall import PodFirewall
from infranetes_common.reactors import IReactor

PATIENCE_SECONDS = 30.0  # how long pods may stay closed before a warning tells why
REST = 3.0  # a rest takes this many times as long as the settling; changes during it are settled together
MAX_REST_SECONDS = 2.0

_log = Logger()


class ClusterPolicies(Cluster):
    """The PodPolicies (see `interface`) that follows NetworkPolicies, Namespaces and Pods."""

    name = "policies"

    def __init__(self, reactor: IReactor, server: Requests, kept: KeptObjects | None = None) -> None:
        self._model = Model()
        self._present: set[str] = set()  # ids of local pods
        self._changed: set[str] = set()  # ids of pods whose changes are not yet reported
        self._subscribers: list[Callable[[frozenset[str]], None]] = []
        self._settling = False  # whether settling is under way or scheduled
        self._rested_at = 0.0
        self._calls: dict[str, IDelayedCall] = {}
        kinds = (Policies(self._model), Namespaces(self._model), Pods(self._model))
        super().__init__(reactor, server, kinds, self._renew, kept)

    def startService(self) -> None:
        """Begin to follow. Does not wait for anything."""
        super().startService()
        self._calls["explain"] = self._reactor.callLater(PATIENCE_SECONDS, self._explain)

    def stopService(self) -> None:
        """Stop following."""
        super().stopService()
        for call in self._calls.values():
            if call.active():
                call.cancel()

    def add(self, pod: LocalPod) -> None:
        """Compute a firewall for a pod of this node from now on.

        Subscribers get its id once that is known."""
        self._present.add(pod.id)
        self.do(_step(lambda: self._model.add(pod)))

    def remove(self, id: str) -> None:
        """Stop computing the pod's firewall. Idempotent."""
        self._present.discard(id)
        self.do(_step(lambda: self._model.remove(id)))

    def firewall(self, id: str) -> PodFirewall | None:
        """Return the pod's present firewall, or None if it is not known yet."""
        return self._model.firewall(id) if id in self._present else None

    def selecting(self, id: str) -> list[Policy]:
        """Return the policies that select the pod."""
        return self._model.policies(id) if id in self._present else []

    def subscribe(self, changed: Callable[[frozenset[str]], None]) -> None:
        """Call `changed` with the ids of pods whose firewalls have changed, or have become known."""
        self._subscribers.append(changed)

    def _renew(self) -> None:
        """Schedule the settling of changes, after a rest, and report the firewalls settled so far."""
        if self.complete and self._model.unsettled and not self._settling:
            self._settling = True
            rest = max(0.0, self._rested_at - self._reactor.seconds())
            self._calls["settle"] = self._reactor.callLater(rest, lambda: self.do(self._settle()))
        changed = frozenset(self._changed & self._present)
        self._changed.clear()
        for each in self._subscribers if changed else ():
            each(changed)

    def _settle(self) -> Iterator[None]:
        began = self._reactor.seconds()
        try:
            yield from self._model.settle(self._changed)
        finally:
            now = self._reactor.seconds()
            self._rested_at = now + min(REST * (now - began), MAX_REST_SECONDS)
            self._settling = False

    def _explain(self) -> None:
        if not self.complete:
            _log.warn(
                "NetworkPolicies are not known, so no connection of a new pod is allowed until they are: "
                "{trouble}; docs/network-policy.md names the rights that the kubeconfig needs",
                trouble=self.trouble or "the API server has not listed all of them yet",
            )


def _step(do: Callable[[], None]) -> Iterator[None]:
    """Return one call as an iterator of steps."""
    do()
    yield
