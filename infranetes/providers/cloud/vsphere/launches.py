"""What this process has asked vCenter to do and does not know the end of: clones and first power-ons.

A full clone takes minutes, so nobody waits for it in a thread: its task is looked at when VMs are listed. A
daemon that starts anew knows no tasks, and needs none: VMs have their names from the start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import attrs
from pyVmomi import vmodl

from infranetes.providers.cloud.interface import CloudError, Trouble
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.errors import judge

_LOOKS = (0.02, 0.05, 0.1, 0.2, 0.4)  # seconds between the first looks at a task: most faults are early
_LONG_LOOKS = (*_LOOKS, 0.5, 0.5, 0.5, 0.5, 0.5)


@attrs.define
class Launch:
    """One VM on its way."""

    name: str
    task: str  # its id
    sandbox_id: str
    created_at: float
    size: str
    running: bool = False
    fault: CloudError | None = None  # why it will never run


class Launches:
    """Those of this process. Methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[str, Launch] = {}

    def get(self, name: str) -> Launch | None:
        """What is under way for a name."""
        with self._lock:
            return self._all.get(name)

    def put(self, launch: Launch) -> None:
        """Something was begun."""
        with self._lock:
            self._all[launch.name] = launch

    def forget(self, name: str) -> None:
        """It has ended, and what there is of it shows in the inventory."""
        with self._lock:
            self._all.pop(name, None)

    def all(self) -> list[Launch]:
        """All that are under way or have failed."""
        with self._lock:
            return list(self._all.values())

    def _thd_begin(self, driver: Driver, launch: Launch, begin: Callable[[], Any]) -> CloudError | None:
        """Begin a launch's next step, and look whether it ends soon.

        :param begin: asks for it and returns its task. :return: why it failed, if it is known to have."""
        launch.running, launch.fault = False, None
        try:
            launch.task = begin()._moId
        except vmodl.MethodFault as refusal:
            return _judged(refusal)
        launch.running = True
        self.put(launch)
        ended, fault = _thd_glance(driver, launch.task)
        if ended:
            launch.running = False
            self.forget(launch.name)
        return fault

    def _thd_look(self, driver: Driver) -> None:
        """See which tasks have ended."""
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


def _end(launch: Launch, fault: object) -> None:
    launch.fault = _judged(fault) if fault is not None else None
    if launch.fault is not None and launch.fault.trouble is Trouble.CONFLICT:
        launch.fault = None  # another call's VM of the same name: it is there
    launch.running = False


def _thd_glance(driver: Driver, task: str, patient: bool = False) -> tuple[bool, CloudError | None]:
    """Whether a task ends soon, and its fault."""
    for pause in _LONG_LOOKS if patient else _LOOKS:
        ended, fault = driver.ex_tasks([task]).get(task, (True, None))
        if ended:
            return True, _judged(fault) if fault is not None else None
        time.sleep(pause)
    return False, None


def _judged(fault: object) -> CloudError:
    return judge(fault) or CloudError(Trouble.BROKEN, f"a task failed: {type(fault).__name__}")
