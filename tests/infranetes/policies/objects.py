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
    """A running pod with one container that has `ports`; `phase`, `uid` and fields of its specification."""
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
    """A port of a container."""
    return {"name": name, "containerPort": number, "protocol": protocol}


def namespace(name: str, **labels: str) -> Json:
    """A namespace with the label that all have, and others."""
    return {"metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name, **labels}}}


def policy(
    name: str = "policy",
    selector: Json | None = None,
    namespace: str = "ns",
    **spec: Any,  # Any: JSON
) -> Json:
    """A NetworkPolicy for all pods of the namespace, unless `selector` says otherwise; `spec` is the rest."""
    return {
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"podSelector": selector or {}, **spec},
    }


def labelled(**labels: str) -> Json:
    """A selector of labels."""
    return {"matchLabels": labels}


def expression(key: str, operator: str, *values: str) -> Json:
    """A selector of one expression."""
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def block(cidr: str, *excepted: str) -> Json:
    """A peer."""
    return {"ipBlock": {"cidr": cidr, "except": list(excepted)}}


def pods(**labels: str) -> Json:
    """A peer: pods of the policy's namespace."""
    return {"podSelector": labelled(**labels)}
