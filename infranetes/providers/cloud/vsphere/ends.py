# SPDX-License-Identifier: Apache-2.0
"""Ends of VMs: vCenter deletes none that is on, so one is powered off first. No thread waits for that.

Each call takes one step, and the caller calls again until vCenter has taken the deletion:

VM       what a step does
on       asks to power it off; once more if it is still on after `_OFF_SECONDS`
off      takes first class disks off it, then asks to delete it

The next daemon finds the VM as it is, and begins anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence, Set

import attrs
from pyVmomi import vim

from infranetes.providers.cloud.interface import ErrorKind
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.hardware import DEVICES, AttachedDisk, hardware
from infranetes.providers.cloud.vsphere.launches import _thd_wait_briefly
from infranetes.providers.cloud.vsphere.storage import disk_id

_OFF_SECONDS = 10.0  # after this, a VM is off, unless powering it off has failed
_POWER = "runtime.powerState"


@attrs.define
class _End:
    off_asked_at: float | None = None
    is_taken: bool = False  # vCenter has accepted the request to delete it


class Ends:
    """The ends that this process was asked for, by VMs' names. Methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[str, _End] = {}

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._all

    def taken(self) -> Set[str]:
        """Return the names of VMs whose deletion vCenter has taken, and no list has confirmed."""
        with self._lock:
            return frozenset(name for name, end in self._all.items() if end.is_taken)

    def forget(self, name: str) -> None:
        """Forget a VM that is gone."""
        with self._lock:
            self._all.pop(name, None)

    def _thd_step(self, driver: Driver, name: str, id: str, is_off: bool) -> bool:
        """Take the next step of a VM's end. Returns whether vCenter has taken its deletion.

        :param id: the VM's at vCenter. :param is_off: whether it is known to be off.
        :raise vmodl.fault.ManagedObjectNotFound: vCenter has no VM of this id."""
        with self._lock:
            end = self._all.setdefault(name, _End())
        if not is_off and end.off_asked_at is None and _thd_asked_off(driver, id, end):
            return False
        [(_, properties)] = driver.vm_properties([driver.vm(id)], _POWER, DEVICES)
        if properties.get(_POWER) != vim.VirtualMachine.PowerState.poweredOff:
            if end.off_asked_at is None or time.monotonic() - end.off_asked_at >= _OFF_SECONDS:
                _thd_asked_off(driver, id, end)
            return False
        if not _thd_detached(driver, id, hardware(properties.get(DEVICES) or ()).disks):
            return False
        driver.vm(id).Destroy_Task()
        end.is_taken = True
        return True


def _thd_asked_off(driver: Driver, id: str, end: _End) -> bool:
    """Ask to power a VM off. Returns False if it is off."""
    try:
        driver.vm(id).PowerOffVM_Task()
    except vim.fault.InvalidPowerState:
        return False
    end.off_asked_at = time.monotonic()
    return True


def _thd_detached(driver: Driver, id: str, attached: Sequence[AttachedDisk]) -> bool:
    """Take all first class disks from a VM that is off and will be deleted: without its flag, vCenter would
    delete a disk's file with the VM. Returns whether it had none; else, look again."""
    for disk in attached:
        task = driver.vm(id).DetachDisk_Task(disk_id(disk.id))
        _, fault = _thd_wait_briefly(driver, task._moId)
        if fault is not None and fault.kind not in (ErrorKind.TRANSIENT, ErrorKind.NOT_FOUND):
            raise fault
    return not attached
