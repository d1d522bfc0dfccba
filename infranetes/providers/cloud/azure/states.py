# SPDX-License-Identifier: Apache-2.0
"""The states of VMs, by what Azure says of them:

provisioningState      power state                       InstanceState
Creating               running                           RUNNING
Creating               any other                         PENDING
Failed                 running                           RUNNING       something was changed, and failed
Failed                 any other that is known           ENDED
Deleting               any                               ENDED
any other              running                           RUNNING
any other              stopping, deallocating            PENDING       its system may be powering off
any other              stopped, deallocated              ENDED         STOPPED if we have deallocated it
any other              any other, or not known yet       PENDING       what ran stays RUNNING in the ledger
"""

from __future__ import annotations

from collections.abc import Sequence

from infranetes.providers.cloud.azure.names import last
from infranetes.providers.cloud.azure.resources import Status, Vm, VmProperties
from infranetes.providers.interface import InstanceState

_STOPPED = ("stopped", "deallocated")
_PREEMPTED = "preempted: Azure has reclaimed the spot VM, or it was deallocated"


def statuses_of(vm: Vm) -> Sequence[Status]:
    """Return what a VM's answer tells of its state; (): nothing."""
    return (vm["properties"].get("instanceView") or {}).get("statuses") or ()


def state_of(properties: VmProperties, statuses: Sequence[Status]) -> tuple[InstanceState, str]:
    """Return a VM's state, and why it has ended: see the table above."""
    power = power_of(statuses)
    provisioning = properties.get("provisioningState", "")
    if provisioning == "Deleting":
        return InstanceState.ENDED, "it is being deleted"
    if power == "running":
        return InstanceState.RUNNING, ""
    if provisioning == "Failed" and statuses:
        return InstanceState.ENDED, f"Azure failed to make it: {_failure(statuses)}"
    if power in _STOPPED and provisioning != "Creating":
        return InstanceState.ENDED, _PREEMPTED if _is_preempted(properties, power) else f"it is {power}"
    return InstanceState.PENDING, ""


def has_failed(properties: VmProperties, statuses: Sequence[Status]) -> bool:
    """Return whether a VM that has ended was ended by Azure."""
    return properties.get("provisioningState") == "Failed" or _is_preempted(properties, power_of(statuses))


def _is_preempted(properties: VmProperties, power: str) -> bool:
    return properties.get("priority") == "Spot" and power == "deallocated"


def power_of(statuses: Sequence[Status]) -> str:
    """Return a VM's power state; "": it is not known."""
    codes = [each.get("code", "") for each in statuses]
    return next((last(code) for code in codes if code.startswith("PowerState/")), "")


def _failure(statuses: Sequence[Status]) -> str:
    failed = [each for each in statuses if "/failed" in each.get("code", "").lower()]
    words = "; ".join(f"{last(each.get('code', ''))}: {each.get('message', '')}" for each in failed)
    return words or "it does not say why"
