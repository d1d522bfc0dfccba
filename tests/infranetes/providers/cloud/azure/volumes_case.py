# SPDX-License-Identifier: Apache-2.0
"""Base class for tests of volumes on a simulated Azure."""

from __future__ import annotations

from typing import Any

from infranetes.providers.cloud.azure.driver import Driver
from infranetes.providers.cloud.volumes.disks import VOLUME
from tests.infranetes.providers.cloud.case import AzureCase
from tests.infranetes.providers.cloud.volumes_case import CloudVolumesCase
from tests.support.clouds.azure_disks import Disks

GIB = 1 << 30


class AzureVolumesCase(AzureCase, CloudVolumesCase[Driver]):
    """Volumes on Azure.

    :cvar operation_seconds: how long a change of a disk takes. :cvar lag_seconds: how late lists are."""

    operation_seconds = 0.02
    lag_seconds = 0.0

    def setUp(self) -> object:
        result = super().setUp()
        self.world.operation_seconds = self.operation_seconds
        self.world.lag_seconds = self.lag_seconds
        return result

    @property
    def azure(self) -> Disks:
        return self.world.arm.disks

    def disks(self) -> dict[str, Any]:
        """Return the disks of volumes, by their ids."""
        found = self.world.arm.of["disks"]
        return {name: disk for name, disk in found.items() if VOLUME in disk["tags"]}

    def taken(self) -> dict[str, Any]:
        """Return the snapshots, by their ids."""
        return self.world.arm.of["snapshots"]

    def listed(self, machine: str) -> dict[str, Any]:
        """Return a VM's entries of disks, by volumes' ids."""
        vm = self.world.arm.of["virtualMachines"].get(machine)
        entries = vm["properties"]["storageProfile"].get("dataDisks", ()) if vm is not None else ()
        return {each["name"]: each for each in entries}

    def has(self, machine: str, volume: str) -> bool:
        holder = self.world.arm.of["disks"][volume].get("managedBy", "")
        return bool(holder.rpartition("/")[2] == machine) and volume in self.listed(machine)

    def asked(self, action: str) -> list[dict[str, str]]:
        return [one for one in self.world.requests if one["Action"] == action]

    def leftovers(self) -> list[str]:
        """Return what VMs have left. Volumes and snapshots outlive them; volumes may still be attached to VMs
        that are going."""
        vms = self.world.arm.of["virtualMachines"]
        for name, disk in self.disks().items():
            holder = disk.get("managedBy", "").rpartition("/")[2]
            self.assertTrue(holder not in vms or holder in self.world.arm.going(), (name, holder))
            del self.world.arm.of["disks"][name]
        self.taken().clear()
        self.assertEqual(self.azure.missing, [])
        return super().leftovers()
