# SPDX-License-Identifier: Apache-2.0
"""Azure's resources as JSON, held to Azure's own models of them."""

from __future__ import annotations

import ipaddress
import uuid
from datetime import UTC, datetime
from typing import Any

SUBSCRIPTION = "5ca1ab1e-0000-4000-8000-0000000000aa"
GROUP = "pods"
LOCATION = "westeurope"
ZONES = (f"{LOCATION}-1", f"{LOCATION}-2")
NETWORK = ipaddress.ip_network("127.86.0.0/16")  # all of it is the loopback interface's
HERE = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers"
VMS, DISKS = f"{HERE}/Microsoft.Compute/virtualMachines", f"{HERE}/Microsoft.Compute/disks"
SNAPSHOTS = f"{HERE}/Microsoft.Compute/snapshots"
NICS, ADDRESSES = f"{HERE}/Microsoft.Network/networkInterfaces", f"{HERE}/Microsoft.Network/publicIPAddresses"
GALLERIES = f"{HERE}/Microsoft.Compute/galleries"
SUBNET = f"{HERE}/Microsoft.Network/virtualNetworks/cluster/subnets/pods"

Json = dict[str, Any]
"""A resource or an answer. Any: what is in it depends on its kind, and is held to Azure's models, not to
types."""

# name, vCPUs, GiB, other capabilities, zones
SIZES: tuple[tuple[str, int, str, Json, str], ...] = (
    ("Standard_B1ls", 1, "0.5", {}, "12"),
    ("Standard_B1s", 1, "1", {}, "12"),
    ("Standard_B2s", 2, "4", {}, "12"),
    ("Standard_D2s_v5", 2, "8", {}, "12"),
    ("Standard_D4s_v5", 4, "16", {}, "12"),
    ("Standard_D8s_v5", 8, "32", {}, "1"),
    ("Standard_D2ps_v5", 2, "8", {"CpuArchitectureType": "Arm64", "HyperVGenerations": "V2"}, "12"),
    ("Standard_D2s_v6", 2, "8", {"DiskControllerTypes": "NVMe", "HyperVGenerations": "V2"}, "12"),
    ("Standard_DC2as_v5", 2, "8", {"ConfidentialComputingType": "SNP"}, "12"),
    ("Standard_NC4as_T4_v3", 4, "28", {"GPUs": "1"}, "1"),
)


def most_disks(size: str) -> int:
    """Return how many disks a VM of a size may be given."""
    return next(2 * cpus for name, cpus, *_ in SIZES if name == size)


def now() -> str:
    """Return the time as Azure writes it."""
    return datetime.now(UTC).isoformat()


def error(code: str, message: str) -> Json:
    """Return the body of an error."""
    return {"error": {"code": code, "message": message}}


def skus() -> list[Json]:
    """Return what the location offers."""
    return [
        *(_size(*each) for each in SIZES),
        _not_for_us(),
        {"name": "Premium_LRS", "resourceType": "disks"},
    ]


def _size(name: str, cpus: int, gib: str, others: Json, zones: str) -> Json:
    has = {
        "vCPUs": str(cpus),
        "MemoryGB": gib,
        "HyperVGenerations": "V1,V2",
        "CpuArchitectureType": "x64",
        "PremiumIO": "True",
        "MaxDataDiskCount": str(2 * cpus),
        **others,
    }
    return {
        "resourceType": "virtualMachines",
        "name": name,
        "tier": "Standard",
        "size": name.removeprefix("Standard_"),
        "family": "standardBSFamily" if name.startswith("Standard_B") else "standardDSv5Family",
        "locations": [LOCATION],
        "locationInfo": [{"location": LOCATION, "zones": sorted(zones), "zoneDetails": []}],
        "capabilities": [{"name": key, "value": value} for key, value in has.items()],
        "restrictions": [],
    }


def _not_for_us() -> Json:
    """A size that a subscription has to apply for."""
    restriction = {
        "type": "Location",
        "values": [LOCATION],
        "restrictionInfo": {"locations": [LOCATION]},
        "reasonCode": "NotAvailableForSubscription",
    }
    return {**_size("Standard_D16s_v5", 16, "64", {}, "12"), "restrictions": [restriction]}


def image(gallery: str, name: str, tags: Json, **properties: Any) -> Json:
    """Return an image of a gallery. :param properties: other values than the usual ones."""
    return {
        "id": f"{GALLERIES}/{gallery}/images/{name}",
        "name": name,
        "type": "Microsoft.Compute/galleries/images",
        "location": LOCATION,
        "tags": tags,
        "properties": {
            "osType": "Linux",
            "osState": "Specialized",
            "hyperVGeneration": "V1",
            "architecture": "x64",
            "identifier": {"publisher": "infranetes", "offer": "pods", "sku": name},
            "provisioningState": "Succeeded",
            **properties,
        },
    }


