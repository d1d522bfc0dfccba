# SPDX-License-Identifier: Apache-2.0
"""A vCenter's first class disks, by one thread's session. libcloud has none of these calls."""

from __future__ import annotations

from typing import cast
from urllib.parse import quote, urlencode

import attrs
from pyVmomi import vim, vmodl

from infranetes.providers.cloud.vsphere.pyvmomi_types import (
    DataObject,
    ManagedObject,
    ServiceContent,
    StorageObject,
    Task,
)
from infranetes.providers.cloud.vsphere.session import VCenterSession

MIB = 1 << 20

_KEEP = "keepAfterDeleteVm"
_GONE = (vim.fault.NotFound, vmodl.fault.ManagedObjectNotFound)


@attrs.frozen
class Place:
    """Where volumes are.

    :ivar host: the vCenter. :ivar datacenter, datastore: managed objects, which are only named in requests.
    :ivar datacenter_path: as in the inventory. :ivar name: the datastore's. :ivar folder: on it."""

    host: str
    datacenter: ManagedObject
    datacenter_path: str
    datastore: ManagedObject
    name: str
    folder: str

    def path(self, file: str = "") -> str:
        """Return a file's path, or the folder's."""
        return f"[{self.name}] {self.folder}/{file}" if file else f"[{self.name}] {self.folder}"

    def url(self, file: str) -> str:
        """Return a file's URL at the vCenter."""
        query = urlencode({"dcPath": self.datacenter_path, "dsName": self.name}, quote_via=quote)
        return f"https://{self.host}/folder/{quote(f'{self.folder}/{file}')}?{query}"


@attrs.frozen
class FirstClassDisk:
    """A first class disk.

    :ivar kept: whether vCenter keeps it when a VM that has it is deleted.
    :ivar created: when, in seconds since the epoch.
    :ivar users: the VMs that have it, by an id of vCenter's."""

    id: str
    name: str
    size: int
    kept: bool
    created: float
    users: tuple[str, ...] = ()


@attrs.frozen
class DiskSnapshot:
    """A snapshot of a first class disk. :ivar created: when, in seconds since the epoch."""

    id: str
    description: str
    created: float


class Storage:
    """Makes requests about first class disks and their files."""

    def __init__(self, session: VCenterSession) -> None:
        self._session = session
        self._content: ServiceContent | None = None

    @property
    def _managers(self) -> ServiceContent:
        if self._content is None:
            instance = vim.ServiceInstance("ServiceInstance", self._session)
            self._content = cast(ServiceContent, instance.RetrieveContent())
        return self._content

    def make_folder(self, place: Place) -> None:
        """Make the folder of volumes, unless it exists."""
        try:
            self._managers.fileManager.MakeDirectory(place.path(), place.datacenter, True)
        except vim.fault.FileAlreadyExists:
            return

    def create_file(self, place: Place, file: str, size: int) -> Task:
        """Begin to create a disk's file, of zeros that take no room."""
        spec = vim.VirtualDiskManager.FileBackedVirtualDiskSpec(
            diskType="thin", adapterType="lsiLogic", capacityKb=size // 1024
        )
        return self._managers.virtualDiskManager.CreateVirtualDisk_Task(
            place.path(file), place.datacenter, spec
        )

    def register(self, place: Place, file: str, name: str) -> FirstClassDisk | None:
        """Make a first class disk of a file; None: it is one."""
        try:
            return _disk(self._managers.vStorageObjectManager.RegisterDisk(place.url(file), name))
        except vim.fault.AlreadyExists:
            return None

    def keep(self, place: Place, id: str) -> None:
        """Make vCenter keep a disk when a VM that has it is deleted, whoever deletes the VM."""
        self._managers.vStorageObjectManager.SetVStorageObjectControlFlags(
            disk_id(id), place.datastore, [_KEEP]
        )

    def ids(self, place: Place) -> list[str]:
        """Return the ids of all first class disks of the datastore."""
        return [each.id for each in self._managers.vStorageObjectManager.ListVStorageObject(place.datastore)]

    def get(self, place: Place, id: str) -> FirstClassDisk | None:
        """Return a first class disk; None: the datastore has none with this id."""
        try:
            found = self._managers.vStorageObjectManager.RetrieveVStorageObject(disk_id(id), place.datastore)
        except _GONE:
            return None
        return _disk(found)

    def extend(self, place: Place, id: str, size: int) -> Task:
        """Begin to make a disk larger."""
        manager = self._managers.vStorageObjectManager
        return manager.ExtendDisk_Task(disk_id(id), place.datastore, size // MIB)

    def delete(self, place: Place, id: str) -> Task | None:
        """Begin to destroy a disk with its file; None: there is none."""
        try:
            manager = self._managers.vStorageObjectManager
            return manager.DeleteVStorageObject_Task(disk_id(id), place.datastore)
        except _GONE:
            return None

    def rename(self, place: Place, id: str, name: str) -> None:
        """Give a disk another name."""
        self._managers.vStorageObjectManager.RenameVStorageObject(disk_id(id), place.datastore, name)

    def is_tentative(self, place: Place, id: str) -> bool:
        """Whether vCenter still makes a disk that it shows already, or may remove it as half made."""
        manager = self._managers.vStorageObjectManager
        return bool(manager.RetrieveVStorageObjectState(disk_id(id), place.datastore).tentative)

    def snapshots(self, place: Place, id: str) -> list[DiskSnapshot]:
        """Return a disk's snapshots; those of a disk that is gone: none."""
        manager = self._managers.vStorageObjectManager
        try:
            found = manager.RetrieveSnapshotInfo(disk_id(id), place.datastore)
        except _GONE:
            return []
        return [
            DiskSnapshot(each.id.id, each.description, each.createTime.timestamp())
            for each in found.snapshots or ()
            if each.id is not None
        ]

    def take_snapshot(self, place: Place, id: str, description: str) -> Task:
        """Begin to take a snapshot of a disk."""
        manager = self._managers.vStorageObjectManager
        return manager.VStorageObjectCreateSnapshot_Task(disk_id(id), place.datastore, description)

    def delete_snapshot(self, place: Place, id: str, snapshot: str) -> Task | None:
        """Begin to delete a disk's snapshot; None: there is none."""
        try:
            manager = self._managers.vStorageObjectManager
            return manager.DeleteSnapshot_Task(disk_id(id), place.datastore, disk_id(snapshot))
        except _GONE:
            return None

    def copy(self, place: Place, id: str, snapshot: str, name: str) -> Task:
        """Begin to make a disk of what a disk's snapshot holds, which depends on neither."""
        manager = self._managers.vStorageObjectManager
        return manager.CreateDiskFromSnapshot_Task(disk_id(id), place.datastore, disk_id(snapshot), name)

    def close(self) -> None:
        """End the session."""
        self._session.close()


def disk_id(id: str) -> DataObject:
    """Return an id as requests have it."""
    return vim.vslm.ID(id=id)


def _disk(found: StorageObject) -> FirstClassDisk:
    config = found.config
    return FirstClassDisk(
        id=config.id.id,
        name=config.name,
        size=config.capacityInMB * MIB,
        kept=bool(config.keepAfterDeleteVm),
        created=config.createTime.timestamp(),
        users=tuple(each.id for each in config.consumerId or ()),
    )
