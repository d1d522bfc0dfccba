# SPDX-License-Identifier: Apache-2.0
"""The bodies of requests for a VM, its network interface, and its public address.

Source: Azure REST API, "Virtual Machines - Create Or Update", "Network Interfaces - Create Or Update",
"Public IP Addresses - Create Or Update". What belongs to a VM is deleted with it (`deleteOption`).

A VM's own request could make its interface, too. But Azure then chooses the interface's name, and nobody
could tell whose it is if the VM is refused; here it has the VM's name and tags, and is there once however
often it is asked for.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from infranetes.providers.cloud.azure.names import Group
from infranetes.providers.cloud.azure.settings import Settings
from infranetes.providers.cloud.interface import CloudError, ErrorKind, LaunchRequest

_MAX_USER_DATA = 65536  # characters of base64
USER_DATA_BYTES = _MAX_USER_DATA // 4 * 3
_ANY_PRICE = -1.0


def public_address(settings: Settings, request: LaunchRequest) -> Mapping[str, object]:
    """Return the body for a public address of the VM's own."""
    return {
        "location": settings.location,
        "tags": dict(request.tags),
        "sku": {"name": "Standard"},
        "properties": {
            "publicIPAllocationMethod": "Static",
            "publicIPAddressVersion": "IPv4",
            "deleteOption": "Delete",
        },
    }


def nic(
    settings: Settings, group: Group, request: LaunchRequest, address: str, is_kept: bool
) -> Mapping[str, object]:
    """Return the body for the network interface.

    :param address: the id of its public address, or "". :param is_kept: whether that outlives the VM."""
    wishes = request.wishes
    groups = wishes.security_groups or settings.application_security_groups
    configuration: dict[str, object] = {
        "primary": True,
        "privateIPAllocationMethod": "Dynamic",
        "privateIPAddressVersion": "IPv4",
        "subnet": {"id": group.subnet(wishes.subnet or settings.subnet)},
    }
    if groups:
        configuration["applicationSecurityGroups"] = [
            {"id": group.named("Microsoft.Network/applicationSecurityGroups", each)} for each in groups
        ]
    if address:
        option = "Detach" if is_kept else "Delete"
        configuration["publicIPAddress"] = {"id": address, "properties": {"deleteOption": option}}
    properties: dict[str, object] = {"ipConfigurations": [{"name": "pod", "properties": configuration}]}
    if settings.security_group:
        firewall = group.named("Microsoft.Network/networkSecurityGroups", settings.security_group)
        properties["networkSecurityGroup"] = {"id": firewall}
    return {"location": settings.location, "tags": dict(request.tags), "properties": properties}


def vm(settings: Settings, group: Group, request: LaunchRequest, name: str) -> Mapping[str, object]:
    """Return the body for the VM. It has no `osProfile`: a specialized image takes none, and Azure waits for
    no report of its own agent then.

    :raise CloudError: the identity is too long."""
    nic = group.resource("Microsoft.Network/networkInterfaces", name)
    properties: dict[str, object] = {
        "hardwareProfile": {"vmSize": request.size},
        "storageProfile": {
            "imageReference": {"id": group.image(request.image or settings.image)},
            "osDisk": _disk(settings, request, name),
        },
        "networkProfile": {
            "networkInterfaces": [{"id": nic, "properties": {"primary": True, "deleteOption": "Delete"}}]
        },
        **({"userData": user_data(request.identity)} if request.identity else {}),
        "diagnosticsProfile": {"bootDiagnostics": {"enabled": True}},
        **_priority(request),
        **_security(request),
    }
    body: dict[str, object] = {
        "location": settings.location,
        "tags": dict(request.tags),
        "properties": properties,
    }
    if request.zone:
        body["zones"] = [request.zone.rpartition("-")[2]]
    identity = request.wishes.instance_profile or settings.pod_identity
    if identity:
        id = group.named("Microsoft.ManagedIdentity/userAssignedIdentities", identity)
        body["identity"] = {"type": "UserAssigned", "userAssignedIdentities": {id: {}}}
    return body


def _disk(settings: Settings, request: LaunchRequest, name: str) -> Mapping[str, object]:
    """Return the boot disk. Azure gives it the VM's tags."""
    managed: dict[str, object] = {"storageAccountType": settings.disk_type}
    if request.wishes.confidential is not None:
        managed["securityProfile"] = {"securityEncryptionType": "VMGuestStateOnly"}
    disk: dict[str, object] = {
        "name": name,
        "createOption": "FromImage",
        "deleteOption": "Delete",
        "caching": "ReadWrite",
        "managedDisk": managed,
    }
    if settings.disk_gib and not request.image:
        disk["diskSizeGB"] = settings.disk_gib
    return disk


def _priority(request: LaunchRequest) -> Mapping[str, object]:
    """Return the options of a spot VM: if it is evicted it is stopped, not deleted, so that its end can be
    seen."""
    if not request.wishes.spot:
        return {}
    price = request.wishes.spot_max_price
    return {
        "priority": "Spot",
        "evictionPolicy": "Deallocate",
        "billingProfile": {"maxPrice": _ANY_PRICE if price is None else price},
    }


def _security(request: LaunchRequest) -> Mapping[str, object]:
    """Return the options of a confidential VM. By which technology, its size says. Without Secure Boot its
    own disk could be anything that the host puts there."""
    if request.wishes.confidential is None:
        return {}
    return {
        "securityProfile": {
            "securityType": "ConfidentialVM",
            "uefiSettings": {"secureBootEnabled": True, "vTpmEnabled": True},
        }
    }


def user_data(identity: bytes) -> str:
    """Return user-data as Azure takes it. :raise CloudError: it is too long."""
    text = base64.b64encode(identity).decode()
    if len(text) > _MAX_USER_DATA:
        raise CloudError(
            ErrorKind.INVALID,
            f"the VM's user-data is longer than the {_MAX_USER_DATA} bytes that Azure takes",
        )
    return text
