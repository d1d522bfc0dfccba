# SPDX-License-Identifier: Apache-2.0
"""The privileges that vCenter requires for each request (sources: vSphere Web Services API reference,
"Required privileges" of each method; vSphere Security, "Required Privileges for Common Tasks", which requires
more when a VM is deployed from a template), and those that the role in the manual grants."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

ROLE = Path(__file__).resolve().parents[3] / "docs" / "provider-vsphere-privileges.txt"
REST = frozenset({"VApp.Import"})  # for what is deployed from a content library

_FREE = frozenset(
    {
        "CancelTask",  # of a task that one has begun
        "ContinueRetrievePropertiesEx",
        "Fetch",
        "FindByInventoryPath",
        "FindChild",
        "Login",
        "Logout",
        "QueryEvents",
        "RetrievePropertiesEx",
        "RetrieveServiceContent",
    }
)
_FILES = {"Datastore.FileManagement"}
_CLONE = {
    "VirtualMachine.Provisioning.DeployTemplate",
    "VirtualMachine.Inventory.CreateFromExisting",
    "VirtualMachine.Config.AddNewDisk",  # in the folder, for the clone's disks
    "Resource.AssignVMToPool",
    "Datastore.AllocateSpace",
    "Network.Assign",
}
_CHANGES = {
    "extraConfig": {"VirtualMachine.Config.AdvancedConfig", "VirtualMachine.Config.Settings"},
    "annotation": {"VirtualMachine.Config.Annotation"},
    "numCPUs": {"VirtualMachine.Config.CPUCount"},
    "memoryMB": {"VirtualMachine.Config.Memory"},
}
_DEVICES = {
    "add": {"VirtualMachine.Config.AddRemoveDevice"},
    "edit": {"VirtualMachine.Config.EditDevice"},
}
_METHODS = {
    "AttachDisk_Task": {"VirtualMachine.Config.AddExistingDisk"},
    "CloneVM_Task": _CLONE,
    "CreateDiskFromSnapshot_Task": _FILES,
    "CreateSnapshot_Task": {"VirtualMachine.State.CreateSnapshot"},
    "CreateVirtualDisk_Task": _FILES,
    "DeleteDatastoreFile_Task": _FILES,
    "DeleteVStorageObject_Task": _FILES,
    "DeleteSnapshot_Task": _FILES,
    "Destroy_Task": {"VirtualMachine.Inventory.Delete"},
    "DetachDisk_Task": {"VirtualMachine.Config.RemoveDisk"},
    "ExtendDisk_Task": _FILES,
    "ListVStorageObject": _FILES,
    "MakeDirectory": _FILES,
    "MarkAsTemplate": {"VirtualMachine.Provisioning.MarkAsTemplate"},
    "PowerOffVM_Task": {"VirtualMachine.Interact.PowerOff"},
    "PowerOnVM_Task": {"VirtualMachine.Interact.PowerOn"},
    "ReconfigVM_Task": set(),
    "RegisterDisk": _FILES,
    "Rename_Task": {"VirtualMachine.Config.Rename"},
    "RenameVStorageObject": _FILES,
    "RetrieveSnapshotInfo": _FILES,
    "SearchDatastore_Task": {"Datastore.Browse"},
    "ShutdownGuest": {"VirtualMachine.Interact.PowerOff"},
    "RetrieveVStorageObject": _FILES,
    "RetrieveVStorageObjectState": _FILES,
    "SetVStorageObjectControlFlags": _FILES,
    "VStorageObjectCreateSnapshot_Task": _FILES,
}
_OPERATION = re.compile(r"<operation[^>]*>(add|edit)</operation>")


@lru_cache
def granted() -> frozenset[str]:
    """Return the privileges of the role in the manual."""
    lines = ROLE.read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def known() -> frozenset[str]:
    """Return all privileges that requests need."""
    each = (*_METHODS.values(), *_CHANGES.values(), *_DEVICES.values())
    return REST.union(*each)


def needed(action: str, body: str) -> set[str]:
    """Return the privileges that a request needs; for one that must not be made, one that no role grants."""
    if action in _FREE:
        return set()
    if action not in _METHODS:
        return {f"nobody may ask for {action}"}
    found = set(_METHODS[action])
    if "<powerOn>true</powerOn>" in body:
        found.add("VirtualMachine.Interact.PowerOn")
    if action in ("CloneVM_Task", "ReconfigVM_Task"):
        for field, privileges in _CHANGES.items():
            if f"<{field}" in body:
                found |= privileges
        for operation in _OPERATION.findall(body):
            found |= _DEVICES[operation]
    return found


def missing(action: str, body: str) -> str:
    """Return a privilege that a request needs and the role lacks; "": it has all."""
    return min(needed(action, body) - granted(), default="")
