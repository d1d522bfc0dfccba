# SPDX-License-Identifier: Apache-2.0
"""Launches that this process has started and that have not ended: clones and first power-ons.

A clone is powered on by vCenter itself. It takes seconds, or minutes if it is a full one, so no thread waits
for it: all tasks are looked at together, soon after they were begun and whenever VMs are listed. A restarted
daemon knows no tasks and needs none, as VMs have their names from the start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence, Set

import attrs
from pyVmomi import vmodl

from infranetes.providers.cloud.interface import CloudError, ErrorKind, LaunchRequest
from infranetes.providers.cloud.vsphere.driver import Driver, Tasks
from infranetes.providers.cloud.vsphere.errors import classify
from infranetes.providers.cloud.vsphere.pyvmomi_types import ManagedObject, Task

_EARLY_SECONDS = 0.8  # most faults are reported within this time
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4)  # seconds between looks at a task that ends soon
_MANY_PAUSES = (*_PAUSES, 0.5, 0.5, 0.5, 0.5, 0.5)


@attrs.define
class VmLaunch:
    """One VM that is being launched.

    :ivar request: what was asked for; None: only that a VM be powered on.
    :ivar address: that the node has given it; "": none. :ivar console: whether a file has its console."""

    name: str
    sandbox_id: str
    created_at: float
    size: str
    request: LaunchRequest | None = attrs.field(default=None, repr=False)
    address: str = ""
    console: bool = False
    task: str = ""  # the id of its current task; "": it is being asked for
    begun_at: float = 0.0  # by a monotonic clock
    running: bool = False
    looked_at: bool = False  # whether its task was looked at after early faults would show
    fault: CloudError | None = None  # why it will never run
    host: ManagedObject | None = None  # the host that was chosen for it; None: vCenter chooses
    polled_until: float = 0.0  # until when `_thd_poll_launch` is called, by a monotonic clock
    was_lost: bool = False  # an earlier attempt did not find something that the request names

    @property
    def may_be_made_anew(self) -> bool:
        """Whether it may end well when it is begun again, perhaps on another host."""
        if self.fault is None or self.request is None:
            return False
        is_lost = self.fault.kind is ErrorKind.NOT_FOUND
        return self.fault.kind is ErrorKind.TRANSIENT or (is_lost and not self.was_lost)

    @property
    def has_failed(self) -> bool:
        """Whether it has failed for good."""
        is_polled = time.monotonic() < self.polled_until
        return self.fault is not None and not (is_polled and self.may_be_made_anew)


class Launches:
    """The launches of this process. Methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[str, VmLaunch] = {}

    def get(self, name: str) -> VmLaunch | None:
        """Return the launch of a VM's name."""
        with self._lock:
            return self._all.get(name)

    def put(self, launch: VmLaunch) -> None:
        """Add a launch."""
        with self._lock:
            self._all[launch.name] = launch

    def forget(self, name: str) -> None:
        """Remove a launch that has ended: the inventory shows what became of it."""
        with self._lock:
            self._all.pop(name, None)

    def all(self) -> list[VmLaunch]:
        """Return all launches that are running or have failed."""
        with self._lock:
            return list(self._all.values())

    def cloned(self) -> Set[str]:
        """Return the names of VMs whose clones have ended well, and that were not seen running since."""
        with self._lock:
            return frozenset(
                each.name for each in self._all.values() if not each.running and each.fault is None
            )

    def _thd_begin(self, launch: VmLaunch, begin: Callable[[], Task]) -> CloudError | None:
        """Begin a launch's next step. Returns vCenter's fault, if that was refused.

        :param begin: asks for the step and returns its task."""
        launch.task, launch.running, launch.looked_at, launch.fault = "", True, False, None
        self.put(launch)  # first, as vCenter may show the VM at any time
        try:
            task = begin()._moId
        except vmodl.MethodFault as refusal:
            launch.running = False
            self.forget(launch.name)
            return _to_cloud_error(refusal)
        except BaseException:  # the task's id is not known
            launch.running = False
            self.forget(launch.name)
            raise
        with self._lock:
            launch.task, launch.begun_at = task, time.monotonic()
        return None

    def running(self) -> Sequence[VmLaunch]:
        """Return the launches whose tasks have not ended as far as is known, as they are now."""
        with self._lock:
            return [attrs.evolve(each) for each in self._all.values() if each.running and each.task]

    def _thd_look(self, driver: Driver) -> None:
        """Find out which tasks have ended, in one call."""
        running = self.running()
        if running:
            now, tasks = time.monotonic(), driver.ex_tasks(each.task for each in running)
            self.record({each.task: tasks.get(each.task, (True, None)) for each in running}, now)

    def record(self, tasks: Tasks, looked_at: float) -> None:
        """Record how far tasks are. :param looked_at: when they were asked for, by a monotonic clock."""
        with self._lock:
            for launch in list(self._all.values()):
                if not launch.running or launch.task not in tasks:
                    continue
                ended, fault = tasks[launch.task]
                launch.looked_at = launch.looked_at or looked_at - launch.begun_at >= _EARLY_SECONDS
                if ended and not _end(launch, fault):
                    del self._all[launch.name]


def _end(launch: VmLaunch, fault: Exception | None) -> bool:
    """Record that a launch's task has ended. Returns whether the launch is still of interest: if it is not,
    lists tell what there is."""
    launch.running = False
    launch.fault = _to_cloud_error(fault) if fault is not None else None
    if launch.fault is None:
        return launch.request is not None
    if launch.fault.kind is ErrorKind.CONFLICT:  # another call has created the VM
        return False
    # A VM that can't be powered on now may still be in the process of being cloned, or already be on.
    return launch.request is not None or launch.fault.kind is not ErrorKind.TRANSIENT


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
