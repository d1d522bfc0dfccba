# SPDX-License-Identifier: Apache-2.0
"""The body of a request for an instance (source: Compute Engine API, "Method: instances.insert")."""

from __future__ import annotations

from collections.abc import Mapping

from infranetes.providers.annotations import Wishes
from infranetes.providers.cloud.gcp.names import image_path, labels, name_of, region_of
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.interface import LaunchRequest
from infranetes.providers.confidential import Confidential

IDENTITY = "infranetes-identity"  # the attribute where the agent finds its identity
USER_DATA = "user-data"  # where cloud-init looks
# A pod may do what its account's roles allow: the scope restricts nothing.
_PODS_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


def instance(
    settings: Settings, request: LaunchRequest, address: str, gpus: int, gib: int
) -> Mapping[str, object]:
    """Return the body.

    :param address: the reserved address for it, or "". :param gpus: how many its machine type has.
    :param gib: the size of its disk; 0: as the image says."""
    zone, wishes = request.zone, request.wishes
    account = wishes.instance_profile or settings.service_account
    tags = list(wishes.security_groups or settings.tags)
    key = USER_DATA if request.agentless else IDENTITY
    return {
        **_shielded(settings),
        **_confidential(wishes.confidential),
        "name": name_of(request.token, request.number),
        "machineType": f"zones/{zone}/machineTypes/{request.size}",
        "labels": labels(request.tags),
        "disks": [_disk(settings, request, gib)],
        "networkInterfaces": [_interface(settings, request, address)],
        "scheduling": _scheduling(wishes, gpus),
        "serviceAccounts": [{"email": account, "scopes": [_PODS_SCOPE]}] if account else [],
        "tags": {"items": tags},
        "metadata": {
            "items": [
                *([{"key": key, "value": request.identity.decode()}] if request.identity else []),
                {"key": "block-project-ssh-keys", "value": "TRUE"},
            ]
        },
    }


def _shielded(settings: Settings) -> Mapping[str, object]:
    """Return the Shielded VM options, or nothing for Google's defaults: not every image boots by UEFI."""
    wanted = {
        "enableSecureBoot": settings.secure_boot,
        "enableVtpm": settings.vtpm,
        "enableIntegrityMonitoring": settings.integrity_monitoring,
    }
    usual = {"enableSecureBoot": False, "enableVtpm": True, "enableIntegrityMonitoring": True}
    return {"shieldedInstanceConfig": wanted} if wanted != usual else {}


def _confidential(technology: Confidential | None) -> Mapping[str, object]:
    """Return the options of a confidential VM (source: Confidential VM, "Create an instance"): SEV-SNP is had
    of one platform of a family that has two."""
    if technology is None:
        return {}
    kind = technology.value.upper().replace("-", "_")
    platform = {"minCpuPlatform": "AMD Milan"} if technology is Confidential.SEV_SNP else {}
    return {
        **platform,
        "confidentialInstanceConfig": {"enableConfidentialCompute": True, "confidentialInstanceType": kind},
    }


def _disk(settings: Settings, request: LaunchRequest, gib: int) -> Mapping[str, object]:
    """Return the boot disk, which is deleted with the VM."""
    source = image_path(request.image or settings.image, settings.project)
    parameters: dict[str, object] = {
        "sourceImage": source,
        "diskType": f"zones/{request.zone}/diskTypes/{settings.disk_type}",
        "labels": labels(request.tags),
    }
    if gib:
        parameters["diskSizeGb"] = str(gib)
    key = {"diskEncryptionKey": {"kmsKeyName": settings.disk_key}} if settings.disk_key else {}
    return {
        **key,
        "boot": True,
        "autoDelete": True,
        "type": "PERSISTENT",
        "mode": "READ_WRITE",
        "initializeParams": parameters,
    }


def _interface(settings: Settings, request: LaunchRequest, address: str) -> Mapping[str, object]:
    wishes, region = request.wishes, region_of(request.zone)
    interface: dict[str, object] = {}
    network, subnetwork = settings.network, wishes.subnet or settings.subnetwork
    if network:
        interface["network"] = network if "/" in network else f"global/networks/{network}"
    if subnetwork:
        interface["subnetwork"] = (
            subnetwork if "/" in subnetwork else f"regions/{region}/subnetworks/{subnetwork}"
        )
    if not interface:
        interface["network"] = "global/networks/default"
    public = settings.public_address if wishes.public_address is None else wishes.public_address
    if public or wishes.elastic_address:
        access = {"type": "ONE_TO_ONE_NAT", "name": "External NAT"}
        interface["accessConfigs"] = [{**access, "natIP": address} if address else access]
    return interface


def _scheduling(wishes: Wishes, gpus: int) -> Mapping[str, object]:
    """Never restart a VM that has ended, as Kubernetes replaces the pod. Stop a preempted spot VM rather than
    delete it, so that its end can be seen. Spot VMs, GPUs and encrypted memory can't move to other hosts."""
    fixed = wishes.spot or gpus or wishes.confidential
    scheduling: dict[str, object] = {
        "automaticRestart": False,
        "onHostMaintenance": "TERMINATE" if fixed else "MIGRATE",
    }
    if wishes.spot:
        scheduling.update(provisioningModel="SPOT", instanceTerminationAction="STOP")
    return scheduling
