# SPDX-License-Identifier: Apache-2.0
"""Launches that this process has started and that have not ended: clones and first power-ons.

A full clone takes minutes, so no thread waits for it: its task is looked at when VMs are listed. A restarted
daemon knows no tasks and needs none, as VMs have their names from the start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import attrs
from pyVmomi import vmodl

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.errors import classify
from infranetes.providers.cloud.vsphere.pyvmomi_types import ManagedObject, Task

_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4)  # seconds between looks at a new task: most faults come early
_MANY_PAUSES = (*_PAUSES, 0.5, 0.5, 0.5, 0.5, 0.5)


@attrs.define
class Launch:
    """One VM that is being launched."""

    name: str
    task: str  # the id of its current task
    sandbox_id: str
    created_at: float
    size: str
    running: bool = False
    fault: CloudError | None = None  # why it will never run
    host: ManagedObject | None = None  # that was chosen for it; None: vCenter chooses


class Launches:
    """The launches of this process. Methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[str, Launch] = {}

    def get(self, name: str) -> Launch | None:
        """Return the launch of a VM's name."""
        with self._lock:
            return self._all.get(name)

    def put(self, launch: Launch) -> None:
        """Add a launch."""
        with self._lock:
            self._all[launch.name] = launch

    def forget(self, name: str) -> None:
        """Remove a launch that has ended: the inventory shows what became of it."""
        with self._lock:
            self._all.pop(name, None)

    def all(self) -> list[Launch]:
        """Return all launches that are running or have failed."""
        with self._lock:
            return list(self._all.values())

    def _thd_begin(self, driver: Driver, launch: Launch, begin: Callable[[], Task]) -> CloudError | None:
        """Begin a launch's next step, and wait a moment for its end. Returns its fault, if it failed so soon.

        :param begin: asks for the step and returns its task."""
        launch.running, launch.fault = False, None
        try:
            launch.task = begin()._moId
        except vmodl.MethodFault as refusal:
            return _to_cloud_error(refusal)
        launch.running = True
        self.put(launch)
        ended, fault = _thd_wait_briefly(driver, launch.task)
        if ended:
            launch.running = False
            self.forget(launch.name)
        return fault

    def _thd_look(self, driver: Driver) -> None:
        """Find out which tasks have ended."""
        running = [launch for launch in self.all() if launch.running]
        if not running:
            return
        tasks = driver.ex_tasks(launch.task for launch in running)
        for launch in running:
            ended, fault = tasks.get(launch.task, (True, None))
            if ended:
                _end(launch, fault)
                if launch.fault is None:
                    self.forget(launch.name)


def _end(launch: Launch, fault: Exception | None) -> None:
    launch.fault = _to_cloud_error(fault) if fault is not None else None
    if launch.fault is not None and launch.fault.kind is ErrorKind.CONFLICT:
        launch.fault = None  # another call has created the VM
    launch.running = False


def _thd_wait_briefly(driver: Driver, task: str, patient: bool = False) -> tuple[bool, CloudError | None]:
    """Wait a moment for a task, a longer one if `patient`. Returns whether it ended, and its fault."""
    for pause in _MANY_PAUSES if patient else _PAUSES:
        ended, fault = driver.ex_tasks([task]).get(task, (True, None))
        if ended:
            return True, _to_cloud_error(fault) if fault is not None else None
        time.sleep(pause)
    return False, None


def _to_cloud_error(fault: Exception) -> CloudError:
    return classify(fault) or CloudError(ErrorKind.UNEXPECTED, f"a task failed: {type(fault).__name__}")
