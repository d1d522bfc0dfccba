# SPDX-License-Identifier: Apache-2.0
"""Pods, Namespaces and NetworkPolicies as the API server writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]  # Any: JSON


def pod(
    name: str,
    *addresses: str,
    namespace: str = "ns",
    labels: Mapping[str, str] | None = None,
    ports: Sequence[Json] = (),
    **fields: Any,  # Any: JSON
) -> Json:
    """Return a running pod with one container that has `ports`; `fields` are those of the specification."""
    about = {
        "namespace": namespace,
        "name": name,
        "uid": fields.pop("uid", name),
        "labels": dict(labels or {}),
    }
    status = {"phase": fields.pop("phase", "Running"), "podIPs": [{"ip": each} for each in addresses]}
    spec = {"containers": [{"name": "main", "ports": list(ports)}], **fields}
    return {"metadata": about, "spec": spec, "status": status}


def port(name: str, number: int, protocol: str = "TCP") -> Json:
    """Return a port of a container."""
    return {"name": name, "containerPort": number, "protocol": protocol}


def namespace(name: str, **labels: str) -> Json:
    """Return a namespace with these labels and the one that all namespaces have."""
    return {"metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name, **labels}}}


def policy(
    name: str = "policy",
    selector: Json | None = None,
    namespace: str = "ns",
    **spec: Any,  # Any: JSON
) -> Json:
    """Return a NetworkPolicy for the pods that `selector` selects, by default all; `spec` is the rest."""
    return {
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"podSelector": selector or {}, **spec},
    }


def labelled(**labels: str) -> Json:
    """Return a selector of these labels."""
    return {"matchLabels": labels}


def expression(key: str, operator: str, *values: str) -> Json:
    """Return a selector with one expression."""
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def block(cidr: str, *excepted: str) -> Json:
    """Return a peer that is a network."""
    return {"ipBlock": {"cidr": cidr, "except": list(excepted)}}


def pods(**labels: str) -> Json:
    """Return a peer: pods of the policy's namespace."""
    return {"podSelector": labelled(**labels)}
