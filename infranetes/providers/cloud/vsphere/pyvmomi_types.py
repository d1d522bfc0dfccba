# SPDX-License-Identifier: Apache-2.0
"""What is used of pyVmomi's objects, for pyVmomi has no types.

Names are vSphere's (source: vSphere Web Services API reference).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol, TypeAlias, TypedDict

DataObject: TypeAlias = object
"""A data object, such as a spec, that is only passed on."""


class ManagedObject(Protocol):
    """An object that lives in the vCenter. :ivar _moId: its id there."""

    _moId: str


class Task(ManagedObject, Protocol):
    """What a method whose name ends with `_Task` has begun."""

    def CancelTask(self) -> None: ...


class Entity(ManagedObject, Protocol):
    """A VM, vApp, folder, resource pool, datastore or network."""

    def Destroy_Task(self) -> Task: ...


class VirtualMachine(Entity, Protocol):
    """A VM or a template."""

    def CloneVM_Task(self, folder: Entity, name: str, spec: DataObject) -> Task: ...
    def PowerOnVM_Task(self) -> Task: ...
    def PowerOffVM_Task(self) -> Task: ...
    def ShutdownGuest(self) -> None: ...
    def ReconfigVM_Task(self, spec: DataObject) -> Task: ...
    def CreateSnapshot_Task(self, name: str, description: str, memory: bool, quiesce: bool) -> Task: ...
    def Rename_Task(self, name: str) -> Task: ...
    def MarkAsTemplate(self) -> None: ...
    def AttachDisk_Task(
        self, diskId: DataObject, datastore: ManagedObject, controllerKey: int | None = None
    ) -> Task: ...
    def DetachDisk_Task(self, diskId: DataObject) -> Task: ...


class OptionValue(Protocol):
    """One entry of extraConfig."""

    key: str
    value: object


class VirtualDevice(Protocol):
    """A VM's device."""

    key: int


class NetworkCard(Protocol):
    """A virtual Ethernet card."""

    key: int
    controllerKey: int
    unitNumber: int


class DiskId(Protocol):
    """A first class disk's id."""

    id: str


class DiskFile(Protocol):
    """The file of a VM's disk. :ivar uuid: which the guest sees with `disk.EnableUUID`."""

    fileName: str
    uuid: str | None


class VirtualDisk(Protocol):
    """A VM's disk. :ivar vDiskId: that of a first class disk; None: it is none."""

    key: int
    controllerKey: int
    unitNumber: int
    backing: DiskFile
    vDiskId: DiskId | None


class ScsiController(Protocol):
    """A VM's SCSI controller."""

    key: int
    busNumber: int


class StorageConfig(Protocol):
    """The configuration of a first class disk. :ivar consumerId: the VMs that have it."""

    id: DiskId
    name: str
    capacityInMB: int
    createTime: datetime
    keepAfterDeleteVm: bool | None
    consumerId: Sequence[DiskId]


class StorageObject(Protocol):
    """A first class disk."""

    config: StorageConfig


class StorageObjectState(Protocol):
    """The progress in making a first class disk."""

    tentative: bool | None


class StorageObjectSnapshot(Protocol):
    """A first class disk's snapshot."""

    id: DiskId | None
    createTime: datetime
    description: str


class StorageObjectSnapshots(Protocol):
    """A first class disk's snapshots."""

    snapshots: Sequence[StorageObjectSnapshot] | None


class StorageObjectManager(ManagedObject, Protocol):
    """The vCenter's first class disks."""

    def RegisterDisk(self, path: str, name: str) -> StorageObject: ...
    def ListVStorageObject(self, datastore: ManagedObject) -> Sequence[DiskId]: ...
    def RetrieveVStorageObject(self, id: DataObject, datastore: ManagedObject) -> StorageObject: ...
    def SetVStorageObjectControlFlags(
        self, id: DataObject, datastore: ManagedObject, controlFlags: Sequence[str]
    ) -> None: ...
    def ExtendDisk_Task(self, id: DataObject, datastore: ManagedObject, newCapacityInMB: int) -> Task: ...
    def DeleteVStorageObject_Task(self, id: DataObject, datastore: ManagedObject) -> Task: ...
    def RenameVStorageObject(self, id: DataObject, datastore: ManagedObject, name: str) -> None: ...
    def RetrieveVStorageObjectState(self, id: DataObject, datastore: ManagedObject) -> StorageObjectState: ...
    def RetrieveSnapshotInfo(self, id: DataObject, datastore: ManagedObject) -> StorageObjectSnapshots: ...
    def VStorageObjectCreateSnapshot_Task(
        self, id: DataObject, datastore: ManagedObject, description: str
    ) -> Task: ...
    def DeleteSnapshot_Task(
        self, id: DataObject, datastore: ManagedObject, snapshotId: DataObject
    ) -> Task: ...
    def CreateDiskFromSnapshot_Task(
        self, id: DataObject, datastore: ManagedObject, snapshotId: DataObject, name: str
    ) -> Task: ...


