# SPDX-License-Identifier: Apache-2.0
"""The permissions that Azure's access control requires for each request (source: Azure permissions for
Compute and for Networking), and those that the roles in the manual grant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).resolve().parents[3] / "docs"
_ROLES = {"group": "provider-azure-role.json", "subscription": "provider-azure-subscription-role.json"}
_FOR_VMS = (
    "Microsoft.Network/networkInterfaces/join/action",
    "Microsoft.Compute/disks/write",
    "Microsoft.Compute/galleries/images/read",
    "Microsoft.Compute/galleries/images/versions/read",
)
_JOINS = {
    "subnet": "Microsoft.Network/virtualNetworks/subnets/join/action",
    "publicIPAddress": "Microsoft.Network/publicIPAddresses/join/action",
    "applicationSecurityGroups": "Microsoft.Network/applicationSecurityGroups/joinIpConfiguration/action",
}


@lru_cache
def granted(scope: str) -> frozenset[str]:
    """Return the permissions of the role in the manual. :param scope: where it is assigned."""
    return frozenset(json.loads((_DOCS / _ROLES[scope]).read_text())["Actions"])


def missing(path: str, needed: set[str]) -> set[str]:
    """Return those of the permissions that a request needs that the roles do not grant."""
    inside = "/resourceGroups/" in path
    return needed - granted("subscription") - (granted("group") if inside else frozenset())


def needed(method: str, path: str, body: Any) -> set[str]:
    """Return the permissions that a request needs."""
    return set(_needed(method, path, body))


def _needed(method: str, path: str, body: Any) -> Iterator[str]:
    if path.endswith("/resources"):
        return  # it shows what the caller may read
    provider, *parts = path.partition("/providers/")[2].split("/")
    last_is_action = method == "POST"
    kinds = parts[::2]
    if provider == "Microsoft.Compute" and parts[0] == "locations":
        kinds = ["locations", {"DiskOperations": "diskOperations"}.get(parts[2], parts[2])]
    kind = f"{provider}/{'/'.join(kinds)}"
    if last_is_action:
        yield f"{provider}/{parts[0]}/{parts[-1]}/action"
        if parts[-1] == "attachDetachDataDisks":
            yield "Microsoft.Compute/disks/write"
        return
    yield f"{kind}/{ {'GET': 'read', 'PUT': 'write', 'PATCH': 'write', 'DELETE': 'delete'}[method] }"
    if method == "PUT" and kind.endswith(("disks", "snapshots")):
        source = body["properties"]["creationData"].get("sourceResourceId", "")
        if source:  # whose content the caller has to be allowed to see
            origin = f"Microsoft.Compute/{source.split('/')[-2]}"
            yield from (f"{origin}/read", f"{origin}/beginGetAccess/action")
    elif method == "PUT" and kind.endswith("virtualMachines"):
        yield from _FOR_VMS
    elif method == "PUT" and kind.endswith("networkInterfaces"):
        properties = body["properties"]
        for name, permission in _JOINS.items():
            if any(each["properties"].get(name) for each in properties["ipConfigurations"]):
                yield permission
        if properties.get("networkSecurityGroup"):
            yield "Microsoft.Network/networkSecurityGroups/join/action"
