# SPDX-License-Identifier: Apache-2.0
"""Services and EndpointSlices as the API server writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]  # Any: JSON


def service(name: str = "web", ips: Sequence[str] = ("10.96.0.10",), **spec: Any) -> Json:  # Any: JSON
    """Return a Service in the namespace `ns` with port 80, unless `spec` says otherwise."""
    given = {"clusterIP": ips[0] if ips else "", "clusterIPs": list(ips), "ports": [port(80)], **spec}
    return {"metadata": {"namespace": "ns", "name": name}, "spec": given}


def port(number: int, name: str = "", protocol: str = "TCP") -> Json:
    """Return a port of a Service or slice."""
    return {"name": name, "protocol": protocol, "port": number}


def endpoint(address: str, node: str = "here", **fields: Any) -> Json:  # Any: JSON
    """Return an endpoint with conditions `ready`, `serving`, `terminating` and hints `zones`, `nodes`."""
    conditions = {key: fields[key] for key in ("ready", "serving", "terminating") if key in fields}
    hints = {
        "forZones": [{"name": each} for each in fields.get("zones", ())],
        "forNodes": [{"name": each} for each in fields.get("nodes", ())],
    }
    return {"addresses": [address], "nodeName": node, "conditions": conditions, "hints": hints}


def endpoint_slice(
    *endpoints: Json,
    service: str = "web",
    name: str = "",
    ports: Sequence[Json] = (),
    labels: Mapping[str, str] | None = None,
    kind: str = "IPv4",
) -> Json:
    """Return a slice in the namespace `ns` with port 8080, unless `ports` says otherwise."""
    all_labels = {"kubernetes.io/service-name": service, **(labels or {})}
    return {
        "metadata": {"namespace": "ns", "name": name or f"{service}-1", "labels": all_labels},
        "addressType": kind,
        "ports": list(ports) or [port(8080)],
        "endpoints": list(endpoints),
    }
