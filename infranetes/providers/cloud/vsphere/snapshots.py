# SPDX-License-Identifier: Apache-2.0
"""Snapshots of first class disks as `DiskSnapshots`.

vCenter takes them at once, of disks that VMs have too, and keeps them in the disk's chain of files: they end
with their disk, and slow it down the more there are.

A snapshot's name is in its description. It is not an idempotency key: a request whose answer was lost may
have begun a snapshot that is not listed yet, and the next request then begins a second one. Of several with
one name only the first is listed, and all of them are deleted together.
"""

from __future__ import annotations

import threading
import time

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.volumes.disk_snapshots import CloudSnapshot, SnapshotRequest, SnapshotState
from infranetes.providers.cloud.vsphere.disk_names import is_snapshot_id, snapshot_id
from infranetes.providers.cloud.vsphere.disks import VsphereDisks, refusals
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.launches import _thd_wait_briefly
from infranetes.providers.cloud.vsphere.storage import DiskSnapshot, Place

_MOST_REMEMBERED = 1000
_SEEN_SECONDS = 60.0  # how long what was seen of a disk is used, unless this daemon has changed the disk


class VsphereSnapshots:
    """See `DiskSnapshots`. :param most: the most snapshots of one volume."""

    clones = False
    outlive_volumes = False

    def __init__(self, disks: VsphereDisks, most: int) -> None:
        self._disks = disks
        self._most = most
        self._lock = threading.Lock()
        self._begun: dict[str, tuple[str, str]] = {}  # by name: the disk, and the task of the last request
        self._changed: set[str] = set()  # disks whose snapshots this daemon has changed since
        # By disk: the time of the look, and the snapshots.
        self._seen: dict[str, tuple[float, list[DiskSnapshot]]] = {}

    def is_id(self, text: str) -> bool:
        return is_snapshot_id(text)

    # ---- Finding

    def _thd_find(self, driver: Driver, name: str) -> list[CloudSnapshot]:
        """Look at all disks, unless this daemon has asked for the snapshot itself: then at its disk."""
        place, description = self._disks._thd_place(driver), self._disks.disk_names.of(name)
        with self._lock:
            volume, task = self._begun.get(name, ("", ""))
        if volume:
            found = self._thd_of(driver, place, volume, description)
            if found or (task and not driver.ex_tasks([task]).get(task, (True, None))[0]):
                return found
        holders = [
            id
            for id, taken in self._thd_look(driver, place).items()
            if any(each.description == description for each in taken)
        ]
        return [each for id in holders for each in self._thd_of(driver, place, id, description)]

    def _thd_get(self, driver: Driver, id: str) -> CloudSnapshot | None:
        volume, _, _ = id.partition("/")
        place = self._disks._thd_place(driver)
        return next((each for each in self._thd_of(driver, place, volume) if each.id == id), None)

    def _thd_list(self, driver: Driver) -> list[CloudSnapshot]:
        place = self._disks._thd_place(driver)
        found = []
        for id, taken in self._thd_look(driver, place).items():
            newest_first = sorted(taken, key=_age, reverse=True)
            oldest = {each.description: each for each in newest_first}.values()
            ours = [each for each in oldest if self._disks.disk_names.is_ours(each.description)]
            found += self._thd_shown(driver, place, id, ours)
        return found

    def _thd_look(self, driver: Driver, place: Place) -> dict[str, list[DiskSnapshot]]:
        """Return the snapshots of all disks of the datastore. Each disk takes a call, so what was seen a
        moment ago is not asked for again: a call that takes too long goes on when it is made again."""
        found = {}
        for id in driver.storage.ids(place):
            with self._lock:
                when, taken = self._seen.get(id, (-_SEEN_SECONDS, []))
                is_known = id not in self._changed and time.monotonic() - when < _SEEN_SECONDS
            if not is_known:
                taken = driver.storage.snapshots(place, id)
                with self._lock:
                    self._seen[id] = (time.monotonic(), taken)
            found[id] = taken
        with self._lock:
            self._seen = {id: self._seen[id] for id in found if id in self._seen}
        return found

    def _remember(self, volume: str, name: str = "", task: str = "") -> None:
        """Note that this daemon changes a disk's snapshots. :param name: of the one that it asks for."""
        with self._lock:
            if len(self._changed) >= _MOST_REMEMBERED or len(self._begun) >= _MOST_REMEMBERED:
                self._begun.clear()
                self._changed.clear()
                self._seen.clear()
            self._changed.add(volume)
            if name:
                self._begun[name] = (volume, task)

    def _thd_of(
        self, driver: Driver, place: Place, volume: str, description: str = ""
    ) -> list[CloudSnapshot]:
        """Return a disk's snapshots. :param description: of those; "": any."""
        taken = driver.storage.snapshots(place, volume)
        wanted = [each for each in taken if description in ("", each.description)]
        return self._thd_shown(driver, place, volume, wanted)

    def _thd_shown(
        self, driver: Driver, place: Place, volume: str, taken: list[DiskSnapshot]
    ) -> list[CloudSnapshot]:
        """Return snapshots with their disk's size, which has not changed since they were taken."""
        disk = driver.storage.get(place, volume) if taken else None
        if disk is None:
            return []
        return [
            CloudSnapshot(
                id=snapshot_id(volume, each.id),
                volume=volume,
                size=disk.size,
                created=each.created,
                state=SnapshotState.READY,
                ours=self._disks.disk_names.is_ours(each.description),
            )
            for each in taken
        ]

    # ---- Taking and destroying

    def _thd_create(self, driver: Driver, request: SnapshotRequest) -> str:
        place, description = self._disks._thd_place(driver), self._disks.disk_names.of(request.name)
        taken = driver.storage.snapshots(place, request.volume)
        if any(each.description == description for each in taken):
            self._remember(request.volume, request.name)
            return ""
        if len(taken) >= self._most:
            raise CloudError(
                ErrorKind.QUOTA,
                f"volume {request.volume} has {len(taken)} snapshots; snapshots_per_volume allows no more",
            )
        with refusals():
            task = driver.storage.take_snapshot(place, request.volume, description)._moId
        self._remember(request.volume, request.name, task)
        return task

    def _thd_delete(self, driver: Driver, snapshot: CloudSnapshot) -> str:
        place = self._disks._thd_place(driver)
        volume, _, own = snapshot.id.partition("/")
        taken = driver.storage.snapshots(place, volume)
        name = next((each.description for each in taken if each.id == own), "")
        self._remember(volume)
        for each in taken:
            if each.id != own and each.description == name:
                self._thd_delete_twin(driver, place, volume, each.id)
        with refusals():
            task = driver.storage.delete_snapshot(place, volume, own)
        return task._moId if task is not None else ""

    def _thd_delete_twin(self, driver: Driver, place: Place, volume: str, twin: str) -> None:
        with refusals():
            task = driver.storage.delete_snapshot(place, volume, twin)
        ended, fault = (True, None) if task is None else _thd_wait_briefly(driver, task._moId, patient=True)
        if fault is not None and fault.kind is not ErrorKind.NOT_FOUND:
            raise fault
        if not ended:
            raise CloudError(ErrorKind.STATE, f"snapshot {twin} of the same name is still being deleted")


def _age(snapshot: DiskSnapshot) -> tuple[float, str]:
    return snapshot.created, snapshot.id
