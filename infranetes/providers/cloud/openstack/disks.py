# SPDX-License-Identifier: Apache-2.0
"""Cinder's volumes as `CloudDisks`.

status of a volume                           DiskState   hold of the server that has it
creating, downloading                        CREATING
available                                    READY
reserved, attaching                          READY       ATTACHING
in-use                                       READY       ATTACHED
detaching                                    READY       DETACHING
extending, backing-up, maintenance and more  CREATING    ATTACHED, if a server has it
error_extending, error_restoring and more    READY (1)   ATTACHED, if a server has it
error, error_deleting                        FAILED
deleting, unmanaging                         DELETING

(1) No change of such a volume is asked for: what it holds is there, but an operator has to reset its status.

Cinder knows no idempotency tokens, and several volumes may have one name. So a volume is looked for before it
is asked for, also before a request that got no answer is made again, and is not asked for again while Cinder
may be slow to show it. Where two were made all the same, as by an answer that was lost while the request was
still under way, all calls take the one with the least id; the other is in no list, and is deleted with it.

Cinder and Nova answer a request before it is carried out. If that fails the volume is again what it was
before, so each request is followed until the volume shows that it has succeeded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs
from libcloud.common.exceptions import BaseHTTPError

from infranetes.providers.cloud.interface import CLUSTER, CloudError, ErrorKind
from infranetes.providers.cloud.openstack.driver import Driver
from infranetes.providers.cloud.openstack.errors import disk_refusals
from infranetes.providers.cloud.openstack.libcloud_types import Volume
from infranetes.providers.cloud.openstack.names import hashed_name_of, is_id
from infranetes.providers.cloud.openstack.settings import Settings
from infranetes.providers.cloud.volumes.disk_calls import precedence
from infranetes.providers.cloud.volumes.disks import (
    VOLUME,
    CloudDisk,
    DiskRequest,
    DiskState,
    Hold,
    HoldState,
)
from infranetes.providers.volumes import FromSnapshot, FromVolume, VolumeSource

_STATES = {
    "available": DiskState.READY,
    "reserved": DiskState.READY,
    "attaching": DiskState.READY,
    "in-use": DiskState.READY,
    "detaching": DiskState.READY,
    "error": DiskState.FAILED,
    "error_deleting": DiskState.FAILED,
    "deleting": DiskState.DELETING,
    "unmanaging": DiskState.DELETING,
}
_HELD = ("reserved", "attaching", "in-use", "detaching")
_ATTACHING = ("reserved", "attaching")  # statuses of a volume, and of its attachment
_SERIAL_CHARACTERS = 20  # of a volume's id: all that a virtio disk reports
_FEW = 4  # volumes that are asked for one by one
_MOST_MADE = 10_000  # requests that are remembered
_MOST_GIB = (1 << 31) - 1
_DESCRIPTION = 255  # characters


@attrs.frozen
class LookedAt(CloudDisk):
    """A volume as Cinder shows it."""

    status: str = ""
    shared: bool = False  # whether Cinder would give it to several servers


class OpenStackDisks:
    """Cinder's volumes, as `CloudDisks` has them."""

    unit = 1 << 30
    max_size = _MOST_GIB << 30
    at_once = 100
    has_modes = False
    in_turns = False

    def __init__(self, settings: Settings, cluster: str) -> None:
        self._settings = settings
        self._cluster = cluster
        # By name and number of what was asked for: the id that Cinder answered, "" if it has not, and until
        # when Cinder may be slow to show it.
        self._made: dict[tuple[str, int], tuple[str, float]] = {}
        here = settings.volume_zone or next(iter(settings.zones), "")
        self.zone = "" if settings.cross_zone_volumes else here

    def is_id(self, text: str) -> bool:
        return is_id(text)

    def _thd_free(self, driver: Driver) -> int:
        limits = driver.volume_limits()
        volumes, gib = limits.get("maxTotalVolumes", -1), limits.get("maxTotalVolumeGigabytes", -1)
        if 0 <= volumes <= limits.get("totalVolumesUsed", 0):
            return 0
        left = gib - limits.get("totalGigabytesUsed", 0) if gib >= 0 else _MOST_GIB
        return max(left, 0) << 30

    # ---- Looking

    def _thd_find(self, driver: Driver, names: Sequence[str]) -> list[CloudDisk]:
        if len(names) > _FEW:
            return [disk for disk in self._thd_ours(driver) if disk.name in names]
        hashed = [hashed_name_of(self._cluster, name) for name in names]
        found = [volume for name in hashed for volume in driver.volumes(name=name)]
        return [disk for disk in self._thd_shown(driver, found) if disk.name in names]

    def _thd_get(self, driver: Driver, ids: Sequence[str]) -> list[CloudDisk]:
        there: list[CloudDisk] = []
        if len(ids) > _FEW:
            there = [disk for disk in self._thd_ours(driver) if disk.id in ids]
        known = {disk.id for disk in there}
        others = [driver.volume(id) for id in ids if id not in known]
        return there + self._thd_shown(driver, [each for each in others if each is not None])

    def _thd_list(self, driver: Driver) -> list[CloudDisk]:
        first: dict[str, CloudDisk] = {}
        for disk in sorted(self._thd_ours(driver), key=precedence):
            first.setdefault(disk.name, disk)
        return list(first.values())

    def _thd_ours(self, driver: Driver) -> list[CloudDisk]:
        found = driver.volumes(metadata=str({CLUSTER: self._cluster}))  # Cinder expects Python's notation
        return self._thd_shown(driver, [each for each in found if self._is_ours(each)])

    def _is_ours(self, volume: Volume) -> bool:
        told = volume.get("metadata") or {}
        return told.get(CLUSTER) == self._cluster and VOLUME in told

    def _thd_shown(self, driver: Driver, volumes: Sequence[Volume]) -> list[CloudDisk]:
        return [self._thd_disk(driver, each) for each in volumes]

    def _thd_disk(self, driver: Driver, volume: Volume) -> LookedAt:
        """Return a volume with the servers that have it. A volume does not show a server that is still being
        given it, nor why it has failed: for these Cinder is asked once more."""
        id, status = volume["id"], volume["status"]
        holds = _thd_holds(driver, volume)
        state = DiskState.READY if status.startswith("error_") else DiskState.CREATING
        state = _STATES.get(status, state)
        if status in _HELD and not holds:
            state = DiskState.CREATING  # Nova is about to say by whom it is held, or that it is free
        why = _why(driver.messages(id)) if state is DiskState.FAILED else ""
        return LookedAt(
            id=id,
            size=int(volume.get("size") or 0) << 30,
            state=state,
            serial=id[:_SERIAL_CHARACTERS],
            ours=self._is_ours(volume),
            name=volume["metadata"][VOLUME] if self._is_ours(volume) else "",
            created=str(volume.get("created_at") or ""),
            zone="" if self._settings.cross_zone_volumes else volume.get("availability_zone") or "",
            source=_source(volume),
            holds=holds,
            detail=f"its status is {status}{why}",
            status=status,
            shared=bool(volume.get("multiattach")),
        )

    # ---- Changing

    def _thd_create(self, driver: Driver, request: DiskRequest) -> tuple[CloudDisk, str]:
        key = request.name, request.number
        was_asked = key in self._made
        id, until = self._made.get(key, ("", 0.0))
        if time.monotonic() < until:
            return next(
                iter(self._thd_get(driver, [id])), CloudDisk(id, request.size, DiskState.CREATING)
            ), ""
        there = self._thd_there(driver, request.name) if was_asked else []  # the caller has looked just now
        if len(self._made) >= _MOST_MADE:
            self._made.clear()
        if not there:
            self._made[key] = "", 0.0
            asked = self._thd_disk(driver, self._thd_asked(driver, request))
            # Another request for it may have been under way.
            there = self._thd_there(driver, request.name) or [asked]
        first = min(there, key=precedence)
        self._made[key] = first.id, time.monotonic() + self._settings.settle_seconds
        return first, ""

    def _thd_there(self, driver: Driver, name: str) -> list[CloudDisk]:
        return [disk for disk in self._thd_find(driver, [name]) if disk.state is not DiskState.DELETING]

    def _thd_asked(self, driver: Driver, request: DiskRequest) -> Volume:
        settings, source = self._settings, request.source
        zone = self.zone or settings.volume_zone
        body: dict[str, object] = {
            "name": hashed_name_of(request.cluster, request.name),
            "description": f"the volume {request.name!r} of the cluster {request.cluster}"[:_DESCRIPTION],
            "size": request.size >> 30,
            "metadata": {CLUSTER: request.cluster, VOLUME: request.name},
        }
        # What is made from something has its type and, unless Cinder is told otherwise, its zone.
        if source is None and settings.volume_type:
            body["volume_type"] = settings.volume_type
        if (source is None and zone) or (isinstance(source, FromSnapshot) and self.zone):
            body["availability_zone"] = zone
        if source is not None:
            body["snapshot_id" if isinstance(source, FromSnapshot) else "source_volid"] = source.id
        try:
            with disk_refusals():
                return driver.make_volume(body)
        except BaseHTTPError as error:
            if int(error.code) != 404 or source is not None:
                raise
            raise CloudError(ErrorKind.INVALID, f"{error}; see volume_type in providers.openstack") from error

    def _thd_delete(self, driver: Driver, disk: CloudDisk) -> str:
        if _status(disk) == "error_deleting":
            raise CloudError(
                ErrorKind.INVALID, f"{disk.detail}: its deletion has failed, and an operator has to delete it"
            )
        twins = self._thd_find(driver, [disk.name]) if disk.name else []
        for id in [*(each.id for each in twins if _is_left(each, disk)), disk.id]:
            self._thd_delete_one(driver, id)
        return f"delete {disk.id}"

    @staticmethod
    def _thd_delete_one(driver: Driver, id: str) -> None:
        try:
            with disk_refusals():
                driver.delete_volume(id)
        except BaseHTTPError as error:
            if int(error.code) != 404:
                raise
        except CloudError as error:
            if error.kind is ErrorKind.STATE and (snapshots := driver.snapshots(volume_id=id)):
                raise CloudError(
                    ErrorKind.INVALID, f"it has {len(snapshots)} snapshots: delete these first"
                ) from error
            raise

    def _thd_grow(self, driver: Driver, disk: CloudDisk, size: int) -> str:
        _check_status(disk)
        with disk_refusals():
            driver.grow_volume(disk.id, size >> 30)
        return f"grow {disk.id} {size}"

    def _thd_attach(self, driver: Driver, disk: CloudDisk, vm_id: str, read_only: bool) -> str:
        """Attach a disk for writing, even if `read_only` is asked for: Nova has no other mode."""
        _check_status(disk)
        if isinstance(disk, LookedAt) and disk.shared:
            raise CloudError(
                ErrorKind.INVALID,
                "its type lets several servers have it at once, which would write over each other's changes: "
                "use a type without multiattach",
            )
        with disk_refusals():
            driver.attach(vm_id, disk.id)
        return f"attach {disk.id} {vm_id}"

    def _thd_detach(self, driver: Driver, disk: CloudDisk, vm_id: str, force: bool) -> str:
        """See `CloudDisks`. Nova has no force: it takes a volume from a server that is switched off."""
        with disk_refusals():
            driver.detach(vm_id, disk.id)
        return f"detach {disk.id} {vm_id}"

    # ---- Following

    def _thd_is_done(self, driver: Driver, operation: str) -> bool:
        verb, id, *rest = operation.split()
        if verb == "delete-snapshot":
            return _thd_is_snapshot_gone(driver, id)
        volume = driver.volume(id)
        if volume is None:
            return True
        disk = self._thd_disk(driver, volume)
        if verb == "delete":
            return _is_past(disk, ("deleting",), f"Cinder has not deleted it: {disk.detail}")
        if verb == "grow":
            done = disk.size >= int(rest[0]) and disk.status != "extending"
            words = f"Cinder has not enlarged it: {disk.detail}{_why(driver.messages(id))}"
            return done or _is_past(disk, ("extending",), words)
        held = any(hold.vm_id == rest[0] for hold in disk.holds)
        if verb == "attach":
            done = held and disk.status == "in-use"
            return done or _is_past(disk, _ATTACHING, f"Nova has not attached it: {disk.detail}")
        return not held or _is_past(disk, ("detaching",), f"Nova has not detached it: {disk.detail}")