class VirtualDiskManager(ManagedObject, Protocol):
    """The vCenter's disk files."""

    def CreateVirtualDisk_Task(self, name: str, datacenter: ManagedObject, spec: DataObject) -> Task: ...


class FileManager(ManagedObject, Protocol):
    """The vCenter's files."""

    def MakeDirectory(self, name: str, datacenter: ManagedObject, createParentDirectories: bool) -> None: ...
    def DeleteDatastoreFile_Task(self, name: str, datacenter: ManagedObject) -> Task: ...


class GuestNic(Protocol):
    """A network interface as VMware Tools describe it. :ivar deviceConfigId: its card's key, -1: none."""

    deviceConfigId: int | None
    ipAddress: Sequence[str] | None


class SnapshotInfo(Protocol):
    """A VM's snapshots."""

    currentSnapshot: ManagedObject | None


VMProperties = TypedDict(
    "VMProperties",
    {
        "name": str,
        "snapshot": SnapshotInfo | None,
        "datastore": Sequence[ManagedObject],
        "recentTask": Sequence[Task],
        "disabledMethod": Sequence[str],
        "runtime.powerState": str,
        "guest.ipAddress": str | None,
        "guest.net": Sequence[GuestNic],
        "summary.config.numCpu": int | None,
        "summary.config.memorySizeMB": int | None,
        "summary.storage.committed": int,
        "config.template": bool,
        "config.instanceUuid": str,
        "config.extraConfig": Sequence[OptionValue],
        "config.modified": datetime,
        "config.hardware.device": Sequence[DataObject],
    },
    total=False,
)
"""A VM's properties by their paths; without those that it lacks, or that were not asked for."""


DatastoreProperties = TypedDict("DatastoreProperties", {"name": str, "summary.freeSpace": int}, total=False)
"""A datastore's properties by their paths."""


HostProperties = TypedDict(
    "HostProperties",
    {
        "name": str,
        "runtime.connectionState": str,
        "runtime.inMaintenanceMode": bool,
        "summary.hardware.memorySize": int,
        "summary.quickStats.overallMemoryUsage": int | None,
        "datastore": Sequence[ManagedObject],
        "network": Sequence[ManagedObject],
    },
    total=False,
)
"""A host's properties by their paths. The usage is in MiB."""


class PoolProperties(TypedDict):
    """A resource pool's properties."""

    owner: ManagedObject  # a host, or a cluster


class DrsConfig(Protocol):
    """Whether a cluster chooses hosts for VMs."""

    enabled: bool | None


class ClusterConfig(Protocol):
    """The configuration of a cluster."""

    drsConfig: DrsConfig


class ClusterProperties(TypedDict, total=False):
    """A cluster's properties."""

    configurationEx: ClusterConfig
    host: Sequence[ManagedObject]


TaskProperties = TypedDict("TaskProperties", {"info.state": str, "info.error": Exception | None}, total=False)
"""A task's properties by their paths."""


class NodeExtra(TypedDict):
    """The attributes of our driver's nodes in addition to libcloud's common ones."""

    cpus: int
    memory_mib: int
    cards: Sequence[GuestNic]
    vm: VirtualMachine


class Node(Protocol):
    """A `libcloud.compute.base.Node`: a VM. :ivar state: one of libcloud's `NodeState`."""

    id: str
    name: str
    state: object
    private_ips: Sequence[str]
    extra: NodeExtra


class SearchIndex(Protocol):
    """Finds objects by their names."""

    def FindByInventoryPath(self, path: str) -> Entity | None: ...
    def FindChild(self, entity: Entity, name: str) -> VirtualMachine | None: ...


class PropertyValue(Protocol):
    """A property that was read."""

    name: str
    val: object


class ObjectContent(Protocol):
    """The properties that were read of an object."""

    obj: ManagedObject
    propSet: Sequence[PropertyValue]


class RetrieveResult(Protocol):
    """One page of answers. :ivar token: asks for the next one."""

    objects: Sequence[ObjectContent]
    token: str | None


class PropertyCollector(Protocol):
    """Reads properties of many objects at once."""

    def RetrievePropertiesEx(
        self, specs: Sequence[DataObject], options: DataObject
    ) -> RetrieveResult | None: ...
    def ContinueRetrievePropertiesEx(self, token: str) -> RetrieveResult | None: ...


class Event(Protocol):
    """Something that has happened, by its number."""

    key: int


class EventManager(Protocol):
    """The vCenter's record of events."""

    def QueryEvents(self, filter: DataObject) -> Sequence[Event]: ...


class SessionManager(ManagedObject, Protocol):
    """The vCenter's sessions."""

    def Login(self, username: str, password: str, locale: str | None) -> DataObject: ...
    def Logout(self) -> None: ...


class ServiceContent(Protocol):
    """The vCenter's managers."""

    searchIndex: SearchIndex
    propertyCollector: PropertyCollector
    eventManager: EventManager
    sessionManager: SessionManager
    fileManager: FileManager
    virtualDiskManager: VirtualDiskManager
    vStorageObjectManager: StorageObjectManager
