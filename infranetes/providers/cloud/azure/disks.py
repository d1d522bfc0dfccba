# SPDX-License-Identifier: Apache-2.0
"""Azure's managed disks as `CloudDisks`.

A disk's name is made of the cluster's and the volume's names, so a repeated request finds the disk of the
first.

provisioningState of a disk      DiskState
Creating, Updating               CREATING
Succeeded                        READY
Failed                           READY if a VM has ever had it: a change of it has failed. FAILED otherwise
Deleting                         DELETING

A disk's `managedBy` names the VM that has it: from when it is attached, which the VM's list says before,
until it is detached. While something comes or goes the VM is `Updating`:

disk in the VM's list            VM          hold
listed                           Updating    ATTACHING, though it may be another disk that comes or goes
listed                           any other   ATTACHED
listed, `toBeDetached`           Updating    DETACHING
listed, `toBeDetached`           any other   ATTACHED: its guest or Azure has failed to release it
any                              Deleting    DETACHING
not listed, or there is no VM                DETACHING

Each change is one operation of Azure's, which is followed: it alone says why it has failed. A VM makes one
change at a time, and refuses others meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import attrs

from infranetes.providers.cloud.azure import errors
from infranetes.providers.cloud.azure.driver import DISK, SNAPSHOT, Driver
from infranetes.providers.cloud.azure.errors import AzureError
from infranetes.providers.cloud.azure.names import Group, hashed_name_of, is_name, kind_of, last
from infranetes.providers.cloud.azure.resources import DataDisk, Disk, Vm
from infranetes.providers.cloud.azure.settings import Settings
from infranetes.providers.cloud.azure.sizes import zone_name
from infranetes.providers.cloud.interface import CLUSTER, CloudError, ErrorKind
from infranetes.providers.cloud.volumes.disks import (
    VOLUME,
    CloudDisk,
    DiskRequest,
    DiskState,
    Hold,
    HoldState,
)
from infranetes.providers.volumes import FromSnapshot, FromVolume, VolumeSource
from infranetes_common.volume_disks import serial_at_lun

_STATES = {
    "Succeeded": DiskState.READY,
    "Deleting": DiskState.DELETING,
}
_UPDATING = "Updating"
_ZONE_REDUNDANT = "_ZRS"  # the end of such types' names
_FEW = 4  # disks, or VMs, that are looked at one by one
_MOST_GIB = 32767
_LUNS = 64


@attrs.frozen
class LookedAt(CloudDisk):
    """A disk as Azure shows it. :ivar shared: whether Azure would give it to several VMs."""

    shared: bool = False


class AzureDisks:
    """See `CloudDisks`. Disks are made in the first of the configured zones, and found in the whole group."""

    unit = 1 << 30
    max_size = _MOST_GIB << 30
    at_once = 40  # of which each may be looked at by itself
    has_modes = False
    in_turns = True

    def __init__(self, settings: Settings, group: Group, cluster: str) -> None:
        self._settings = settings
        self._group = group
        self._cluster = cluster
        self._numbers = settings.zones[:1] if not settings.volume_type.endswith(_ZONE_REDUNDANT) else ()
        self.zone = self._zone_of(self._numbers)

    def is_id(self, text: str) -> bool:
        return is_name(text)

    def _zone_of(self, numbers: Sequence[str]) -> str:
        return zone_name(self._settings.location, numbers[0]) if numbers else ""

    # ---- Looking

    def _thd_find(self, driver: Driver, names: Sequence[str]) -> list[CloudDisk]:
        hashed = [hashed_name_of("volume", self._cluster, name) for name in names]
        if len(hashed) > _FEW:
            disks = [disk for disk in driver.disks() if disk["name"] in hashed]
        else:
            disks = _thd_each(driver, hashed)
        return self._thd_shown(driver, [disk for disk in disks if self._is_ours(disk)])

    def _thd_get(self, driver: Driver, ids: Sequence[str]) -> list[CloudDisk]:
        listed = {disk["name"]: disk for disk in driver.disks()} if len(ids) > _FEW else {}
        others = _thd_each(driver, [id for id in ids if id not in listed])  # lists are behind at times
        return self._thd_shown(driver, [*(listed[id] for id in ids if id in listed), *others])

    def _thd_list(self, driver: Driver) -> list[CloudDisk]:
        return self._thd_shown(driver, [disk for disk in driver.disks() if self._is_ours(disk)])

    def _is_ours(self, disk: Disk) -> bool:
        tags = disk.get("tags") or {}
        return tags.get(CLUSTER) == self._cluster and VOLUME in tags

    def _thd_shown(self, driver: Driver, disks: Sequence[Disk]) -> list[CloudDisk]:
        """Return disks as Azure describes them, which takes a look at the VMs that have them."""
        names = {self._vm_id(id) for disk in disks if self._group.holds(id := disk.get("managedBy") or "")}
        if len(names) > _FEW:
            vms = {vm["name"].lower(): vm for vm in driver.vms()}
        else:
            vms = {name: vm for name in names if (vm := driver.vm(name)) is not None}
        return [self._shown(disk, vms) for disk in disks]

    def _vm_id(self, id: str) -> str:
        """Return a VM's id as the provider has it; that of another group's VM is whole."""
        return last(id).lower() if self._group.holds(id) else id

    def _shown(self, disk: Disk, vms: Mapping[str, Vm]) -> CloudDisk:
        properties, tags, name = disk["properties"], disk.get("tags") or {}, disk["name"]
        holder = disk.get("managedBy") or ""
        attached: DataDisk | None = None
        holds: tuple[Hold, ...] = ()
        if self._group.holds(holder):
            vm = vms.get(self._vm_id(holder))
            attached = self._attached(vm, name) if vm is not None else None
            holds = (Hold(self._vm_id(holder), _hold_state(vm, attached)),)
        elif holder:
            holds = (Hold(holder),)
        return LookedAt(
            id=name,
            size=int(properties.get("diskSizeGB") or 0) << 30,
            state=_state(disk),
            serial=serial_at_lun(attached["lun"], name) if attached is not None else "",
            ours=self._is_ours(disk),
            name=tags[VOLUME] if self._is_ours(disk) else "",
            zone=self._zone_of(disk.get("zones") or ()),
            source=_source(disk),
            holds=holds,
            detail=f"its provisioningState is {properties.get('provisioningState', '')}",
            shared=int(properties.get("maxShares") or 1) > 1,
        )

    def _attached(self, vm: Vm, name: str) -> DataDisk | None:
        """Return a VM's entry of a disk; None: it has none."""
        resource_id = self._group.resource(DISK, name).lower()
        disks = (
            disk
            for disk in _data_disks(vm)
            if resource_id == (disk.get("managedDisk") or {}).get("id", "").lower()
        )
        return next(disks, None)

    # ---- Changing

    def _thd_create(self, driver: Driver, request: DiskRequest) -> tuple[CloudDisk, str]:
        """See `CloudDisks`. The request's number is not needed: a name is free once its disk is gone."""
        name = hashed_name_of("volume", request.cluster, request.name)
        kind, numbers, origin = self._thd_origin(driver, request.source)
        body: dict[str, object] = {
            "location": self._settings.location,
            "tags": {CLUSTER: request.cluster, VOLUME: request.name},
            "sku": {"name": kind},
            "properties": {"creationData": origin, "diskSizeGB": request.size >> 30},
        }
        if numbers:
            body["zones"] = list(numbers)
        with errors.disk_refusals():
            operation = driver.begin_create(DISK, name, body)
        return LookedAt(name, request.size, DiskState.CREATING, ours=True, name=request.name), operation

    def _thd_origin(
        self, driver: Driver, source: VolumeSource | None
    ) -> tuple[str, Sequence[str], Mapping[str, str]]:
        """Return the type of a disk with this source, its zones, and what its body says of the source.

        A clone is made in its source's zone, and with its type."""
        if source is None:
            return self._settings.volume_type, self._numbers, {"createOption": "Empty"}
        if isinstance(source, FromSnapshot):
            origin = {"createOption": "Copy", "sourceResourceId": self._group.resource(SNAPSHOT, source.id)}
            return self._settings.volume_type, self._numbers, origin
        disk = driver.disk(source.id)
        if disk is None:
            raise CloudError(ErrorKind.NOT_FOUND, f"there is no volume {source.id}")
        origin = {"createOption": "Copy", "sourceResourceId": self._group.resource(DISK, source.id)}
        return disk["sku"]["name"], disk.get("zones") or (), origin

    def _thd_delete(self, driver: Driver, disk: CloudDisk) -> str:
        """See `CloudDisks`. Azure deletes a disk that a VM is about to have, so VMs are asked first."""
        for vm in driver.vms():
            if self._attached(vm, disk.id) is not None:
                raise CloudError(ErrorKind.STATE, f"VM {vm['name']} has it, or is being given it")
        with errors.disk_refusals():
            return driver.begin_delete(DISK, disk.id)

    def _thd_grow(self, driver: Driver, disk: CloudDisk, size: int) -> str:
        with errors.disk_refusals():
            return driver.grow_disk(disk.id, size >> 30)

    def _thd_attach(self, driver: Driver, disk: CloudDisk, vm_id: str, read_only: bool) -> str:
        """Attach a disk for writing, even if `read_only` is asked for: Azure has no other mode."""
        if isinstance(disk, LookedAt) and disk.shared:
            raise CloudError(
                ErrorKind.INVALID,
                "its maxShares lets several VMs have it at once, which would write over each other's changes",
            )
        vm = driver.vm(vm_id)
        if vm is None:
            raise CloudError(ErrorKind.NOT_FOUND, f"there is no VM {vm_id}")
        zone = self._zone_of(vm.get("zones") or ())
        if disk.zone and disk.zone != zone:
            where = f"in {zone}" if zone else "in no zone"
            raise CloudError(
                ErrorKind.INVALID, f"volume {disk.id} is in zone {disk.zone}, and VM {vm_id} {where}"
            )
        if self._attached(vm, disk.id) is not None:
            self._thd_clear(driver, vm, disk.id)
            raise CloudError(ErrorKind.STATE, f"VM {vm_id} has it, or is being given it")
        lun = _free_lun(vm)
        with errors.disk_refusals():
            operation = driver.attach_disk(vm_id, disk.id, lun)
        return f"{operation} {vm_id} {disk.id}" if operation else ""

    def _thd_clear(self, driver: Driver, vm: Vm, name: str) -> None:
        """Take a disk from a VM's list if a request that has failed has left it there: Azure would try to
        attach it with the VM's next change."""
        is_changing = vm["properties"].get("provisioningState") == _UPDATING
        disk = None if is_changing else driver.disk(name)
        if disk is not None and self._vm_id(disk.get("managedBy") or "") != vm["name"].lower():
            with suppress(AzureError):
                driver.detach_disk(vm["name"], name, force=False)

    def _thd_detach(self, driver: Driver, disk: CloudDisk, vm_id: str, force: bool) -> str:
        """See `CloudDisks`. Azure's force is for a disk that it has failed to take before."""
        vm = driver.vm(vm_id)
        attached = self._attached(vm, disk.id) if vm is not None else None
        if attached is None:
            return ""
        try:
            with errors.disk_refusals():
                return driver.detach_disk(vm_id, disk.id, force and attached.get("toBeDetached", False))
        except CloudError as error:
            if error.kind is not ErrorKind.NOT_FOUND:
                raise
            return ""  # the VM is gone, and with it its hold

    def _thd_is_done(self, driver: Driver, operation: str) -> bool:
        path, *attached = operation.split()
        status = driver.operation(path)
        try:
            return status is None or errors.check_end(status)
        except CloudError:
            if attached:
                self._thd_take_back(driver, *attached)
            raise

    def _thd_take_back(self, driver: Driver, vm_id: str, name: str) -> None:
        vm = driver.vm(vm_id)
        if vm is not None and self._attached(vm, name) is not None:
            self._thd_clear(driver, vm, name)


