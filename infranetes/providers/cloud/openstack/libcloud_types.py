# SPDX-License-Identifier: Apache-2.0
"""The fields that are used of OpenStack's resources, which libcloud returns as untyped JSON.

Names are OpenStack's (source: its API reference, Compute 2.67, Networking 2.0, Image 2, Block Storage 3.59).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

ServerAddress = TypedDict("ServerAddress", {"addr": str, "version": int, "OS-EXT-IPS:type": str})


class Fault(TypedDict, total=False):
    """The fault of a server in ERROR."""

    code: int
    message: str


class ServerFlavor(TypedDict, total=False):
    """A server's flavor, as it was when the server was made."""

    original_name: str


Server = TypedDict(
    "Server",
    {
        "id": str,
        "name": str,
        "status": str,
        "created": str,
        "metadata": Mapping[str, str],
        "addresses": Mapping[str, Sequence[ServerAddress]],
        "flavor": ServerFlavor,
        "fault": Fault,
        "OS-EXT-STS:task_state": str | None,
    },
    total=False,
)


class Flavor(TypedDict, total=False):
    """A size of server."""

    id: str
    name: str
    vcpus: int
    ram: int  # MiB
    disk: int  # GiB; 0: as the image has it, or no disk
    extra_specs: Mapping[str, str]


class Image(TypedDict, total=False):
    """A machine image, whose own properties are beside these."""

    id: str
    name: str
    status: str
    owner: str
    created_at: str
    size: int
    min_disk: int  # GiB
    min_ram: int  # MiB
    architecture: str
    hw_architecture: str


class Named(TypedDict, total=False):
    """A network, as far as it is looked at."""

    id: str
    name: str


class Subnet(TypedDict, total=False):
    """A part of a network, as far as it is looked at."""

    cidr: str


class FloatingAddress(TypedDict, total=False):
    """A public address of the project."""

    id: str
    floating_ip_address: str
    port_id: str | None
    description: str
    floating_network_id: str


class VolumeAttachment(TypedDict, total=False):
    """A server that has a volume, as the volume shows it."""

    server_id: str | None  # None: it is attached to a host
    host_name: str | None


class Attachment(TypedDict, total=False):
    """An attachment of a volume in any state."""

    instance: str | None  # a server's id
    status: str


class Volume(TypedDict, total=False):
    """A volume."""

    id: str
    name: str | None
    size: int  # GiB; the old size until it has really grown
    status: str
    availability_zone: str | None
    metadata: Mapping[str, str]
    multiattach: bool
    attachments: Sequence[VolumeAttachment]  # only those that are complete
    snapshot_id: str | None
    source_volid: str | None


class Snapshot(TypedDict, total=False):
    """A snapshot of a volume."""

    id: str
    name: str | None
    size: int  # GiB, the volume's when it was taken
    status: str
    volume_id: str
    created_at: str  # in UTC, without saying so
    metadata: Mapping[str, str]


class CatalogEndpoint(TypedDict, total=False):
    """The endpoint of a service."""

    interface: str
    region: str
    region_id: str
    url: str


class CatalogEntry(TypedDict, total=False):
    """A service in the catalog of a token."""

    type: str
    name: str
    endpoints: Sequence[CatalogEndpoint]


class Project(TypedDict, total=False):
    """The project that a token is for."""

    id: str
    name: str


class Token(TypedDict, total=False):
    """A token, without its text."""

    catalog: Sequence[CatalogEntry]
    expires_at: str
    issued_at: str
    project: Project
