"""An instance as Compute Engine is asked for it (source: Compute Engine API, "Method: instances.insert")."""

from __future__ import annotations

from typing import Any

from infranetes.providers.cloud.gcp.names import image_path, labels, name_of, region_of
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.interface import Order

IDENTITY = "infranetes-identity"  # the attribute in which the agent finds its identity
_PODS_SCOPE = "https://www.googleapis.com/auth/cloud-platform"  # the account's roles say what pods may


def instance(settings: Settings, order: Order, address: str, gpus: int, gib: int) -> dict[str, Any]:
    """The body of the request.

    :param address: the reserved address that it is to have, or "". :param gpus: that its type has.
    :param gib: of its disk; 0: as the image has it."""
    zone, wishes = order.place, order.wishes
    account = wishes.instance_profile or settings.service_account
    tags = list(wishes.security_groups or settings.tags)
    return {
        "name": name_of(order.token, order.number),
        "machineType": f"zones/{zone}/machineTypes/{order.size}",
        "labels": labels(order.tags),
        "disks": [_disk(settings, order, gib)],
        "networkInterfaces": [_interface(settings, order, address)],
        "scheduling": _scheduling(wishes.spot, gpus),
        "serviceAccounts": [{"email": account, "scopes": [_PODS_SCOPE]}] if account else [],
        "tags": {"items": tags},
        "metadata": {
            "items": [
                {"key": IDENTITY, "value": order.identity.decode()},
                {"key": "block-project-ssh-keys", "value": "TRUE"},
            ]
        },
    }


def _disk(settings: Settings, order: Order, gib: int) -> dict[str, Any]:
    """The boot disk, which goes with the VM."""
    source = image_path(order.image or settings.image, settings.project)
    made: dict[str, Any] = {
        "sourceImage": source,
        "diskType": f"zones/{order.place}/diskTypes/{settings.disk_type}",
        "labels": labels(order.tags),
    }
    if gib:
        made["diskSizeGb"] = str(gib)
    return {
        "boot": True,
        "autoDelete": True,
        "type": "PERSISTENT",
        "mode": "READ_WRITE",
        "initializeParams": made,
    }


def _interface(settings: Settings, order: Order, address: str) -> dict[str, Any]:
    wishes, region = order.wishes, region_of(order.place)
    found: dict[str, Any] = {}
    network, subnetwork = settings.network, wishes.subnet or settings.subnetwork
    if network:
        found["network"] = network if "/" in network else f"global/networks/{network}"
    if subnetwork:
        found["subnetwork"] = (
            subnetwork if "/" in subnetwork else f"regions/{region}/subnetworks/{subnetwork}"
        )
    if not found:
        found["network"] = "global/networks/default"
    public = settings.public_address if wishes.public_address is None else wishes.public_address
    if public or wishes.elastic_address:
        access = {"type": "ONE_TO_ONE_NAT", "name": "External NAT"}
        found["accessConfigs"] = [{**access, "natIP": address} if address else access]
    return found


def _scheduling(spot: bool, gpus: int) -> dict[str, Any]:
    """A pod's VM that has ended is not started again: Kubernetes makes another one. A spot VM is stopped
    and not deleted when it is taken away, so that its end is seen."""
    found = {"automaticRestart": False, "onHostMaintenance": "TERMINATE" if spot or gpus else "MIGRATE"}
    if spot:
        found.update(provisioningModel="SPOT", instanceTerminationAction="STOP")
    return found
