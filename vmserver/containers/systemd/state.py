"""What systemd says of a container's unit as a ContainerState.

ActiveState   SubState         and                       CRI       reason
activating    (any)                                      CREATED   (its program is not running yet)
active        running                                    RUNNING
deactivating  (any)            it was RUNNING            RUNNING   (what it left behind is being killed)
active        exited                                     EXITED    Completed
failed        failed           its program was executed  EXITED    OOMKilled, Error
failed        failed           it was not                EXITED    ContainerCannotRun, StartError

A program that ends at once may have ended before systemd calls the unit active.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infranetes_common import cri

CANNOT_RUN = "ContainerCannotRun"
START_ERROR = 128  # the exit code that kubelet knows for a container that could not be started
CLD_EXITED = 1
EXIT_EXEC = 203

# systemd.exec(5), "Process Exit Codes": what systemd could not do before the program, which may use them too.
_BEFORE = range(200, 244)


def may_never_have_run(unit: Mapping[str, Any], service: Mapping[str, Any]) -> bool:
    """Whether it may have ended before its program was executed; systemd's entry in the journal says so."""
    return (
        unit["ActiveState"] == "failed"
        and not unit["ActiveEnterTimestamp"]
        and service["ExecMainStatus"] in _BEFORE
        and service["ExecMainCode"] in (0, CLD_EXITED)
    )


def apply(state: Any, unit: Mapping[str, Any], service: Mapping[str, Any], never_ran: str = "") -> None:
    """Bring `state`, a ContainerState, up to the properties of the Unit and the Service.

    :param never_ran: why its program was never executed, where it was not.
    """
    active = unit["ActiveState"]
    if active == "activating":
        return
    if (active == "active" and unit["SubState"] == "running") or (
        active == "deactivating" and state.state != cri.CONTAINER_CREATED
    ):
        state.state = cri.CONTAINER_RUNNING
        state.started_at = max(service["ExecMainStartTimestamp"] * 1000, state.created_at)
        state.pid = service["MainPID"] or state.pid
        return
    if active not in ("active", "failed"):
        return
    state.state = cri.CONTAINER_EXITED
    state.pid = 0
    state.started_at = max(service["ExecMainStartTimestamp"] * 1000, state.created_at)
    state.finished_at = max(service["ExecMainExitTimestamp"] * 1000, state.started_at)
    status = service["ExecMainStatus"]
    if never_ran or not service["ExecMainStartTimestamp"]:
        state.exit_code, state.reason = START_ERROR, "StartError"
        state.message = never_ran or f"systemd could not start it: {service['Result']}"
        return
    state.exit_code = status if service["ExecMainCode"] == CLD_EXITED else 128 + status
    if service["Result"] == "oom-kill":
        state.exit_code = state.exit_code or 137
        state.reason = "OOMKilled"
    else:
        state.reason = "Error" if state.exit_code else "Completed"


def cannot_run(state: Any, code: int, message: str, now: int) -> None:
    """Its command can't be run."""
    state.state = cri.CONTAINER_EXITED
    state.started_at = state.started_at or now
    state.finished_at = max(state.finished_at, state.started_at)
    state.exit_code, state.reason, state.message = code, CANNOT_RUN, message
    state.pid = 0


def lost(state: Any, now: int) -> None:
    """It ran, and systemd knows it no more."""
    state.state = cri.CONTAINER_EXITED
    state.finished_at = now
    state.exit_code, state.reason, state.pid = 137, "Error", 0
    state.message = "systemd knows its unit no more: the machine was started anew, or somebody removed it"
