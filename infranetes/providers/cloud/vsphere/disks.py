# SPDX-License-Identifier: Apache-2.0
"""Volumes as first class disks: vCenter's own disks that belong to no VM, of 6.7 and newer.

Plain files would do, but vCenter deletes all files of a VM together with it, whoever deletes the VM. It keeps
the file of a first class disk, if it is told to. The names of first class disks are not idempotency keys, and
requests have none before vSphere 9.1. A file's path is one: vCenter creates no second file there, and makes
no second disk of it. So a volume is made in steps, each of which may be made twice:

file     first class disk   kept   what `_thd_create` does
none     no                 no     creates the file, where the volume's name and the cluster's say
there    no                 no     registers it as a first class disk
there    yes                no     has vCenter keep it when a VM is deleted
there    yes                yes    is done

A volume that is made from a snapshot has no file of its own choice: see `copies`.

A volume is ours by its name, which begins with the cluster's: its file may be moved, and on some datastores
vCenter itself calls the folder something else. While it has snapshots it is neither enlarged nor deleted.

vSphere can't attach a disk for reading only. It refuses to attach one that another VM has.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

from pyVmomi import vim, vmodl

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.volumes.disks import CloudDisk, DiskRequest, DiskState, Hold
from infranetes.providers.cloud.vsphere.copies import Copies, Copying
from infranetes.providers.cloud.vsphere.disk_names import DiskNames, is_disk_id
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.errors import message_of
from infranetes.providers.cloud.vsphere.hardware import (
    DEVICES,
    EXTRA,
    AttachedDisk,
    Hardware,
    hardware,
)
from infranetes.providers.cloud.vsphere.inventory import VCenterInventory
from infranetes.providers.cloud.vsphere.launches import _thd_wait_briefly
from infranetes.providers.cloud.vsphere.pyvmomi_types import Node, OptionValue
from infranetes.providers.cloud.vsphere.specs import DISK_UUIDS
from infranetes.providers.cloud.vsphere.storage import MIB, FirstClassDisk, Place, disk_id
from infranetes.providers.cloud.vsphere.vms import VMs
from infranetes.providers.volumes import FromSnapshot

_REFUSED = (vim.fault.InvalidState, vim.fault.ResourceInUse, vim.fault.FileLocked)


class VsphereDisks:
    """The first class disks of one datastore, and the VMs of this node that have them. See `CloudDisks`.

    :ivar disk_names: what they are called."""

    unit = MIB
    max_size = 62 << 40
    at_once = 20  # few, as vSphere 6.7 has no request for several disks
    has_modes = False
    in_turns = False
    zone = ""

    def __init__(self, inventory: VCenterInventory, vms: VMs, cluster: str) -> None:
        self._inventory = inventory
        self._vms = vms
        self.disk_names = DiskNames(cluster)
        self._copies = Copies(self.disk_names)
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}  # by id: the name at vCenter of each disk of the datastore

    def is_id(self, text: str) -> bool:
        return is_disk_id(text)

    def _thd_free(self, driver: Driver) -> int:
        datastore = self._thd_place(driver).datastore
        return driver.datastore_properties(datastore, "summary.freeSpace")["summary.freeSpace"]

    # ---- Finding

    def _thd_place(self, driver: Driver) -> Place:
        return self._inventory._thd_place(driver, self.disk_names.folder)

    def _thd_find(self, driver: Driver, names: Sequence[str]) -> list[CloudDisk]:
        """Find the disks that vCenter was told to keep; `_thd_create` makes it keep the others."""
        place = self._thd_place(driver)
        asked = {key: name for name in names for key in self.disk_names.keys(name)}
        key = self.disk_names.key
        ids = [id for id, name in self._thd_names(driver, place).items() if key(name) in asked]
        found = [disk for disk in _thd_existing(driver, place, ids) if disk.kept]
        return self._thd_shown(driver, found, asked)

    def _thd_get(self, driver: Driver, ids: Sequence[str]) -> list[CloudDisk]:
        return self._thd_shown(driver, _thd_existing(driver, self._thd_place(driver), ids), {})

    def _thd_list(self, driver: Driver) -> list[CloudDisk]:
        place = self._thd_place(driver)
        is_ours = self.disk_names.is_ours
        ours = [id for id, name in self._thd_names(driver, place).items() if is_ours(name)]
        return self._thd_shown(driver, _thd_existing(driver, place, ours), {})

    def _thd_names(self, driver: Driver, place: Place) -> Mapping[str, str]:
        """Return the names of all first class disks of the datastore by their ids. Only what is new, or will
        have another name, is asked for, one by one, as vSphere 6.7 has no other call."""
        ids = driver.storage.ids(place)
        with self._lock:
            known = {id: self._names[id] for id in ids if id in self._names}
        for id in ids:
            if id not in known and (disk := driver.storage.get(place, id)) is not None:
                known[id] = disk.name
                self._remember(disk)
        with self._lock:
            self._names = {id: self._names[id] for id in known if id in self._names}
        return known

    def _remember(self, disk: FirstClassDisk) -> None:
        if not self.disk_names.is_unfinished(disk.name):
            with self._lock:
                self._names[disk.id] = disk.name

    def _thd_shown(
        self, driver: Driver, found: Sequence[FirstClassDisk], asked: Mapping[str, str]
    ) -> list[CloudDisk]:
        """Return disks with the VMs that have them.

        :param asked: names of volumes by the keys of their names at vCenter."""
        holders = self._thd_holders(driver) if found else {}
        return [self._shown(disk, holders.get(disk.id), asked) for disk in found]

    def _shown(
        self, disk: FirstClassDisk, holder: tuple[str, str] | None, asked: Mapping[str, str]
    ) -> CloudDisk:
        vm, serial = holder or ("", "")
        # Another node's VM is not in our folder, so it is shown by vCenter's own id.
        users = [vm] if vm else [f"{user} of another node" for user in disk.users]
        unfinished = self.disk_names.is_unfinished(disk.name)
        return CloudDisk(
            id=disk.id,
            size=disk.size,
            state=DiskState.CREATING if unfinished else DiskState.READY,
            serial=serial,
            ours=self.disk_names.is_ours(disk.name),
            name=asked.get(self.disk_names.key(disk.name), ""),
            source=self.disk_names.source(disk.name),
            holds=tuple(Hold(user) for user in users),
        )

    def _thd_holders(self, driver: Driver) -> dict[str, tuple[str, str]]:
        """Return each attached disk's VM and serial number, by the disk's id."""
        folder = self._inventory._thd_folder(driver)
        names = {node.id: name for name, node in self._vms._thd_ours(driver, folder).items()}
        return {
            disk.id: (names[vm._moId], disk.serial)
            for vm, properties in driver.children(folder, DEVICES)
            if vm._moId in names
            for disk in hardware(properties.get(DEVICES) or ()).disks
        }

    # ---- Making and destroying

    def _thd_create(self, driver: Driver, request: DiskRequest) -> tuple[CloudDisk, str]:
        """Take the next step to a disk. The request's number is not needed: once a disk is gone, its file's
        path is free."""
        place, name = self._thd_place(driver), self.disk_names.of(request.name)
        if isinstance(request.source, FromSnapshot):
            return self._thd_copy(driver, place, request, request.source)
        self._thd_check_room(driver, place, request.size)
        self._thd_create_file(driver, place, f"{name}.vmdk", request.size)
        disk = self._thd_registered(driver, place, name)
        if not disk.kept:
            driver.storage.keep(place, disk.id)
        return self._shown(disk, None, {name: request.name}), ""

    def _thd_check_room(self, driver: Driver, place: Place, size: int) -> None:
        """Check that a disk of this size can be made now. :raise CloudError: it can't."""
        if size > (room := self._thd_free(driver)):
            raise CloudError(ErrorKind.CAPACITY, f"datastore {place.name} has {room // MIB} MiB left")

    def _thd_copy(
        self, driver: Driver, place: Place, request: DiskRequest, source: FromSnapshot
    ) -> tuple[CloudDisk, str]:
        whole = self.disk_names.copy_of(request.name, source)
        if (made := self._thd_called(driver, place, whole)) is not None:
            return self._shown(made, None, {self.disk_names.key(whole): request.name}), ""
        there = self._thd_unfinished(driver, place)
        check_room = partial(self._thd_check_room, driver, place, request.size)
        with refusals():
            step = self._copies._thd_make(driver, place, request, source, there, check_room)
        if not isinstance(step, Copying):
            self._remember(step)
            return self._shown(step, None, {self.disk_names.key(whole): request.name}), ""
        if step.disk is not None:
            return self._shown(step.disk, None, {}), step.task
        return CloudDisk("", request.size, DiskState.CREATING), step.task

    def _thd_unfinished(self, driver: Driver, place: Place) -> list[FirstClassDisk]:
        """Return all disks of the cluster that are still being made from snapshots."""
        names = self._thd_names(driver, place)
        return _thd_existing(
            driver, place, [id for id, name in names.items() if self.disk_names.is_unfinished(name)]
        )

    def _thd_create_file(self, driver: Driver, place: Place, file: str, size: int) -> None:
        for has_folder in (False, True):
            task = driver.storage.create_file(place, file, size)
            ended, fault = _thd_wait_briefly(driver, task._moId, patient=True)
            if not ended:
                raise CloudError(ErrorKind.TRANSIENT, f"{place.path(file)} is still being created")
            if fault is None or fault.kind is ErrorKind.CONFLICT:
                return
            if has_folder or fault.kind is not ErrorKind.NOT_FOUND:
                raise fault
            _thd_make_folder(driver, place)

    def _thd_registered(self, driver: Driver, place: Place, name: str) -> FirstClassDisk:
        """Make a first class disk of a file, unless it is one."""
        disk = driver.storage.register(place, f"{name}.vmdk", name)
        if disk is not None:
            self._remember(disk)
            return disk
        disk = self._thd_called(driver, place, name)
        if disk is None:
            raise CloudError(ErrorKind.TRANSIENT, f"the disk of {place.path(name)}.vmdk is not shown yet")
        return disk

    def _thd_called(self, driver: Driver, place: Place, name: str) -> FirstClassDisk | None:
        """Return the disk of that name at vCenter; None: there is none."""
        ids = [id for id, each in self._thd_names(driver, place).items() if each == name]
        return next(iter(_thd_existing(driver, place, ids)), None)

    def _thd_delete(self, driver: Driver, disk: CloudDisk) -> str:
        place = self._thd_place(driver)
        _thd_check_no_snapshots(driver, place, disk)
        if disk.source is not None and (known := driver.storage.get(place, disk.id)) is not None:
            self._copies._thd_delete_twins(driver, place, known.name, self._thd_unfinished(driver, place))
        with refusals():
            task = driver.storage.delete(place, disk.id)
        return task._moId if task is not None else ""

    def _thd_grow(self, driver: Driver, disk: CloudDisk, size: int) -> str:
        """Enlarge a disk, which vCenters before 7.0 U2 refuse while a VM has it."""
        place = self._thd_place(driver)
        _thd_check_no_snapshots(driver, place, disk)
        with refusals():
            return driver.storage.extend(place, disk.id, size)._moId

    # ---- Attaching and detaching

    def _thd_attach(self, driver: Driver, disk: CloudDisk, vm_id: str, read_only: bool) -> str:
        place = self._thd_place(driver)
        node = self._thd_vm(driver, vm_id)
        if node is None:
            raise CloudError(ErrorKind.NOT_FOUND, f"there is no VM {vm_id}")
        if vm_id in self._vms.ends:
            raise CloudError(ErrorKind.STATE, f"VM {vm_id} is being destroyed")
        known = driver.storage.get(place, disk.id)
        if known is not None and not known.kept:  # a person made it, or it was half made
            driver.storage.keep(place, disk.id)
        controller = self._thd_controller(driver, node)
        with refusals():
            vm = driver.vm(node.id)
            return vm.AttachDisk_Task(disk_id(disk.id), place.datastore, controller)._moId

    def _thd_controller(self, driver: Driver, node: Node) -> int:
        """Return the key of a controller with room for a disk; add one if there is none.

        :raise CloudError: the guest could not find the disk, or there is no place for it."""
        [(_, properties)] = driver.vm_properties([driver.vm(node.id)], DEVICES, EXTRA)
        _check_guest_finds_disks(node, properties.get(EXTRA) or ())
        found = hardware(properties.get(DEVICES) or ())
        key = found.controller()
        if key is None:
            task = driver.vm(node.id).ReconfigVM_Task(found.one_more_controller())
            ended, fault = _thd_wait_briefly(driver, task._moId, patient=True)
            if fault is not None:
                raise fault
            key = _thd_hardware(driver, node).controller() if ended else None
        if key is None:
            raise CloudError(ErrorKind.TRANSIENT, "a SCSI controller is still being added")
        return key

    def _thd_detach(self, driver: Driver, disk: CloudDisk, vm_id: str, force: bool) -> str:
        node = self._thd_vm(driver, vm_id)
        if node is None or disk.id not in [each.id for each in _thd_attached(driver, node)]:
            return ""
        with refusals():
            return driver.vm(node.id).DetachDisk_Task(disk_id(disk.id))._moId

    def _thd_vm(self, driver: Driver, vm_id: str) -> Node | None:
        if not self._vms.is_name(vm_id):
            return None
        return self._vms._thd_get(driver, self._inventory._thd_folder(driver), vm_id)

    def _thd_is_done(self, driver: Driver, operation: str) -> bool:
        ended, fault = driver.ex_tasks([operation]).get(operation, (True, None))
        if fault is not None and not isinstance(fault, vim.fault.NotFound):
            with refusals():
                raise fault
        return ended


