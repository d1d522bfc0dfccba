# SPDX-License-Identifier: Apache-2.0
"""First class disks that are made from snapshots.

vCenter copies for minutes, and a request has no idempotency key before vSphere 9.1: the new disk's name can
be chosen, and does not have to be the only one. Until a copy is complete, its name is not a volume's:

copies of that name        what `_thd_make` does
none                       asks for one, whose task is followed; a daemon that is killed forgets the task
none, a task has ended     waits a minute for it to be listed
one that vCenter makes     waits for it
one that is too small      has it enlarged
one that is large enough   has vCenter keep it when a VM is deleted, and gives it the volume's name
several                    the oldest is the volume; the others are deleted

A second copy may be asked for when an answer is lost while vCenter does not show the first yet. What comes
too late to be deleted here is deleted with the volume, and else once it is a day old, when another is made.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable

import attrs
from pyVmomi import vim

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.volumes.disks import DiskRequest
from infranetes.providers.cloud.vsphere.disk_names import DiskNames
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.errors import classify
from infranetes.providers.cloud.vsphere.storage import FirstClassDisk, Place
from infranetes.providers.volumes import FromSnapshot

_ABANDONED_SECONDS = 86_400.0
_LISTED_SECONDS = 60.0  # how long after its task has ended a copy may not be listed yet
_BUSY = (vim.fault.InvalidState, vim.fault.TaskInProgress, vim.fault.FileFault)


@attrs.frozen
class Copying:
    """A step that vCenter has begun. :ivar disk: the new disk; None: vCenter has not said yet which it will
    be."""

    task: str
    disk: FirstClassDisk | None = None


class Copies:
    """Makes disks from snapshots. Methods may be called by any thread."""

    def __init__(self, names: DiskNames) -> None:
        self._names = names
        self._lock = threading.Lock()
        # Tasks of copies that this daemon has asked for, by the copies' names.
        self._tasks: dict[str, str] = {}
        self._made: dict[str, float] = {}  # when such tasks ended, by the copies' names

    def _thd_make(
        self,
        driver: Driver,
        place: Place,
        request: DiskRequest,
        source: FromSnapshot,
        there: Iterable[FirstClassDisk],
        check_room: Callable[[], None],
    ) -> FirstClassDisk | Copying:
        """Take the next step to a disk.

        :param there: all unfinished copies, of any volume of the cluster.
        :param check_room: called before a copy is asked for, to check that the datastore has room for it.
        :raise CloudError: `ErrorKind.STATE`: vCenter makes one, and there is no task to follow."""
        name = self._names.copy_of(request.name, source, whole=False)
        if task := self._thd_running(driver, name):
            return Copying(task)
        copies = [disk for disk in there if disk.name == name]
        if not copies:
            self._check_listed(name)
            _thd_delete(driver, place, [disk for disk in there if _is_abandoned(disk)])
            check_room()
            return self._thd_begin(driver, place, name, source)
        whole = [disk for disk in copies if not driver.storage.is_tentative(place, disk.id)]
        if not whole:
            raise CloudError(ErrorKind.STATE, "the copy is still being made")
        first = min(whole, key=lambda disk: (disk.created, disk.id))
        if first.size < request.size:
            return Copying(driver.storage.extend(place, first.id, request.size)._moId, first)
        if not first.kept:
            driver.storage.keep(place, first.id)
        made = attrs.evolve(first, name=self._names.copy_of(request.name, source), kept=True)
        driver.storage.rename(place, made.id, made.name)
        with self._lock:
            self._made.pop(name, None)
        _thd_delete(driver, place, [disk for disk in copies if disk.id != made.id])
        return made

    def _thd_delete_twins(
        self, driver: Driver, place: Place, disk_name: str, there: Iterable[FirstClassDisk]
    ) -> None:
        """Delete the other copies that were to be the same volume. :param there: as in `_thd_make`."""
        name = self._names.unfinished(disk_name)
        _thd_delete(driver, place, [disk for disk in there if disk.name == name])

    def _thd_running(self, driver: Driver, name: str) -> str:
        """Return the task of a copy that this daemon has asked for; "": none is being made.

        :raise CloudError: the snapshot is gone. Other faults are not raised: the call that followed the task
            has reported them."""
        with self._lock:
            task = self._tasks.get(name, "")
        if not task:
            return ""
        ended, fault = driver.ex_tasks([task]).get(task, (True, None))
        if not ended:
            return task
        with self._lock:
            self._tasks.pop(name, None)
            if fault is None:
                self._made[name] = time.monotonic()
        if isinstance(fault, vim.fault.NotFound) and (error := classify(fault)) is not None:
            raise error
        return ""

    def _check_listed(self, name: str) -> None:
        """Check that no copy is about to be listed. :raise CloudError: one was just made, and is not listed
        yet."""
        with self._lock:
            ended = self._made.get(name)
            if ended is None:
                return
            if time.monotonic() - ended < _LISTED_SECONDS:
                raise CloudError(ErrorKind.STATE, "the copy is not listed yet")
            del self._made[name]

    def _thd_begin(self, driver: Driver, place: Place, name: str, source: FromSnapshot) -> Copying:
        disk, _, snapshot = source.id.partition("/")
        task = driver.storage.copy(place, disk, snapshot, name)._moId
        with self._lock:
            self._tasks[name] = task
        return Copying(task)


def _is_abandoned(disk: FirstClassDisk) -> bool:
    return disk.created < time.time() - _ABANDONED_SECONDS


def _thd_delete(driver: Driver, place: Place, copies: Iterable[FirstClassDisk]) -> None:
    """Begin to delete copies, without waiting: no VM has them, and any that remain are found again."""
    for disk in copies:
        with contextlib.suppress(*_BUSY):
            driver.storage.delete(place, disk.id)