def version(image: Json, name: str, tags: Json, published: str, **properties: Any) -> Json:
    """Return a version of an image."""
    return {
        "id": f"{image['id']}/versions/{name}",
        "name": name,
        "type": "Microsoft.Compute/galleries/images/versions",
        "location": LOCATION,
        "tags": tags,
        "properties": {
            "publishingProfile": {"publishedDate": published, "replicaCount": 1},
            "provisioningState": "Succeeded",
            "storageProfile": {"osDiskImage": {"sizeInGB": 8, "hostCaching": "ReadWrite"}},
            **properties,
        },
    }


def subnet() -> Json:
    """Return the subnet."""
    properties = {"addressPrefix": str(NETWORK), "provisioningState": "Succeeded"}
    return {"id": SUBNET, "name": "pods", "properties": properties}


def disk(name: str, tags: Json, vm: str = "") -> Json:
    """Return a disk. :param vm: the id of the VM that has it."""
    found: Json = {
        "id": f"{DISKS}/{name}",
        "name": name,
        "type": "Microsoft.Compute/disks",
        "location": LOCATION,
        "tags": tags,
        "sku": {"name": "StandardSSD_LRS", "tier": "Standard"},
        "properties": {
            "creationData": {"createOption": "Empty"},
            "diskSizeGB": 8,
            "diskState": "Attached" if vm else "Unattached",
            "provisioningState": "Succeeded",
            "timeCreated": now(),
        },
    }
    return {**found, "managedBy": vm} if vm else found


def storage(kind: str, name: str, body: Json, source: Json | None) -> Json:
    """Return a disk or a snapshot that was asked for. :param source: what it is made from."""
    properties = {
        "diskSizeGB": source["properties"]["diskSizeGB"] if source is not None else 0,
        **body["properties"],
        "provisioningState": "Creating",
        "timeCreated": now(),
    }
    found = {**body, "id": f"{HERE}/Microsoft.Compute/{kind}/{name}", "name": name}
    return {
        "sku": {"name": "Standard_ZRS"},
        **found,
        "type": f"Microsoft.Compute/{kind}",
        "properties": properties,
    }


def data_disk(disk: Json, asked: Json) -> Json:
    """Return an entry of a VM's list of disks."""
    return {
        "lun": asked["lun"],
        "name": disk["name"],
        "createOption": "Attach",
        "caching": asked["caching"],
        "managedDisk": {"id": disk["id"], "storageAccountType": disk["sku"]["name"]},
        "deleteOption": asked["deleteOption"],
        "diskSizeGB": disk["properties"]["diskSizeGB"],
        "toBeDetached": False,
    }


def address(name: str, body: Json, number: str) -> Json:
    """Return a public IP address as Azure describes it, made from the body of its PUT request."""
    properties = {
        **body["properties"],
        "ipAddress": number,
        "provisioningState": "Succeeded",
        "resourceGuid": str(uuid.uuid4()),
    }
    id = f"{ADDRESSES}/{name}"
    return {**body, "id": id, "name": name, "properties": properties}


def nic(name: str, body: Json, number: str) -> Json:
    """Return a network interface that was asked for."""
    id = f"{NICS}/{name}"
    [asked] = body["properties"]["ipConfigurations"]
    theirs = {**asked["properties"], "privateIPAddress": number, "provisioningState": "Succeeded"}
    if "publicIPAddress" in theirs:  # whose other fields are shown with the address itself
        theirs["publicIPAddress"] = {"id": theirs["publicIPAddress"]["id"]}
    configuration = {**asked, "id": f"{id}/ipConfigurations/{asked['name']}", "properties": theirs}
    properties = {
        **body["properties"],
        "ipConfigurations": [configuration],
        "provisioningState": "Succeeded",
        "resourceGuid": str(uuid.uuid4()),
        "primary": True,
    }
    return {**body, "id": id, "name": name, "properties": properties}


def vm(name: str, body: Json) -> Json:
    """Return a VM that was asked for. Its user-data is never shown."""
    properties = {
        **body["properties"],
        "provisioningState": "Creating",
        "vmId": str(uuid.uuid4()),
        "timeCreated": now(),
    }
    properties.pop("userData", None)
    return {
        **body,
        "id": f"{VMS}/{name}",
        "name": name,
        "type": "Microsoft.Compute/virtualMachines",
        "properties": properties,
    }