def _thd_check_no_snapshots(driver: Driver, place: Place, disk: CloudDisk) -> None:
    """Check that a disk has no snapshots: they would end with it, and vCenter does not enlarge such a disk.

    :raise CloudError: it has some."""
    if found := driver.storage.snapshots(place, disk.id):
        raise CloudError(
            ErrorKind.INVALID,
            f"it has {len(found)} snapshots, and at a vCenter these are a part of it: delete them first",
        )


def _thd_make_folder(driver: Driver, place: Place) -> None:
    try:
        driver.storage.make_folder(place)
    except vim.fault.CannotCreateFile as fault:
        raise CloudError(
            ErrorKind.INVALID,
            f"the folder {place.path()} can't be made ({message_of(fault)}): on vSAN and vVols, make it with "
            "govc datastore.mkdir -namespace",
        ) from None


def _thd_existing(driver: Driver, place: Place, ids: Sequence[str]) -> list[FirstClassDisk]:
    """Return those of these disks that exist."""
    return [disk for id in ids if (disk := driver.storage.get(place, id)) is not None]


def _check_guest_finds_disks(node: Node, extra: Sequence[OptionValue]) -> None:
    """Check that a VM's guest sees the UUIDs of its disks. :raise CloudError: it does not: its settings were
    changed since it was cloned. They take effect only when it is powered on."""
    shown = {option.key: str(option.value).upper() for option in extra}
    if shown.get(DISK_UUIDS, "") not in ("TRUE", "1"):
        raise CloudError(
            ErrorKind.INVALID,
            f"VM {node.name} was not cloned with {DISK_UUIDS} = TRUE, so its guest can't tell volumes apart: "
            "recreate its pod, which then gets another VM",
        )


def _thd_hardware(driver: Driver, node: Node) -> Hardware:
    [(_, properties)] = driver.vm_properties([driver.vm(node.id)], DEVICES)
    return hardware(properties.get(DEVICES) or ())


def _thd_attached(driver: Driver, node: Node) -> Sequence[AttachedDisk]:
    """Return the first class disks of a VM; of one that is gone: none."""
    try:
        return _thd_hardware(driver, node).disks
    except vmodl.fault.ManagedObjectNotFound:
        return ()


@contextmanager
def refusals() -> Iterator[None]:
    """Tell faults that are about a disk's or a VM's state."""
    try:
        yield
    except _REFUSED as fault:
        raise CloudError(ErrorKind.STATE, message_of(cast(Exception, fault))) from None
