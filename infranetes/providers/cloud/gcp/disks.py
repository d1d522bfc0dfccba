# SPDX-License-Identifier: Apache-2.0
"""Compute Engine's zonal disks as `CloudDisks`.

A disk's name is made of the cluster's and the volume's names, so a repeated request finds the disk of the
first. A request that changes a disk has a `requestId` that is made anew each time the disk is looked at: if
it is repeated because its answer was lost, it does nothing more, even if Google handles the first one late.

status of a disk                    DiskState
CREATING, RESTORING, UNAVAILABLE    CREATING
READY                               READY
FAILED                              FAILED
DELETING                            DELETING

An instance among the disk's `users` has it; while it gets or loses it, only the operation tells.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence

import attrs
from libcloud.common.google import GoogleBaseError

from infranetes.providers.cloud.gcp import errors
from infranetes.providers.cloud.gcp.driver import Driver
from infranetes.providers.cloud.gcp.libcloud_types import AttachedDisk, Disk, Instance, Operation
from infranetes.providers.cloud.gcp.names import (
    disk_of,
    filter_of,
    hashed_name_of,
    id_of,
    is_id,
    is_in_a_zone,
    label,
    labels,
    last,
    named,
    split_id,
    value,
)
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.interface import CLUSTER, CloudError, ErrorKind
from infranetes.providers.cloud.volumes.disks import VOLUME, CloudDisk, DiskRequest, DiskState, Hold
from infranetes.providers.volumes import FromSnapshot, FromVolume, VolumeSource
from infranetes_common.volume_disks import serial_of

_STATES = {
    "CREATING": DiskState.CREATING,
    "RESTORING": DiskState.CREATING,
    "UNAVAILABLE": DiskState.CREATING,
    "READY": DiskState.READY,
    "FAILED": DiskState.FAILED,
    "DELETING": DiskState.DELETING,
}
_USER = re.compile(r"zones/([^/]+)/instances/([^/]+)$")
_READ_ONLY = "READ_ONLY"
NO_ZONE = "global"
_MOST_NAMES = 50  # names in one filter, which is part of a URL


@attrs.frozen
class LookedAt(CloudDisk):
    """A disk, with the UUID from which the ids of requests about it are made."""

    requests: uuid.UUID = attrs.field(factory=uuid.uuid4, eq=False)

    def request_id(self, *words: str) -> str:
        """Return the id of a request: the same for the same words."""
        return str(uuid.uuid5(self.requests, " ".join(words)))


class GcpDisks:
    """See `CloudDisks`. Disks are made in the first of the configured zones, and found in all of them."""

    unit = 1 << 30
    max_size = 65536 << 30
    at_once = 100
    has_modes = True
    in_turns = False

    def __init__(self, settings: Settings, cluster: str) -> None:
        self._settings = settings
        self._cluster = cluster
        self.zone = settings.zones[0]

    def is_id(self, text: str) -> bool:
        return is_id(text) and is_in_a_zone(text)

    # ---- Looking

    def _thd_find(self, driver: Driver, names: Sequence[str]) -> list[CloudDisk]:
        wanted = {hashed_name_of(self._cluster, name): name for name in names}
        found = [
            disk for zone in self._settings.zones for disk in self._thd_disks(driver, zone, list(wanted))
        ]
        disks = self._thd_shown(driver, [disk for disk in found if self._is_ours(disk)])
        return [attrs.evolve(disk, name=wanted[split_id(disk.id)[1]]) for disk in disks]

    def _thd_get(self, driver: Driver, ids: Sequence[str]) -> list[CloudDisk]:
        wanted: dict[str, list[str]] = {}
        for each in ids:
            zone, name = split_id(each)
            wanted.setdefault(zone, []).append(name)
        found = [disk for zone in wanted for disk in self._thd_disks(driver, zone, wanted[zone])]
        return self._thd_shown(driver, found)

    def _thd_list(self, driver: Driver) -> list[CloudDisk]:
        ours = filter_of({CLUSTER: self._cluster})
        found = [disk for zone in self._settings.zones for disk in driver.zone_disks(zone, ours)]
        return self._thd_shown(driver, [disk for disk in found if self._is_ours(disk)])

    def _thd_disks(self, driver: Driver, zone: str, names: Sequence[str]) -> list[Disk]:
        """Return those of a zone's disks that exist. One is asked for by its name: no list is as fresh."""
        if len(names) > 1:
            return [disk for part in _parts(names) for disk in driver.zone_disks(zone, named(part))]
        disk = driver.disk(zone, names[0])
        return [] if disk is None else [disk]

    def _thd_shown(self, driver: Driver, disks: Sequence[Disk]) -> list[CloudDisk]:
        """Return disks as the cloud describes them, which takes a look at the instances that have them."""
        users: dict[str, set[str]] = {}
        for disk in disks:
            for user in disk.get("users") or ():
                zone, name = _user(user)
                users.setdefault(zone, set()).add(name)
        instances: dict[tuple[str, str], Instance] = {}
        for zone, names in users.items():
            for instance in self._thd_instances(driver, zone, sorted(names)):
                instances[zone, instance["name"]] = instance
        return [self._shown(disk, instances) for disk in disks]

    @staticmethod
    def _thd_instances(driver: Driver, zone: str, names: Sequence[str]) -> list[Instance]:
        if len(names) > 1:
            return [each for part in _parts(names) for each in driver.zone_instances(zone, named(part))]
        instance = driver.instance(zone, names[0])
        return [] if instance is None else [instance]

    def _shown(self, disk: Disk, instances: Mapping[tuple[str, str], Instance]) -> CloudDisk:
        id = id_of(last(disk["zone"]), disk["name"])
        holds, serial = [], serial_of(id)
        for user in disk.get("users") or ():
            zone, name = _user(user)
            attached = _attached(instances.get((zone, name), {}), *split_id(id))
            serial = attached.get("deviceName", serial)
            holds.append(Hold(id_of(zone, name), read_only=attached.get("mode") == _READ_ONLY))
        status = disk.get("status", "")
        return LookedAt(
            id=id,
            size=int(disk.get("sizeGb") or 0) << 30,
            state=_STATES.get(status, DiskState.CREATING),
            serial=serial,
            ours=self._is_ours(disk),
            name=value((disk.get("labels") or {}).get(VOLUME, "")),
            holds=tuple(holds),
            detail=f"its status is {status}",
            zone=last(disk["zone"]),
            source=_source(disk),
        )

    def _is_ours(self, disk: Disk) -> bool:
        found = disk.get("labels") or {}
        return found.get(CLUSTER) == label(self._cluster) and VOLUME in found

    # ---- Changing

    def _thd_create(self, driver: Driver, request: DiskRequest) -> tuple[CloudDisk, str]:
        """See `CloudDisks`. The request's number is not needed: a name is free once its disk is gone."""
        zone, source = self._thd_source(driver, request.source)
        name = hashed_name_of(request.cluster, request.name)
        id = id_of(zone, name)
        body = {
            "name": name,
            "description": f"the volume {request.name} of the cluster {request.cluster}",
            "sizeGb": str(request.size >> 30),
            "labels": labels({CLUSTER: request.cluster, VOLUME: request.name}),
            **source,
        }
        try:
            with errors.disk_refusals():
                operation = as_text(zone, driver.insert_disk(zone, body))
        except GoogleBaseError as error:
            cloud_error = errors.classify(error)
            if cloud_error is None or cloud_error.kind is not ErrorKind.CONFLICT:
                raise
            found = self._thd_get(driver, [id])
            if not found or not found[0].ours:
                raise
            return found[0], ""  # it was asked for before, and the answer was lost
        return LookedAt(id, request.size, DiskState.CREATING, ours=True, name=request.name), operation

    def _thd_source(self, driver: Driver, source: VolumeSource | None) -> tuple[str, dict[str, str]]:
        """Return the zone for a disk with this source, and the fields of its body that name the source.
        Google clones a disk in the same zone, and with the same type."""
        project, zone, kind = self._settings.project, self.zone, self._settings.volume_type
        if isinstance(source, FromSnapshot):
            found = {"sourceSnapshot": f"projects/{project}/global/snapshots/{source.id}"}
        elif isinstance(source, FromVolume):
            zone, name = split_id(source.id)
            disk = driver.disk(zone, name)
            if disk is None:
                raise CloudError(ErrorKind.NOT_FOUND, f"there is no volume {source.id}")
            kind = last(disk["type"])
            found = {"sourceDisk": f"projects/{project}/zones/{zone}/disks/{name}"}
        else:
            found = {}
        return zone, {"type": f"projects/{project}/zones/{zone}/diskTypes/{kind}", **found}

    def _thd_delete(self, driver: Driver, disk: CloudDisk) -> str:
        zone, name = split_id(disk.id)
        with errors.disk_refusals():
            return as_text(zone, driver.delete_disk(zone, name))

    def _thd_grow(self, driver: Driver, disk: CloudDisk, size: int) -> str:
        zone, name = split_id(disk.id)
        gib = size >> 30
        with errors.disk_refusals():
            return as_text(zone, driver.resize_disk(zone, name, gib, _request_id(disk, "resize", str(gib))))

    def _thd_attach(self, driver: Driver, disk: CloudDisk, vm_id: str, read_only: bool) -> str:
        zone, name = split_id(disk.id)
        vm_zone, vm = split_id(vm_id)
        if zone != vm_zone:
            raise CloudError(
                ErrorKind.INVALID, f"volume {disk.id} is in zone {zone}, and VM {vm_id} in {vm_zone}"
            )
        body = {
            "type": "PERSISTENT",
            "source": f"projects/{self._settings.project}/zones/{zone}/disks/{name}",
            "deviceName": serial_of(disk.id),
            "mode": _READ_ONLY if read_only else "READ_WRITE",
            "boot": False,
            "autoDelete": False,
        }
        request_id = _request_id(disk, "attach", vm_id)
        try:
            with errors.disk_refusals():
                operation = driver.attach_disk(zone, vm, body, request_id)
        except GoogleBaseError as error:
            if _attached(driver.instance(zone, vm) or {}, zone, name):
                # It was attached after the last look. Google may first report that the VM has a device of
                # this name.
                raise CloudError(ErrorKind.STATE, f"VM {vm_id} has it") from error
            raise
        return as_text(zone, operation) + (f" {vm} {name}" if read_only else "")

    def _thd_detach(self, driver: Driver, disk: CloudDisk, vm_id: str, force: bool) -> str:
        """See `CloudDisks`. Google takes a disk from a VM that has ended as from any other."""
        zone, vm = split_id(vm_id)
        attached = _attached(driver.instance(zone, vm) or {}, *split_id(disk.id))
        if not attached:
            return ""
        device = attached["deviceName"]
        with errors.disk_refusals():
            return as_text(zone, driver.detach_disk(zone, vm, device, _request_id(disk, "detach", vm_id)))

    def _thd_is_done(self, driver: Driver, operation: str) -> bool:
        zone, name, *read_only = operation.split()
        with errors.disk_refusals():
            found = driver.operation("" if zone == NO_ZONE else zone, name)
        if found is not None and found.get("status") != "DONE":
            return False
        if read_only:
            self._thd_check_alone(driver, zone, *read_only)
        return True

    @staticmethod
    def _thd_check_alone(driver: Driver, zone: str, vm: str, name: str) -> None:
        """Detach a disk that another VM was given at the same time: Google lets many VMs read one disk."""
        disk = driver.disk(zone, name)
        users = (disk or {}).get("users") or ()
        if len(users) > 1:
            driver.detach_disk(zone, vm, serial_of(id_of(zone, name)), str(uuid.uuid4()))
            others = ", ".join(last(user) for user in users if last(user) != vm)
            raise CloudError(ErrorKind.STATE, f"instance {others} has been given disk {name} as well")


