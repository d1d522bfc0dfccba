# SPDX-License-Identifier: Apache-2.0
"""The parameters of a launch in addition to libcloud's own (source: EC2 API reference, "RunInstances")."""

from __future__ import annotations

from infranetes.providers.cloud.aws.addresses import tag_parameters
from infranetes.providers.cloud.aws.burstable import is_burstable
from infranetes.providers.cloud.aws.images import RootDisk
from infranetes.providers.cloud.aws.libcloud_types import BlockDevice
from infranetes.providers.cloud.aws.settings import Settings
from infranetes.providers.cloud.interface import CloudError, ErrorKind, LaunchRequest


def launch_parameters(settings: Settings, request: LaunchRequest) -> dict[str, str]:
    """Return the parameters for everything but the disk and the place."""
    wishes = request.wishes
    public = settings.public_address if wishes.public_address is None else wishes.public_address
    found = {
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions.HttpTokens": "required",  # against requests that pods are tricked into (SSRF)
        "MetadataOptions.HttpPutResponseHopLimit": "1",
        # Always stated: otherwise the subnet's own setting would decide, and an address might be billed.
        "NetworkInterface.1.AssociatePublicIpAddress": "true" if public else "false",
    }
    tagged = ["volume", "network-interface"]
    if is_burstable(request.size):
        found["CreditSpecification.CpuCredits"] = settings.burst
    if wishes.spot:
        tagged.append("spot-instances-request")
        found["InstanceMarketOptions.MarketType"] = "spot"
        if wishes.spot_max_price is not None:
            found["InstanceMarketOptions.SpotOptions.MaxPrice"] = str(wishes.spot_max_price)
    if wishes.confidential is not None:
        found["CpuOptions.AmdSevSnp"] = "enabled"
    for number, kind in enumerate(tagged, start=2):  # number 1 is libcloud's tags of the instance
        found |= tag_parameters(kind, request.tags, number)
    return found


def root_disk_mappings(settings: Settings, root: RootDisk) -> list[BlockDevice]:
    """Return the root disk, which must not outlive the VM, whatever its image says.

    :raise CloudError: the image has no root disk that can be made as configured."""
    disk = {
        "VolumeType": settings.disk_type,
        "Iops": str(settings.disk_iops or ""),
        "Throughput": str(settings.disk_throughput or ""),
        "Encrypted": "true" if settings.encrypt_disk or settings.disk_key else "",
        "KmsKeyId": settings.disk_key,
    }
    asked = {name: value for name, value in disk.items() if value}
    if root.name:
        size = str(max(root.gib, settings.disk_gib, 1))
        return [
            {"DeviceName": root.name, "Ebs": {"DeleteOnTermination": "true", "VolumeSize": size, **asked}}
        ]
    if asked:
        raise CloudError(
            ErrorKind.INVALID,
            "EC2 does not tell which disk of the image is its root, so disk_type, encrypt_disk and disk_key "
            "of providers.aws can't be given to it",
        )
    return []
