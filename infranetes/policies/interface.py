# SPDX-License-Identifier: Apache-2.0
"""What the node knows of its pods' NetworkPolicies, for who enforces them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import attrs

from infranetes_common.pod_firewall import PodFirewall


@attrs.frozen
class LocalPod:
    """A pod of this node, as kubelet has described it to the daemon.

    :ivar id: the caller's own for it: its sandbox's.
    :ivar labels: they count until the API server shows the pod, which may have got others since.
    """

    id: str
    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]


class PodPolicies(Protocol):
    """The firewalls that NetworkPolicies come to, for the pods of this node.

    A pod's firewall is not known until all policies, namespaces and pods have been listed. What starts
    in the meantime is to be CLOSED; rules that are in force since before the daemon started are to be
    left as they are. Once it is known it stays so, with what was last heard of the cluster.
    """

    @property
    def trouble(self) -> str:
        """Why the cluster can't be followed now, for people: rights that are lacking, above all; empty: it
        can."""

    def add(self, pod: LocalPod) -> None:
        """Have a firewall for a pod of this node from now on. Its id is told once it is known."""

    def remove(self, id: str) -> None:
        """Have none any more. Idempotent."""

    def firewall(self, id: str) -> PodFirewall | None:
        """What the pod may receive and send now. None: that is not known yet."""

    def subscribe(self, changed: Callable[[frozenset[str]], None]) -> None:
        """Have `changed` called with the ids of pods whose firewalls are others now, or known now. It is not
        called within `add` or `remove`, and may call both."""
