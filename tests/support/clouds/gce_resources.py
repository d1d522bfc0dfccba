# SPDX-License-Identifier: Apache-2.0
"""Compute Engine's resources as JSON, checked against the answers recorded by libcloud's tests."""

from __future__ import annotations

import ipaddress
import secrets
from datetime import UTC, datetime
from typing import Any

PROJECT = "test-project"
REGION = "europe-west1"
ZONES = (f"{REGION}-b", f"{REGION}-c")
HERE = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}"
NETWORK = ipaddress.ip_network("127.78.0.0/16")  # all of it is the loopback interface's

Json = dict[str, Any]
"""A resource or an answer. Any: what is in it depends on its kind, and is held to Google's description by
`discovery`, not by types."""


def error(status: int, reason: str, message: str) -> Json:
    """Return the body of an error."""
    domain = "usageLimits" if reason == "rateLimitExceeded" else "global"
    one = {"domain": domain, "message": message, "reason": reason}
    return {"error": {"code": status, "errors": [one], "message": message}}


def now() -> str:
    """Return the time as Google writes it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def number() -> str:
    """Return a new id."""
    return str(secrets.randbelow(9 * 10**18) + 10**18)


def image(name: str, **fields: Any) -> Json:
    """Return an image. :param fields: other values than the usual ones."""
    return {
        "kind": "compute#image",
        "id": number(),
        "name": name,
        "selfLink": f"{HERE}/global/images/{name}",
        "creationTimestamp": now(),
        "status": "READY",
        "sourceType": "RAW",
        "rawDisk": {"containerType": "TAR", "source": ""},
        "archiveSizeBytes": str(700 << 20),
        "diskSizeGb": "10",
        "architecture": "X86_64",
        "labels": {},
        **fields,
    }


def address(name: str) -> Json:
    """Return a reserved address."""
    return {
        "kind": "compute#address",
        "id": number(),
        "creationTimestamp": now(),
        "name": name,
        "description": "",
        "address": "203.0.113.77",
        "status": "RESERVED",
        "region": f"{HERE}/regions/{REGION}",
        "selfLink": f"{HERE}/regions/{REGION}/addresses/{name}",
    }


def disk(zone: str, name: str, labels: dict[str, str], gib: str) -> Json:
    """Return an unused disk."""
    return {
        "kind": "compute#disk",
        "id": number(),
        "creationTimestamp": now(),
        "name": name,
        "sizeGb": gib,
        "zone": f"{HERE}/zones/{zone}",
        "status": "READY",
        "selfLink": f"{HERE}/zones/{zone}/disks/{name}",
        "type": f"{HERE}/zones/{zone}/diskTypes/pd-balanced",
        "labels": labels,
        "labelFingerprint": "42WmSpB8rSM=",
    }


def snapshot(name: str, labels: dict[str, str], disk: Json) -> Json:
    """Return a snapshot of a disk that is being taken."""
    return {
        "kind": "compute#snapshot",
        "id": number(),
        "creationTimestamp": now(),
        "name": name,
        "description": "",
        "status": "CREATING",
        "sourceDisk": disk["selfLink"],
        "sourceDiskId": disk["id"],
        "diskSizeGb": disk["sizeGb"],
        "labels": labels,
        "labelFingerprint": "42WmSpB8rSM=",
        "selfLink": f"{HERE}/global/snapshots/{name}",
    }


def most_disks(machine_type: str) -> int:
    """How many disks an instance may have, its boot disk included."""
    return 16 if machine_type in ("e2-micro", "e2-small", "e2-medium") else 128


def attached_disk(index: int, disk: Json, asked: Json) -> Json:
    """Return what an instance shows of a disk that it was given. :param asked: how."""
    return {
        "kind": "compute#attachedDisk",
        "index": index,
        "type": "PERSISTENT",
        "mode": asked.get("mode", "READ_WRITE"),
        "source": disk["selfLink"],
        "deviceName": asked.get("deviceName", f"persistent-disk-{index}"),
        "boot": asked.get("boot", False),
        "autoDelete": asked.get("autoDelete", False),
        "interface": "SCSI",
        "diskSizeGb": disk["sizeGb"],
    }


def subnetwork() -> Json:
    """Return the pods' subnetwork."""
    return {
        "kind": "compute#subnetwork",
        "id": "4297043163355844284",
        "creationTimestamp": now(),
        "name": "pods",
        "network": f"{HERE}/global/networks/default",
        "ipCidrRange": str(NETWORK),
        "gatewayAddress": str(NETWORK[1]),
        "region": f"{HERE}/regions/{REGION}",
        "selfLink": f"{HERE}/regions/{REGION}/subnetworks/pods",
    }