def _request_id(disk: CloudDisk, *words: str) -> str:
    return disk.request_id(*words) if isinstance(disk, LookedAt) else str(uuid.uuid4())


def as_text(place: str, operation: Operation | None) -> str:
    """Return an operation as `GcpDisks` knows it. :param place: its zone, or `NO_ZONE`."""
    return "" if operation is None else f"{place} {operation['name']}"


def _user(link: str) -> tuple[str, str]:
    """Return the zone and the name of an instance, by a link to it."""
    found = _USER.search(link)
    if found is None:
        raise CloudError(ErrorKind.UNEXPECTED, f"{link!r} is no instance")
    return found[1], found[2]


def _source(disk: Disk) -> VolumeSource | None:
    if disk.get("sourceSnapshot"):
        return FromSnapshot(last(disk["sourceSnapshot"]))
    origin = disk_of(disk.get("sourceDisk") or "")
    return FromVolume(origin) if origin else None


def _attached(instance: Instance, zone: str, name: str) -> AttachedDisk:
    """Return an instance's attachment of a disk; {}: the disk is not attached to it."""
    for attached in instance.get("disks") or ():
        if attached.get("source", "").endswith(f"/zones/{zone}/disks/{name}"):
            return attached
    return {}


def _parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), _MOST_NAMES):
        yield names[start : start + _MOST_NAMES]
