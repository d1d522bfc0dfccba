# SPDX-License-Identifier: Apache-2.0
"""The changes of a container's record, without their effects. The tables are in `record`."""

from __future__ import annotations

from infranetes_common.wire import cri
from vmserver.containers.hooks import Hook
from vmserver.containers.oci.conmon import LOST_CODE, Exit
from vmserver.containers.oci.record import OciRecord, Phase

CANNOT_RUN = "ContainerCannotRun"
START_ERROR = 128  # the exit code by which kubelet knows a container that could not be started

LOST = "nothing is left of it: was the VM restarted?"


def starting(record: OciRecord, now: int) -> None:
    """Record that the container is about to be started: from now on it may have run."""
    record.phase = Phase.STARTING
    record.state.started_at = now


def not_started(record: OciRecord) -> None:
    """Record that a start failed before the container could run; it may be tried again."""
    record.phase = Phase.CREATED
    record.state.started_at = 0


def kept(record: OciRecord) -> None:
    """Record that it is held in a clone, and is of a pod that the clone is not."""
    record.phase = Phase.KEPT


def given(record: OciRecord, id: str, config: cri.ContainerConfig, hook: Hook | None, now: int) -> None:
    """Record that it is the container `id` of the clone's pod, which has not started it."""
    record.phase = Phase.GIVEN
    record.config, record.hook = config, hook
    record.state.id = id
    record.state.state = cri.CONTAINER_CREATED
    record.state.created_at, record.state.started_at = now, 0


def running(record: OciRecord, pid: int) -> None:
    """Record that its first process runs."""
    record.phase = Phase.RUNNING
    record.state.state = cri.CONTAINER_RUNNING
    record.state.pid = pid
    record.hook = None


def cannot_start(record: OciRecord, code: int, message: str, now: int) -> None:
    """Record that the container can't be started, for good. :param code: 126, 127, or `START_ERROR`."""
    state = record.state
    state.started_at = state.started_at or now
    state.reason = CANNOT_RUN if code in (126, 127) else "StartError"
    _over(record, code, now, message)


def ended(record: OciRecord, exit: Exit) -> None:
    """Record that its first process has ended."""
    record.state.reason = "OOMKilled" if exit.oom_killed else "Error" if exit.code else "Completed"
    _over(record, exit.code, exit.finished_at, exit.message)


def lost(record: OciRecord, now: int) -> None:
    """Record that the first process has ended in an unknown way."""
    record.state.reason = "Error"
    _over(record, LOST_CODE, now, LOST)


def _over(record: OciRecord, code: int, at: int, message: str) -> None:
    record.phase = Phase.ENDED
    state = record.state
    state.state = cri.CONTAINER_EXITED
    state.exit_code, state.finished_at, state.message = code, max(at, state.started_at), message
    state.pid = 0
