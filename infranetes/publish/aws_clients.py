# SPDX-License-Identifier: Apache-2.0
"""botocore's clients of EC2 and of EBS' direct APIs, and what is used of them, for botocore has no types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol, TypedDict, cast

from botocore.config import Config
from botocore.session import Session

from infranetes.providers.cloud.aws.settings import Settings

_TRIES = 8  # attempts, if a request is throttled or its answer is lost
_PARALLEL = 32  # connections


class Tag(TypedDict):
    """A tag, as both APIs have it."""

    Key: str
    Value: str


class Filter(TypedDict):
    """A filter of EC2's Describe calls."""

    Name: str
    Values: Sequence[str]


class SnapshotShown(TypedDict, total=False):
    """A snapshot, as EC2 describes it."""

    SnapshotId: str
    State: str
    StateMessage: str
    StartTime: datetime
    Tags: Sequence[Tag]


class Snapshots(TypedDict):
    """An answer."""

    Snapshots: list[SnapshotShown]


class DiskShown(TypedDict, total=False):
    """One of an image's disks."""

    Ebs: Mapping[str, object]


class ImageShown(TypedDict, total=False):
    """An image, as EC2 describes it."""

    ImageId: str
    Name: str
    State: str
    CreationDate: str
    Tags: Sequence[Tag]
    BlockDeviceMappings: Sequence[DiskShown]


class Images(TypedDict):
    """An answer."""

    Images: list[ImageShown]


class InstanceShown(TypedDict):
    """An instance, as EC2 describes it."""

    InstanceId: str
    ImageId: str


class Reservation(TypedDict):
    """The instances of one launch."""

    Instances: list[InstanceShown]


class Instances(TypedDict, total=False):
    """A page of an answer."""

    Reservations: list[Reservation]
    NextToken: str


class Registered(TypedDict):
    """An answer."""

    ImageId: str


class Begun(TypedDict):
    """An answer."""

    SnapshotId: str
    BlockSize: int


class Ec2(Protocol):
    """botocore's client of EC2."""

    def describe_images(self, *, Owners: Sequence[str], Filters: Sequence[Filter]) -> Images: ...
    def describe_snapshots(self, *, OwnerIds: Sequence[str], Filters: Sequence[Filter]) -> Snapshots: ...
    def describe_instances(self, *, Filters: Sequence[Filter], NextToken: str = ...) -> Instances: ...
    def register_image(
        self,
        *,
        Name: str,
        Description: str,
        Architecture: str,
        VirtualizationType: str,
        BootMode: str,
        EnaSupport: bool,
        ImdsSupport: str,
        RootDeviceName: str,
        BlockDeviceMappings: Sequence[Mapping[str, object]],
    ) -> Registered: ...
    def create_tags(self, *, Resources: Sequence[str], Tags: Sequence[Tag]) -> object: ...
    def deregister_image(self, *, ImageId: str) -> object: ...
    def delete_snapshot(self, *, SnapshotId: str) -> object: ...


class Ebs(Protocol):
    """botocore's client of EBS' direct APIs."""

    def start_snapshot(
        self, *, VolumeSize: int, ClientToken: str, Description: str, Tags: Sequence[Tag], Timeout: int
    ) -> Begun: ...
    def put_snapshot_block(
        self,
        *,
        SnapshotId: str,
        BlockIndex: int,
        BlockData: bytes,
        DataLength: int,
        Checksum: str,
        ChecksumAlgorithm: str,
    ) -> object: ...
    def complete_snapshot(
        self,
        *,
        SnapshotId: str,
        ChangedBlocksCount: int,
        Checksum: str,
        ChecksumAlgorithm: str,
        ChecksumAggregationMethod: str,
    ) -> object: ...


def connect(settings: Settings, ebs_endpoint: str = "", session: Session | None = None) -> tuple[Ec2, Ebs]:
    """Return clients with the configuration's credentials, or those that botocore finds.

    :param session: which has read AWS' models already."""
    options = {
        "region_name": settings.region,
        "aws_access_key_id": settings.access_key or None,
        "aws_secret_access_key": settings.secret_key or None,
        "config": Config(
            retries={"mode": "standard", "max_attempts": _TRIES},
            max_pool_connections=_PARALLEL,
            connect_timeout=settings.call_seconds,
            read_timeout=max(settings.call_seconds, 60.0),
        ),
    }
    session = session or Session(profile=settings.profile or None)
    ec2 = session.create_client("ec2", endpoint_url=settings.endpoint or None, **options)
    ebs = session.create_client("ebs", endpoint_url=ebs_endpoint or None, **options)
    return cast(Ec2, ec2), cast(Ebs, ebs)


def to_tags(tags: Mapping[str, str]) -> list[Tag]:
    """Return tags as requests have them."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tags_of(shown: ImageShown | SnapshotShown) -> dict[str, str]:
    """Return the tags of an image or snapshot."""
    return {tag["Key"]: tag["Value"] for tag in shown.get("Tags") or []}
