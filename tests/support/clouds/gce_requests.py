# SPDX-License-Identifier: Apache-2.0
"""Requests of Compute Engine's API: what they ask for, and the answers of those that are refused."""

from __future__ import annotations

import json
from typing import Any

from tests.support.clouds import gce_resources
from tests.support.clouds.faults import Fault, FaultKind
from tests.support.clouds.gce_resources import Json
from tests.support.clouds.http_sites import Answer


def parameters(method: str, path: str, query: dict[str, str], body: Json) -> dict[str, str]:
    """Return a request's action and parameters, as rules of faults name them."""
    found = {"Action": "", "path": path, **query}
    match (method, *path.split("/")[1:]):
        case ("GET", "aggregated", kind):
            found["Action"] = f"list {kind}"
        case ("GET", "zones", zone, "instances"):
            found.update(Action="list instances", zone=zone)
        case ("POST", "zones", zone, "instances"):
            size = body["machineType"].rpartition("/")[2]
            found.update(Action="launch", name=body["name"], size=size, zone=zone)
        case ("DELETE", "zones", _, "instances", _):
            found["Action"] = "destroy"
        case ("POST", "zones", _, "instances", instance, ("attachDisk" | "detachDisk") as action):
            found.update(Action=action.replace("Disk", " disk"), instance=instance)
        case ("POST", "zones", _, "instances", instance, ("start" | "setMetadata") as action):
            found.update(Action=action, instance=instance)
        case ("POST", "zones", _, "disks"):
            found.update(Action="create disk", name=body["name"])
        case ("POST", "zones", _, "disks", name, "createSnapshot"):
            found.update(Action="create snapshot", name=body["name"])
        case ("POST", "zones", _, "disks", name, action):
            found.update(Action=f"{action} disk", name=name)
        case ("DELETE", "global", "snapshots", name):
            found.update(Action="delete snapshot", name=name)
        case ("DELETE", "zones", _, "disks", name):
            found.update(Action="delete disk", name=name)
        case ("GET", "global", "images", *_):
            found["Action"] = "get images"
        case ("POST", "global", "images"):
            found.update(Action="insert image", name=body["name"])
        case ("DELETE", "global", "images", name):
            found.update(Action="delete image", name=name)
        case ("GET", "global", "snapshots", *_):
            found["Action"] = "get snapshots"
        case ("GET", "zones", _, "operations", *_) | ("GET", "global", "operations", _):
            found["Action"] = "operation"
        case (_, *parts):
            found["Action"] = f"{method.lower()} {parts[2] if len(parts) > 2 else parts[-1]}"
    return found


def bearer(request: Any) -> str:
    """The token that a request has; "": none."""
    return str(request.getHeader("Authorization") or "").removeprefix("Bearer ")


def refusal(fault: Fault) -> Answer | None:
    """Return the answer to a call that had no effect."""
    if fault.kind is FaultKind.THROTTLE:
        header = [("Retry-After", f"{fault.retry_after:g}")] if fault.retry_after else []
        return (*error(403, "rateLimitExceeded", "Rate Limit Exceeded"), *header)
    answers = {
        FaultKind.ERROR: (503, "backendError", "Backend Error"),
        FaultKind.QUOTA: (403, "quotaExceeded", "Quota 'CPUS_ALL_REGIONS' exceeded.  Limit: 8.0 globally."),
        FaultKind.FAMILY_QUOTA: (
            403,
            "quotaExceeded",
            "Quota 'CPUS' exceeded.  Limit: 8.0 in region europe-west1.",
        ),
        FaultKind.UNKNOWN: (404, "notFound", "The resource was not found"),
        FaultKind.REVOKED: (401, "authError", "Invalid Credentials"),
    }
    return error(*answers[fault.kind]) if fault.kind in answers else None


def error(status: int, reason: str, message: str) -> Answer:
    return status, json.dumps(gce_resources.error(status, reason, message)).encode()
