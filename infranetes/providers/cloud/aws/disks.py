# SPDX-License-Identifier: Apache-2.0
"""EBS volumes as `CloudDisks`.

volume's state     attachment's   DiskState           HoldState
creating                          CREATING
available, in-use                 READY
                   attaching                          ATTACHING
                   attached                           ATTACHED
                   detaching                          DETACHING
                   busy                               DETACHING: the guest still uses it
deleting, deleted                 DELETING
error                             FAILED

A volume's client token is made of its cluster, name and number, so EC2 itself finds the first of two
requests, also if its volume is gone: `createTime` is that of the first one's then. EC2 deletes with an
instance what was made with it: a volume that is attached later stays.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from string import ascii_lowercase

import attrs

from infranetes.providers.cloud.aws import errors
from infranetes.providers.cloud.aws.addresses import filter_parameters, tag_parameters
from infranetes.providers.cloud.aws.driver import Driver, items, text
from infranetes.providers.cloud.aws.libcloud_types import Element, Response
from infranetes.providers.cloud.aws.settings import Settings
from infranetes.providers.cloud.interface import CLUSTER, CloudError, ErrorKind
from infranetes.providers.cloud.volumes.disks import (
    VOLUME,
    CloudDisk,
    DiskRequest,
    DiskState,
    Hold,
    HoldState,
)
from infranetes.providers.volumes import FromSnapshot
from infranetes_common.errors import FailedPrecondition

_ID = re.compile(r"vol-[0-9a-f]{8,17}")
_STATES = {
    "creating": DiskState.CREATING,
    "available": DiskState.READY,
    "in-use": DiskState.READY,
    "deleting": DiskState.DELETING,
    "deleted": DiskState.DELETING,
    "error": DiskState.FAILED,
}
_HOLDS = {
    "attaching": HoldState.ATTACHING,
    "attached": HoldState.ATTACHED,
    "detaching": HoldState.DETACHING,
    "busy": HoldState.DETACHING,
}
# The device names that EC2 accepts for volumes other than the root's and an instance's own disks (source: EC2
# user guide, "Available device names"). On Nitro instances they do not name the guest's devices, but each can
# still be taken only once.
_DEVICES = tuple(f"/dev/sd{each}" for each in ascii_lowercase[5:16]) + tuple(
    f"/dev/xvd{first}{second}" for first in "bcd" for second in ascii_lowercase
)
_DEVICE_TAKEN = re.compile(r"Attachment point \S+ is already in use")
_MAX_FILTERS = 200  # values that one filter may have


class AwsDisks:
    """EBS volumes, as `CloudDisks` has them.

    :param first_zone: the zone of the first subnet in which instances are launched."""

    unit = 1 << 30
    max_size = 16384 << 30
    at_once = 100
    has_modes = False
    in_turns = False

    def __init__(self, settings: Settings, cluster: str, first_zone: Callable[[], str]) -> None:
        self._settings = settings
        self._cluster = cluster
        self._first_zone = first_zone

    @property
    def zone(self) -> str:
        return self._settings.volume_zone or self._first_zone()

    def is_id(self, text: str) -> bool:
        return _ID.fullmatch(text) is not None

    # ---- Looking

    def _thd_find(self, driver: Driver, names: Sequence[str]) -> list[CloudDisk]:
        return list(self._thd_described(driver, f"tag:{VOLUME}", names, ours=True))

    def _thd_get(self, driver: Driver, ids: Sequence[str]) -> list[CloudDisk]:
        # A filter is used because asking for an id that does not exist is an error.
        return list(self._thd_described(driver, "volume-id", ids))

    def _thd_list(self, driver: Driver) -> list[CloudDisk]:
        return [disk for disk in self._thd_described(driver, "tag-key", [VOLUME], ours=True) if disk.ours]

    def _thd_described(
        self, driver: Driver, name: str, values: Sequence[str], ours: bool = False
    ) -> Iterator[CloudDisk]:
        """Describe volumes; libcloud's `list_volumes` shows the first attachment of each alone."""
        cluster = filter_parameters({f"tag:{CLUSTER}": self._cluster}, first=2) if ours else {}
        for start in range(0, len(values), _MAX_FILTERS):
            part = values[start : start + _MAX_FILTERS]
            named = {
                f"Filter.1.Value.{number}": value for number, value in enumerate(map(literally, part), 1)
            }
            answer = driver.request("DescribeVolumes", **{"Filter.1.Name": name}, **named, **cluster)
            for volume in items(answer, "volumeSet/item"):
                yield self._shown(volume)

    def _shown(self, volume: Element) -> CloudDisk:
        id = text(volume, "volumeId")
        tags = {text(tag, "key"): text(tag, "value") for tag in items(volume, "tagSet/item")}
        state = text(volume, "status")
        return CloudDisk(
            id=id,
            size=int(text(volume, "size") or 0) << 30,
            state=_STATES.get(state, DiskState.CREATING),
            serial=id.replace("-", ""),
            ours=tags.get(CLUSTER) == self._cluster and VOLUME in tags,
            name=tags.get(VOLUME, ""),
            zone=text(volume, "availabilityZone"),
            source=FromSnapshot(snapshot) if (snapshot := text(volume, "snapshotId")) else None,
            holds=tuple(_hold(each) for each in items(volume, "attachmentSet/item") if _is_held(each)),
            detail=f"its state is {state}",
        )

    # ---- Changing

    def _thd_create(self, driver: Driver, request: DiskRequest) -> tuple[CloudDisk, str]:
        """Send EC2's own request: libcloud's `create_volume` has no client token, and tags a volume only once
        it exists, so one could stay without tags."""
        if not self.zone:
            raise FailedPrecondition(
                "EC2 makes volumes in a zone: give subnets in providers.aws, or volume_zone there"
            )
        settings = self._settings
        parameters = {
            "AvailabilityZone": self.zone,
            "Size": str(request.size >> 30),
            "VolumeType": settings.volume_type,
            "ClientToken": _client_token(request),
            **tag_parameters("volume", {CLUSTER: request.cluster, VOLUME: request.name}),
        }
        if request.source is not None:
            parameters["SnapshotId"] = request.source.id
        if settings.encrypt_volumes or settings.volume_key:
            parameters["Encrypted"] = "true"
        if settings.volume_key:
            parameters["KmsKeyId"] = settings.volume_key
        answer = driver.answer("CreateVolume", **parameters)
        return attrs.evolve(self._shown(answer.object), age=_age(answer)), ""

    def _thd_delete(self, driver: Driver, disk: CloudDisk) -> str:
        try:
            driver.delete_volume(disk.id)
        except Exception as error:
            if _kind(error) is not ErrorKind.NOT_FOUND:
                raise
        return ""

    def _thd_grow(self, driver: Driver, disk: CloudDisk, size: int) -> str:
        driver.grow_volume(disk.id, size >> 30)
        return disk.id

    def _thd_attach(self, driver: Driver, disk: CloudDisk, vm_id: str, read_only: bool) -> str:
        """Attach a disk for writing, even if `read_only` is asked for: EC2 has no other mode."""
        start = zlib.crc32(disk.id.encode()) % len(_DEVICES)
        for device in _DEVICES[start:] + _DEVICES[:start]:
            try:
                driver.attach(disk.id, vm_id, device)
                return ""
            except Exception as error:
                if _DEVICE_TAKEN.search(str(error)):
                    continue
                if _kind(error) is ErrorKind.QUOTA:
                    count = self._thd_count(driver, vm_id)
                    raise CloudError(ErrorKind.QUOTA, f"VM {vm_id} has {count} volumes: {error}") from error
                raise
        raise CloudError(ErrorKind.QUOTA, f"VM {vm_id} has a volume at each of {len(_DEVICES)} device names")

    def _thd_count(self, driver: Driver, vm_id: str) -> int:
        """Return how many volumes an instance has."""
        return len(list(self._thd_described(driver, "attachment.instance-id", [vm_id])))

    def _thd_detach(self, driver: Driver, disk: CloudDisk, vm_id: str, force: bool) -> str:
        driver.detach(disk.id, vm_id, force=force)
        return ""

    def _thd_is_done(self, driver: Driver, operation: str) -> bool:
        """Return whether a volume has grown: while EC2 optimizes it, it has its new size already."""
        return driver.has_grown(operation)


def _age(answer: Response) -> float:
    """Return a volume's age in seconds, by EC2's clock; 0.0: EC2 does not tell."""
    try:
        made = datetime.fromisoformat(text(answer.object, "createTime"))
        return max((parsedate_to_datetime(answer.headers["date"]) - made).total_seconds(), 0.0)
    except (KeyError, ValueError, TypeError):
        return 0.0


def _is_held(attachment: Element) -> bool:
    return text(attachment, "status") != "detached"


def _hold(attachment: Element) -> Hold:
    state = _HOLDS.get(text(attachment, "status"), HoldState.ATTACHING)
    return Hold(text(attachment, "instanceId"), state)


def _kind(error: Exception) -> ErrorKind | None:
    found = errors.classify(error)
    return found.kind if found is not None else None


def literally(value: str) -> str:
    """Return a filter's value that matches nothing but this text."""
    return re.sub(r"([\\*?])", r"\\\1", value)


def _client_token(request: DiskRequest) -> str:
    """EC2's idempotency key, of at most 64 characters: the same for any size."""
    fields = "\0".join((request.cluster, request.name, str(request.number))).encode()
    return f"volume-{hashlib.sha256(fields).hexdigest()[:40]}"