def machine_type(zone: str, name: str, cpus: int, mib: int, gpus: int) -> Json:
    """Return a machine type."""
    accelerators = [{"guestAcceleratorType": "nvidia-l4", "guestAcceleratorCount": gpus}]
    return {
        "kind": "compute#machineType",
        "id": str(sum(name.encode())),
        "creationTimestamp": "1969-12-31T16:00:00.000-08:00",
        "name": name,
        "description": f"{cpus} vCPU, {mib >> 10} GB RAM",
        "guestCpus": cpus,
        "memoryMb": mib,
        "imageSpaceGb": 0,
        "maximumPersistentDisks": most_disks(name),
        "maximumPersistentDisksSizeGb": "263168",
        "zone": zone,
        "selfLink": f"{HERE}/zones/{zone}/machineTypes/{name}",
        **({"accelerators": accelerators} if gpus else {}),
    }


def instance(zone: str, body: Json, address: str) -> Json:
    """Return a new instance, as requested."""
    name, asked = body["name"], body["networkInterfaces"][0]
    access = [
        {"kind": "compute#accessConfig", "natIP": f"198.51.100.{secrets.randbelow(250) + 1}", **each}
        for each in asked.get("accessConfigs", [])
    ]
    interface = {
        "name": "nic0",
        "network": f"{HERE}/global/networks/default",
        "subnetwork": f"{HERE}/regions/{REGION}/subnetworks/pods",
        "networkIP": address,
        **({"accessConfigs": access} if access else {}),
    }
    initial = body["disks"][0]["initializeParams"]
    boot = {"selfLink": f"{HERE}/zones/{zone}/disks/{name}", "sizeGb": initial.get("diskSizeGb", "10")}
    return {
        "kind": "compute#instance",
        "id": number(),
        "creationTimestamp": now(),
        "name": name,
        "tags": {**body["tags"], "fingerprint": "42WmSpB8rSM="},
        "machineType": f"{HERE}/{body['machineType']}",
        "status": "PROVISIONING",
        "zone": f"{HERE}/zones/{zone}",
        "canIpForward": False,
        "networkInterfaces": [interface],
        "disks": [attached_disk(0, boot, body["disks"][0])],
        "metadata": {"kind": "compute#metadata", "fingerprint": "0g5L6fMbFbQ=", **body["metadata"]},
        "serviceAccounts": body["serviceAccounts"],
        "selfLink": f"{HERE}/zones/{zone}/instances/{name}",
        "scheduling": body["scheduling"],
        "labels": body["labels"],
        "labelFingerprint": "42WmSpB8rSM=",
    }


def operation(zone: str, kind: str, target: Json) -> Json:
    """Return a running operation. :param zone: `""`: it is of no zone."""
    name = f"operation-{secrets.token_hex(12)}"
    here = f"{HERE}/zones/{zone}" if zone else f"{HERE}/global"
    return {
        "kind": "compute#operation",
        "id": number(),
        "name": name,
        **({"zone": here} if zone else {}),
        "operationType": kind,
        "targetLink": target["selfLink"],
        "targetId": target["id"],
        "status": "RUNNING",
        "user": f"node@{PROJECT}.iam.gserviceaccount.com",
        "progress": 0,
        "insertTime": now(),
        "startTime": now(),
        "selfLink": f"{here}/operations/{name}",
    }