def _thd_each(driver: Driver, names: Iterable[str]) -> list[Disk]:
    return [disk for name in names if (disk := driver.disk(name)) is not None]


def _state(disk: Disk) -> DiskState:
    properties = disk["properties"]
    state = properties.get("provisioningState", "")
    if state == "Failed":
        had_vm = disk.get("managedBy") or properties.get("LastOwnershipUpdateTime")
        return DiskState.READY if had_vm else DiskState.FAILED
    return _STATES.get(state, DiskState.CREATING)


def _hold_state(vm: Vm | None, attached: DataDisk | None) -> HoldState:
    """Return the state of the hold of a VM that Azure names as a disk's: see the table above."""
    state = vm["properties"].get("provisioningState") if vm is not None else None
    if state in (None, "Deleting") or attached is None:
        return HoldState.DETACHING
    if state != _UPDATING:
        return HoldState.ATTACHED
    return HoldState.DETACHING if attached.get("toBeDetached") else HoldState.ATTACHING


def _data_disks(vm: Vm) -> Sequence[DataDisk]:
    return (vm["properties"].get("storageProfile") or {}).get("dataDisks") or ()


def _free_lun(vm: Vm) -> int:
    """Return the least number that no disk of a VM has: Azure takes none that the VM's size has no place for.

    :raise CloudError: all are taken."""
    taken = {disk["lun"] for disk in _data_disks(vm)}
    free = next((lun for lun in range(_LUNS) if lun not in taken), None)
    if free is None:
        raise CloudError(ErrorKind.QUOTA, f"VM {vm['name']} has {len(taken)} volumes")
    return free


def _source(disk: Disk) -> VolumeSource | None:
    id = disk["properties"].get("creationData", {}).get("sourceResourceId") or ""
    if kind_of(id) == SNAPSHOT.lower():
        return FromSnapshot(last(id))
    return FromVolume(last(id)) if kind_of(id) == DISK.lower() else None
