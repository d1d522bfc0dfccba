# SPDX-License-Identifier: Apache-2.0
"""The permissions that Google's access control requires for each request (source: Compute Engine API, the
section "IAM Permissions" of each method), and those that the role in the manual grants."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

_MANUAL = Path(__file__).resolve().parents[3] / "docs"
ROLE = _MANUAL / "provider-gcp-role.yaml"
PUBLISHER = _MANUAL / "publish-gcp-role.yaml"


@lru_cache
def granted(role: Path = ROLE) -> frozenset[str]:
    """Return the permissions of a role in the manual."""
    return frozenset(yaml.safe_load(role.read_text())["includedPermissions"])


def needed(method: str, path: str, body: Any) -> set[str]:
    """Return the permissions that a request needs; for one that must not be made, a permission without grant.

    :param path: as in `Gce.answer`."""
    match (method, *path.strip("/").split("/")[1:]):
        case ("GET", "aggregated", kind) | (
            "GET",
            "zones",
            _,
            ("disks" | "instances" | "machineTypes") as kind,
        ):
            found = f"{kind}.list"
        case ("GET", "zones", _, "operations", *name):
            found = "zoneOperations.get" if name else "zoneOperations.list"
        case ("GET", "global", "operations", _):
            found = "globalOperations.get"
        case ("GET", "zones", _, "instances", _, "serialPort"):
            found = "instances.getSerialPortOutput"
        case ("GET", "global", "images", "family", _):
            found = "images.getFromFamily"
        case ("GET", "global", kind):
            found = f"{kind}.list"
        case ("GET", "global", kind, _) | ("GET", "zones" | "regions", _, kind, _):
            found = f"{kind}.get"
        case ("DELETE", "zones", _, kind, _) | ("DELETE", "global", kind, _):
            found = f"{kind}.delete"
        case ("POST", "global", "images"):
            return {"compute.images.create", *({"compute.images.setLabels"} if body.get("labels") else set())}
        case ("POST", "zones", _, "instances"):
            return _launch(body)
        case ("POST", "zones", _, "disks"):
            return _disk(body)
        case ("POST", "zones", _, "disks", _, "resize"):
            found = "disks.resize"
        case ("POST", "zones", _, "disks", _, "createSnapshot"):
            labels = {"compute.snapshots.setLabels"} if body.get("labels") else set()
            return {"compute.disks.createSnapshot", "compute.snapshots.create", *labels}
        case ("POST", "zones", _, "instances", _, "attachDisk"):
            return {"compute.instances.attachDisk", _use(body)}
        case ("POST", "zones", _, "instances", _, "detachDisk"):
            return {"compute.instances.detachDisk", "compute.disks.use"}
        case ("POST", "zones", _, "instances", _, ("stop" | "start" | "setMetadata") as what):
            found = f"instances.{what}"
        case _:
            found = f"nobody may {method} {path}"
    return {f"compute.{found}"}


def _use(attached: Any) -> str:
    return f"compute.disks.use{'ReadOnly' if attached.get('mode') == 'READ_ONLY' else ''}"


def _disk(body: Any) -> set[str]:
    found = {"compute.disks.create"}
    for field, permission in (
        ("labels", "disks.setLabels"),
        ("sourceSnapshot", "snapshots.useReadOnly"),
        ("sourceDisk", "disks.useReadOnly"),
    ):
        if body.get(field):
            found.add(f"compute.{permission}")
    return found


def _launch(body: Any) -> set[str]:
    boot, interface = body["disks"][0]["initializeParams"], body["networkInterfaces"][0]
    found = {
        "compute.instances.create",
        "compute.instances.setMetadata",
        "compute.images.useReadOnly",
        *_disk(boot),
        *(_use(each) for each in body["disks"][1:]),
    }
    subnetwork = bool(interface.get("subnetwork"))
    for permission, is_needed in (
        ("instances.setLabels", bool(body.get("labels"))),
        ("instances.setTags", bool(body["tags"].get("items"))),
        ("instances.setServiceAccount", bool(body["serviceAccounts"])),
        ("subnetworks.use", subnetwork),
        ("networks.use", not subnetwork),
        ("subnetworks.useExternalIp", subnetwork and bool(interface.get("accessConfigs"))),
        ("addresses.use", any(each.get("natIP") for each in interface.get("accessConfigs", ()))),
    ):
        if is_needed:
            found.add(f"compute.{permission}")
    return found
