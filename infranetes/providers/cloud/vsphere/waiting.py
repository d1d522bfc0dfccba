# SPDX-License-Identifier: Apache-2.0
"""The power of VMs that run, and VMs that wait until they are started: they are off, with all that a VM has
but an identity.

What the agent erases of guestinfo is there again when the VM is off: vCenter keeps what it was told itself.
"""

from __future__ import annotations

from pyVmomi import vim

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere import specs
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.launches import _thd_wait_briefly
from infranetes.providers.cloud.vsphere.pyvmomi_types import Task


def _thd_power_off(driver: Driver, id: str) -> None:
    """Ask to power a VM off, at once: its guest has nothing to lose. Idempotent."""
    try:
        driver.vm(id).PowerOffVM_Task()
    except vim.fault.InvalidPowerState:
        return


def _thd_press(driver: Driver, id: str) -> None:
    """Ask a VM's guest to power off, which VMware Tools in it do: vSphere has no power button.

    :raise CloudError: `ErrorKind.STATE`: it is off, or VMware Tools do not run in it yet."""
    try:
        driver.vm(id).ShutdownGuest()
    except (vim.fault.ToolsUnavailable, vim.fault.InvalidPowerState) as fault:
        raise CloudError(ErrorKind.STATE, f"VM {id} can't be asked to power off: {fault.msg}") from None


def _thd_has_identity(driver: Driver, id: str, content: bytes) -> bool:
    """Return whether a VM that is off has an identity, or b"": none; begin to change that if not."""
    [(_, extra)] = driver.ex_extra_config([driver.vm(id)]) or [("", {})]
    wanted = specs.identity_options(content)
    if {key: extra.get(key, "") for key in wanted} == wanted:
        return True
    _thd_done(driver, driver.vm(id).ReconfigVM_Task(specs.identity(content)))
    return False


def _thd_power_on(driver: Driver, id: str) -> None:
    """Ask to power a VM on, and wait a moment for a refusal, which is told soon.

    :raise CloudError: it is refused; `ErrorKind.STATE`: it is on already."""
    try:
        _thd_done(driver, driver.vm(id).PowerOnVM_Task())
    except vim.fault.InvalidPowerState as fault:
        raise CloudError(ErrorKind.STATE, f"VM {id} is not off: {fault.msg}") from None


def _thd_done(driver: Driver, task: Task) -> None:
    _, fault = _thd_wait_briefly(driver, task._moId)
    if fault is not None:
        raise fault
