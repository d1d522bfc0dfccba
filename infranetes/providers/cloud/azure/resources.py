# SPDX-License-Identifier: Apache-2.0
"""The fields that are used of Azure's resources, which libcloud returns as untyped JSON.

Names are Azure's (source: "Azure REST API reference", Compute and Network).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict


class Reference(TypedDict, total=False):
    """Another resource, or one that is made with this one."""

    id: str


class Status(TypedDict, total=False):
    """One of a VM's states, such as `PowerState/running`."""

    code: str
    message: str


class InstanceView(TypedDict, total=False):
    """The present states of a VM."""

    statuses: Sequence[Status]


class HardwareProfile(TypedDict, total=False):
    """A VM's size."""

    vmSize: str


class DataDisk(TypedDict, total=False):
    """A disk that a VM has, or is being given. :ivar lun: its number in the VM."""

    lun: int
    managedDisk: Reference
    toBeDetached: bool


class VmStorage(TypedDict, total=False):
    """The disks of a VM."""

    dataDisks: Sequence[DataDisk]


class VmProperties(TypedDict, total=False):
    """The properties of a VM."""

    hardwareProfile: HardwareProfile
    provisioningState: str
    timeCreated: str
    priority: str
    instanceView: InstanceView
    storageProfile: VmStorage


class Tagged(TypedDict, total=False):
    """The fields that all resources have."""

    id: str
    name: str
    tags: Mapping[str, str]


class Vm(Tagged, total=False):
    """A virtual machine."""

    zones: Sequence[str]
    properties: VmProperties


class IpConfigurationProperties(TypedDict, total=False):
    """An address of a network interface."""

    privateIPAddress: str
    publicIPAddress: Reference


class IpConfiguration(TypedDict, total=False):
    """The same, with its name."""

    properties: IpConfigurationProperties


class NicProperties(TypedDict, total=False):
    """The properties of a network interface."""

    virtualMachine: Reference
    ipConfigurations: Sequence[IpConfiguration]


class Nic(Tagged, total=False):
    """A network interface."""

    properties: NicProperties


class PublicAddressProperties(TypedDict, total=False):
    """The properties of a public address."""

    ipAddress: str
    ipConfiguration: Reference | None


class PublicAddress(Tagged, total=False):
    """A public address."""

    properties: PublicAddressProperties


class CreationData(TypedDict, total=False):
    """What a disk or a snapshot was made from."""

    sourceResourceId: str


class DiskProperties(TypedDict, total=False):
    """The properties of a disk."""

    provisioningState: str
    LastOwnershipUpdateTime: str  # when a VM was given it, or gave it up, at last
    diskSizeGB: int
    creationData: CreationData
    maxShares: int


class SkuName(TypedDict):
    """The type of a disk."""

    name: str


class Disk(Tagged, total=False):
    """A managed disk. :ivar managedBy: the id of its VM."""

    managedBy: str | None
    zones: Sequence[str]
    sku: SkuName
    properties: DiskProperties


class SnapshotProperties(TypedDict, total=False):
    """The properties of a snapshot."""

    provisioningState: str
    timeCreated: str
    diskSizeGB: int
    creationData: CreationData
    completionPercent: float


class Snapshot(Tagged, total=False):
    """A snapshot of a disk."""

    properties: SnapshotProperties


class ImageFeature(TypedDict):
    """A feature of an image."""

    name: str
    value: str


class ImageProperties(TypedDict, total=False):
    """The properties that all versions of an image share."""

    features: Sequence[ImageFeature]
    osState: str
    architecture: str
    hyperVGeneration: str


class Image(Tagged, total=False):
    """An image of a gallery."""

    properties: ImageProperties


class OsDiskImage(TypedDict, total=False):
    """The disk in a version of an image."""

    sizeInGB: int


class StorageProfile(TypedDict, total=False):
    """The disks in a version of an image."""

    osDiskImage: OsDiskImage


class PublishingProfile(TypedDict, total=False):
    """The publication of a version of an image."""

    publishedDate: str


class VersionProperties(TypedDict, total=False):
    """The properties of a version of an image."""

    provisioningState: str
    publishingProfile: PublishingProfile
    storageProfile: StorageProfile


class Version(Tagged, total=False):
    """A version of an image."""

    properties: VersionProperties


class Capability(TypedDict):
    """Something that a size has; all values are text."""

    name: str
    value: str


class RestrictionInfo(TypedDict, total=False):
    """The zones in which a restriction holds."""

    zones: Sequence[str]


class Restriction(TypedDict, total=False):
    """A restriction on the use of a size. :ivar type: `Location` or `Zone`."""

    type: str
    restrictionInfo: RestrictionInfo


class LocationInfo(TypedDict, total=False):
    """The zones that have a size."""

    location: str
    zones: Sequence[str]


class Sku(TypedDict, total=False):
    """A size of VM, or of something else."""

    name: str
    resourceType: str
    family: str  # as messages about its quota name it
    capabilities: Sequence[Capability]
    locationInfo: Sequence[LocationInfo]
    restrictions: Sequence[Restriction]


class OperationError(TypedDict, total=False):
    """The error of a failed operation."""

    code: str
    message: str


class Operation(TypedDict, total=False):
    """The operation that a request has begun."""

    status: str
    error: OperationError
