# SPDX-License-Identifier: Apache-2.0
"""Volumes as first class disks: vCenter's own disks that belong to no VM, of 6.7 and newer.

Plain files would do, but vCenter deletes every file of a VM with the VM, whoever deletes that. Of a first
class disk it keeps the file, if it is told so. The names of first class disks are no keys, and requests have
none before vSphere 9.1. A file's path is one: vCenter creates no second file there, and makes no second disk
of it. So a volume is made in steps, each of which may be made twice:

file     first class disk   kept   what `_thd_create` does
none     no                 no     creates the file, where the volume's name and the cluster's say
there    no                 no     registers it as a first class disk
there    yes                no     has vCenter keep it when a VM is deleted
there    yes                yes    is done

A volume is ours by its name, which begins with the cluster's: its file may be moved, and on some datastores
vCenter itself calls the folder something else.

vSphere can't attach a disk for reading only. It refuses to attach one that another VM has.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

from pyVmomi import vim, vmodl

from infranetes.providers.cloud.disks import CloudDisk, DiskRequest, DiskState, Hold
from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.errors import message_of
from infranetes.providers.cloud.vsphere.hardware import DEVICES, AttachedDisk, Hardware, hardware
from infranetes.providers.cloud.vsphere.inventory import VCenterInventory
from infranetes.providers.cloud.vsphere.launches import _thd_wait_briefly
from infranetes.providers.cloud.vsphere.pyvmomi_types import Node
from infranetes.providers.cloud.vsphere.storage import MIB, FirstClassDisk, Place, disk_id
from infranetes.providers.cloud.vsphere.vms import VMs

_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_REFUSED = (vim.fault.InvalidState, vim.fault.ResourceInUse, vim.fault.FileLocked)


class VsphereDisks:
    """The first class disks of one datastore, and the VMs of this node that have them. See `CloudDisks`."""

    unit = MIB
    max_size = 62 << 40
    has_modes = False
    zone = ""

    def __init__(self, inventory: VCenterInventory, vms: VMs, cluster: str) -> None:
        self._inventory = inventory
        self._vms = vms
        self._folder = f"infranetes-{hashlib.sha256(cluster.encode()).hexdigest()[:12]}"
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}  # at vCenter, of all disks of the datastore, by id

    def is_id(self, text: str) -> bool:
        return _ID.fullmatch(text) is not None

    def _thd_free(self, driver: Driver) -> int:
        datastore = self._thd_place(driver).datastore
        return driver.datastore_properties(datastore, "summary.freeSpace")["summary.freeSpace"]

    # ---- Finding

    def _thd_place(self, driver: Driver) -> Place:
        return self._inventory._thd_place(driver, self._folder)

    def _thd_find(self, driver: Driver, names: Sequence[str]) -> list[CloudDisk]:
        """Leave out those that vCenter was not told to keep: `_thd_create` tells it."""
        place = self._thd_place(driver)
        asked = {self._name(name): name for name in names}
        ids = [id for id, name in self._thd_names(driver, place).items() if name in asked]
        found = [disk for disk in _thd_existing(driver, place, ids) if disk.kept]
        return self._thd_shown(driver, found, asked)

    def _thd_get(self, driver: Driver, ids: Sequence[str]) -> list[CloudDisk]:
        return self._thd_shown(driver, _thd_existing(driver, self._thd_place(driver), ids), {})

    def _thd_list(self, driver: Driver) -> list[CloudDisk]:
        place = self._thd_place(driver)
        ours = [id for id, name in self._thd_names(driver, place).items() if self._is_ours(name)]
        return self._thd_shown(driver, _thd_existing(driver, place, ours), {})

    def _thd_names(self, driver: Driver, place: Place) -> Mapping[str, str]:
        """Return the names of all first class disks of the datastore by their ids. Only what is new is asked
        for, one by one, as vSphere 6.7 has no other call."""
        ids = driver.storage.ids(place)
        with self._lock:
            known = {id: self._names[id] for id in ids if id in self._names}
        for id in ids:
            if id not in known and (disk := driver.storage.get(place, id)) is not None:
                known[id] = disk.name
                with self._lock:
                    self._names[id] = disk.name
        with self._lock:
            self._names = {**known}
        return known

    def _thd_shown(
        self, driver: Driver, found: Sequence[FirstClassDisk], asked: Mapping[str, str]
    ) -> list[CloudDisk]:
        """Return disks with the VMs that have them.

        :param asked: names of volumes by their names at vCenter."""
        holders = self._thd_holders(driver) if found else {}
        return [self._shown(disk, holders.get(disk.id), asked) for disk in found]

    def _shown(
        self, disk: FirstClassDisk, holder: tuple[str, str] | None, asked: Mapping[str, str]
    ) -> CloudDisk:
        vm, serial = holder or ("", "")
        # Another node's VM is not in our folder: vCenter's own id of it has to do.
        users = [vm] if vm else [f"{user} of another node" for user in disk.users]
        return CloudDisk(
            id=disk.id,
            size=disk.size,
            state=DiskState.READY,
            serial=serial,
            ours=self._is_ours(disk.name),
            name=asked.get(disk.name, ""),
            holds=tuple(Hold(user) for user in users),
        )

    def _name(self, name: str) -> str:
        """Return a volume's name at vCenter, which is its file's too."""
        return f"{self._folder}-{hashlib.sha256(name.encode()).hexdigest()[:40]}"

    def _is_ours(self, name: str) -> bool:
        return name.startswith(f"{self._folder}-")

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
        """The request's number is not needed: once a disk is gone, its file's path is free."""
        place, name = self._thd_place(driver), self._name(request.name)
        if request.size > (room := self._thd_free(driver)):
            raise CloudError(ErrorKind.CAPACITY, f"datastore {place.name} has {room // MIB} MiB left")
        self._thd_create_file(driver, place, f"{name}.vmdk", request.size)
        disk = self._thd_registered(driver, place, name)
        if not disk.kept:
            driver.storage.keep(place, disk.id)
        return self._shown(disk, None, {name: request.name}), ""

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
            with self._lock:
                self._names[disk.id] = name
            return disk
        for id, each in self._thd_names(driver, place).items():
            if each == name and (disk := driver.storage.get(place, id)) is not None:
                return disk
        raise CloudError(ErrorKind.TRANSIENT, f"the disk of {place.path(name)}.vmdk is not shown yet")

    def _thd_delete(self, driver: Driver, disk: CloudDisk) -> str:
        with _refusals():
            task = driver.storage.delete(self._thd_place(driver), disk.id)
        return task._moId if task is not None else ""

    def _thd_grow(self, driver: Driver, disk: CloudDisk, size: int) -> str:
        """vCenters before 7.0 U2 refuse this while a VM has the disk."""
        with _refusals():
            return driver.storage.extend(self._thd_place(driver), disk.id, size)._moId

    # ---- Attaching and detaching

    def _thd_attach(self, driver: Driver, disk: CloudDisk, vm_id: str, read_only: bool) -> str:
        place = self._thd_place(driver)
        node = self._thd_vm(driver, vm_id)
        if node is None:
            raise CloudError(ErrorKind.NOT_FOUND, f"there is no VM {vm_id}")
        if vm_id in self._vms.ending:
            raise CloudError(ErrorKind.STATE, f"VM {vm_id} is being destroyed")
        known = driver.storage.get(place, disk.id)
        if known is not None and not known.kept:  # one that a person made, or that was half made
            driver.storage.keep(place, disk.id)
        controller = self._thd_controller(driver, node)
        with _refusals():
            vm = driver.vm(node.id)
            return vm.AttachDisk_Task(disk_id(disk.id), place.datastore, controller)._moId

    def _thd_controller(self, driver: Driver, node: Node) -> int:
        """Return the key of a controller with room for a disk; add one if there is none."""
        found = _thd_hardware(driver, node)
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
        with _refusals():
            return driver.vm(node.id).DetachDisk_Task(disk_id(disk.id))._moId

    def _thd_vm(self, driver: Driver, vm_id: str) -> Node | None:
        if not self._vms.is_name(vm_id):
            return None
        return self._vms._thd_get(driver, self._inventory._thd_folder(driver), vm_id)

    def _thd_is_done(self, driver: Driver, operation: str) -> bool:
        ended, fault = driver.ex_tasks([operation]).get(operation, (True, None))
        if fault is not None and not isinstance(fault, vim.fault.NotFound):
            with _refusals():
                raise fault
        return ended


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


def _thd_detach_all(driver: Driver, node: Node) -> bool:
    """Take all first class disks from a VM that is off and will be deleted: without its flag, vCenter would
    delete a disk's file with the VM. Returns whether it has none any more."""
    attached = _thd_attached(driver, node)
    for disk in attached:
        task = driver.vm(node.id).DetachDisk_Task(disk_id(disk.id))
        ended, fault = _thd_wait_briefly(driver, task._moId, patient=True)
        if fault is not None and fault.kind not in (ErrorKind.TRANSIENT, ErrorKind.NOT_FOUND):
            raise fault
        if not ended:
            return False
    return not attached or not _thd_attached(driver, node)


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
def _refusals() -> Iterator[None]:
    """Tell faults that are about a disk's or a VM's state."""
    try:
        yield
    except _REFUSED as fault:
        raise CloudError(ErrorKind.STATE, message_of(cast(Exception, fault))) from None
