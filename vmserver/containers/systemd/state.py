# SPDX-License-Identifier: Apache-2.0
"""Translation of a unit's properties to a ContainerState.

ActiveState   SubState  condition                 CRI       reason
activating    (any)                               CREATED   (the program does not run yet)
active        running                             RUNNING
deactivating  (any)     it was RUNNING            RUNNING   (its remaining processes are being killed)
active        exited                              EXITED    Completed
failed        failed    its program was executed  EXITED    OOMKilled, Error
failed        failed    it was not                EXITED    ContainerCannotRun, StartError

A short-lived program may end before systemd calls the unit active.
"""

from __future__ import annotations

import attrs

from infranetes_common.systemd_bus import Properties
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages

CANNOT_RUN = "ContainerCannotRun"
START_ERROR = 128  # the exit code by which kubelet knows a container that could not be started
CLD_EXITED = 1
EXIT_EXEC = 203

# systemd.exec(5), "Process Exit Codes": systemd failed before it executed the program. The program itself may
# exit with these codes too.
_SYSTEMD_FAILURES = range(200, 244)


@attrs.frozen
class Unit:
    """The properties of a unit that are used, of the interface org.freedesktop.systemd1.Unit."""

    active_state: str
    sub_state: str
    active_enter_usec: int  # when the unit became active; 0 if it never did
    invocation_id: bytes

    @classmethod
    def of(cls, properties: Properties) -> Unit:
        """Pick the properties."""
        return cls(
            active_state=str(properties["ActiveState"]),
            sub_state=str(properties["SubState"]),
            active_enter_usec=int(properties["ActiveEnterTimestamp"]),
            invocation_id=bytes(properties["InvocationID"]),
        )


@attrs.frozen
class Service:
    """The properties of a service that are used, of the interface org.freedesktop.systemd1.Service."""

    main_pid: int
    main_code: int  # CLD_EXITED and the like of waitid(2); 0 before the end
    main_status: int  # an exit code, or a signal's number
    main_start_usec: int
    main_exit_usec: int
    result: str

    @classmethod
    def of(cls, properties: Properties) -> Service:
        """Pick the properties."""
        return cls(
            main_pid=int(properties["MainPID"]),
            main_code=int(properties["ExecMainCode"]),
            main_status=int(properties["ExecMainStatus"]),
            main_start_usec=int(properties["ExecMainStartTimestamp"]),
            main_exit_usec=int(properties["ExecMainExitTimestamp"]),
            result=str(properties["Result"]),
        )


def may_never_have_run(unit: Unit, service: Service) -> bool:
    """Return whether the unit may have failed before its program was executed; the journal tells for sure."""
    return (
        unit.active_state == "failed"
        and not unit.active_enter_usec
        and service.main_status in _SYSTEMD_FAILURES
        and service.main_code in (0, CLD_EXITED)
    )


def apply(state: messages.ContainerState, unit: Unit, service: Service, never_ran: str = "") -> None:
    """Update `state` from a unit's properties.

    :param never_ran: why the program was never executed; "" if it was.
    """
    active = unit.active_state
    if active == "activating":
        return
    if (active == "active" and unit.sub_state == "running") or (
        active == "deactivating" and state.state != cri.CONTAINER_CREATED
    ):
        state.state = cri.CONTAINER_RUNNING
        state.started_at = max(service.main_start_usec * 1000, state.created_at)
        state.pid = service.main_pid or state.pid
        return
    if active not in ("active", "failed"):
        return
    state.state = cri.CONTAINER_EXITED
    state.pid = 0
    state.started_at = max(service.main_start_usec * 1000, state.created_at)
    state.finished_at = max(service.main_exit_usec * 1000, state.started_at)
    if never_ran or not service.main_start_usec:
        state.exit_code, state.reason = START_ERROR, "StartError"
        state.message = never_ran or f"systemd could not start it: {service.result}"
        return
    state.exit_code = service.main_status if service.main_code == CLD_EXITED else 128 + service.main_status
    if service.result == "oom-kill":
        state.exit_code = state.exit_code or 137
        state.reason = "OOMKilled"
    else:
        state.reason = "Error" if state.exit_code else "Completed"


def cannot_run(state: messages.ContainerState, code: int, message: str, now: int) -> None:
    """Update `state` for a command that can't be executed."""
    state.state = cri.CONTAINER_EXITED
    state.started_at = state.started_at or now
    state.finished_at = max(state.finished_at, state.started_at)
    state.exit_code, state.reason, state.message = code, CANNOT_RUN, message
    state.pid = 0


def lost(state: messages.ContainerState, now: int) -> None:
    """Update `state` for a running unit that systemd no longer has."""
    state.state = cri.CONTAINER_EXITED
    state.finished_at = now
    state.exit_code, state.reason, state.pid = 137, "Error", 0
    state.message = "systemd no longer has its unit: the VM was rebooted, or somebody removed the unit"
