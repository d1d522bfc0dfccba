# SPDX-License-Identifier: Apache-2.0
"""Types for the parts of libcloud's EC2 driver and its answers that are used: libcloud has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Protocol, TypedDict


class Element(Protocol):
    """An XML element of xml.etree, or of lxml where that is installed."""

    tag: str
    text: str | None

    def find(self, path: str) -> Element | None: ...
    def findall(self, path: str) -> Sequence[Element]: ...
    def append(self, element: Element) -> None: ...
    def extend(self, elements: Sequence[Element]) -> None: ...
    def __iter__(self) -> Iterator[Element]: ...
    def __len__(self) -> int: ...


class Response(Protocol):
    """An answer. :ivar object: its root element. :ivar headers: by their names in lower case."""

    object: Element
    headers: Mapping[str, str]


class InstanceExtra(TypedDict, total=False):
    """The attributes of an EC2 `Node` in addition to libcloud's common ones."""

    tags: Mapping[str, str]
    status: str
    instance_type: str
    reason: str
    state_reason: str  # added by our driver
    availability: str  # its availability zone


class Instance(Protocol):
    """A `libcloud.compute.base.Node`: an EC2 instance."""

    id: str
    private_ips: Sequence[str]
    public_ips: Sequence[str]
    created_at: datetime | None
    extra: InstanceExtra


class SubnetExtra(TypedDict):
    """The attributes of an `EC2NetworkSubnet` in addition to its id and name."""

    zone: str  # its availability zone
    vpc_id: str
    cidr_block: str


class Subnet(Protocol):
    """A `libcloud.compute.drivers.ec2.EC2NetworkSubnet`: a subnet of a VPC."""

    id: str
    extra: SubnetExtra


class ImageExtra(TypedDict, total=False):
    """The attributes of an EC2 `NodeImage` in addition to libcloud's common ones."""

    architecture: str
    root_device_name: str  # added by our driver, as is all below
    root_disk_gib: int
    disks_gib: int
    created: str  # ISO 8601, which sorts by time


class Image(Protocol):
    """A `libcloud.compute.base.NodeImage`: a machine image."""

    id: str
    extra: ImageExtra


class InstanceTypeExtra(TypedDict, total=False):
    """The attributes of an EC2 `NodeSize` in addition to libcloud's common ones."""

    physicalProcessor: str
    vcpu: str | int
    cpu: str | int
    gpu: str | int


class InstanceType(Protocol):
    """A `libcloud.compute.base.NodeSize`: an instance type."""

    id: str
    ram: int  # MiB
    price: float | str | None
    extra: InstanceTypeExtra


class BlockDevice(TypedDict):
    """A block device mapping of a launch."""

    DeviceName: str
    Ebs: Mapping[str, str]


class VolumeModification(Protocol):
    """A `libcloud.compute.drivers.ec2.EC2VolumeModification`: the progress of a volume's growth."""

    modification_state: str
    start_time: datetime | None
    status_message: str | None