def _is_past(disk: LookedAt, during: Sequence[str], words: str) -> bool:
    """Return False while a volume has one of the statuses of an operation.

    :raise CloudError: it has none: the operation has failed."""
    if disk.status not in during:
        raise CloudError(ErrorKind.STATE, words)
    return False


def _thd_is_snapshot_gone(driver: Driver, id: str) -> bool:
    found = driver.snapshot(id)
    if found is not None and found["status"] != "deleting":
        why = _why(driver.messages(id)) or ": perhaps volumes that were made from it depend on it"
        raise CloudError(ErrorKind.STATE, f"Cinder has not deleted it{why}")
    return found is None


def _thd_holds(driver: Driver, volume: Volume) -> tuple[Hold, ...]:
    """Return the servers that have a volume, or are being given it."""
    attached = volume.get("attachments") or ()
    state = HoldState.DETACHING if volume["status"] == "detaching" else HoldState.ATTACHED
    if attached:
        return tuple(Hold(each.get("server_id") or "of another kind", state) for each in attached)
    if volume["status"] not in _ATTACHING:
        return ()
    return tuple(
        Hold(server, HoldState.ATTACHING)
        for each in driver.attachments(volume["id"])
        if each.get("status") in _ATTACHING and (server := each.get("instance"))
    )


def _is_left(twin: CloudDisk, disk: CloudDisk) -> bool:
    """Return whether a disk of the same name is to be deleted with another."""
    usable = twin.state is not DiskState.DELETING and _status(twin) != "error_deleting"
    return usable and twin.id != disk.id and not twin.holds


def _status(disk: CloudDisk) -> str:
    return disk.status if isinstance(disk, LookedAt) else ""


def _check_status(disk: CloudDisk) -> None:
    """Check that a volume can be changed. :raise CloudError: only an operator can mend it."""
    if _status(disk).startswith("error_"):
        raise CloudError(
            ErrorKind.INVALID, f"{disk.detail}: an operator of the cloud has to reset it before it is used"
        )


def _source(volume: Volume) -> VolumeSource | None:
    if snapshot := volume.get("snapshot_id"):
        return FromSnapshot(snapshot)
    return FromVolume(origin) if (origin := volume.get("source_volid")) else None


def _why(messages: Sequence[str]) -> str:
    return f": {' '.join(messages[0].split())[:200]}" if messages else ""
