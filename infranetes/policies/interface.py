# SPDX-License-Identifier: Apache-2.0
"""The interface between the NetworkPolicies of the node's pods and the code that enforces them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import attrs

from infranetes_common.pod_firewall import PodFirewall


@attrs.frozen
class LocalPod:
    """A pod of this node, as kubelet has described it to the daemon.

    :ivar id: the id of its sandbox.
    :ivar labels: used until the API server shows the pod, whose labels may have changed since.
    """

    id: str
    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]


class PodPolicies(Protocol):
    """The firewalls that result from NetworkPolicies, for the pods of this node.

    A pod's firewall is not known until all policies, namespaces and pods have been listed. Until then pods
    that start must be CLOSED, and rules in force since before the daemon started must stay the same. Once
    known it stays known, even if the API server fails: it is then that of the cluster's last known state.
    """

    @property
    def trouble(self) -> str:
        """Why the cluster can't be followed now, such as for missing rights, as a message; "": it can be."""

    def add(self, pod: LocalPod) -> None:
        """Compute a firewall for a pod of this node from now on.

        Subscribers get its id once that is known."""

    def remove(self, id: str) -> None:
        """Stop computing the pod's firewall. Idempotent."""

    def firewall(self, id: str) -> PodFirewall | None:
        """Return the pod's present firewall, or None if it is not known yet."""

    def subscribe(self, changed: Callable[[frozenset[str]], None]) -> None:
        """Call `changed` with the ids of pods whose firewalls have changed, or have become known.

        It is not called within `add` or `remove`, and may call both."""
