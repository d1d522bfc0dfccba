# SPDX-License-Identifier: Apache-2.0
"""The fields that are used of Compute Engine's resources, which libcloud returns as untyped JSON.

Names are Google's (source: Compute Engine API, "REST Resources").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict


class AccessConfig(TypedDict, total=False):
    """The configuration by which a network interface is reached from outside."""

    natIP: str


class NetworkInterface(TypedDict, total=False):
    """A network interface of an instance."""

    networkIP: str
    accessConfigs: Sequence[AccessConfig]


class Scheduling(TypedDict, total=False):
    """The scheduling of an instance: whether it may be preempted."""

    provisioningModel: str


class Labeled(TypedDict, total=False):
    """The fields that instances and disks share in Compute Engine's answers."""

    id: str
    name: str
    zone: str  # a link
    labels: Mapping[str, str]


class AttachedDisk(TypedDict, total=False):
    """A disk that an instance has."""

    source: str  # a link
    deviceName: str
    mode: str


class MetadataItem(TypedDict):
    """An attribute of a VM."""

    key: str
    value: str


class Metadata(TypedDict, total=False):
    """The attributes of a VM. `fingerprint`: of this version of them."""

    items: Sequence[MetadataItem]
    fingerprint: str


class Instance(Labeled, total=False):
    """A VM."""

    status: str
    statusMessage: str
    creationTimestamp: str
    machineType: str  # a link
    networkInterfaces: Sequence[NetworkInterface]
    scheduling: Scheduling
    disks: Sequence[AttachedDisk]
    metadata: Metadata


class Disk(Labeled, total=False):
    """A persistent disk. `users` are the instances that have it."""

    status: str
    sizeGb: str
    type: str  # a link
    users: Sequence[str]
    sourceSnapshot: str  # a link, as are the next two; what they lead to may be gone
    sourceDisk: str
    sourceImage: str


class Snapshot(TypedDict, total=False):
    """A snapshot of a disk."""

    name: str
    status: str
    labels: Mapping[str, str]
    diskSizeGb: str
    sourceDisk: str  # a link; the disk may be gone
    creationTimestamp: str


class Subnetwork(TypedDict, total=False):
    """A subnetwork, as far as it is looked at. :ivar network: a link to the network."""

    network: str
    ipCidrRange: str


class Deprecation(TypedDict, total=False):
    """Whether a resource may still be used."""

    state: str


class GuestOsFeature(TypedDict, total=False):
    """A feature of an image's operating system."""

    type: str


class Image(TypedDict, total=False):
    """A machine image."""

    name: str
    status: str
    architecture: str
    creationTimestamp: str
    family: str
    labels: Mapping[str, str]
    deprecated: Deprecation
    diskSizeGb: str
    archiveSizeBytes: str
    guestOsFeatures: Sequence[GuestOsFeature]


class Accelerators(TypedDict, total=False):
    """The GPUs of a machine type."""

    guestAcceleratorCount: int


class MachineType(TypedDict, total=False):
    """A size of VM."""

    name: str
    guestCpus: int
    memoryMb: int
    architecture: str
    accelerators: Sequence[Accelerators]
    deprecated: Deprecation


class Address(TypedDict, total=False):
    """A reserved address."""

    address: str


class Operation(TypedDict, total=False):
    """An operation that a request, or Google itself, has begun."""

    name: str
    status: str
    targetId: str
