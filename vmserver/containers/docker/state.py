# SPDX-License-Identifier: Apache-2.0
"""Translation of Docker's ContainerInspect to a ContainerState.

Docker                            CRI       reason
created                           CREATED
created, with an error            EXITED    ContainerCannotRun (126, 127), else StartError (128)
running, paused, restarting       RUNNING
exited, dead, removing            EXITED    Completed (0), OOMKilled, else Error
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from vmserver.containers.docker.api import ContainerInspect, HostConfig
from vmserver.containers.docker.kernel import KILLED
from vmserver.containers.docker.names import LABEL_ID, LABEL_RESOURCES
from vmserver.containers.jsonlog import parse_time

START_ERROR = 128  # the exit code that kubelet expects of a container that could not be started

_RUNNING = ("running", "paused", "restarting")


def container_state(container: ContainerInspect) -> messages.ContainerState:
    """Translate it."""
    config, state, host = container["Config"], container["State"], container["HostConfig"]
    result = messages.ContainerState(
        id=config["Labels"][LABEL_ID],
        created_at=_time(container["Created"]),
        image_id=container["Image"],
    )
    result.resources.CopyFrom(_resources(config["Labels"], host))
    status = state["Status"]
    if status == "created" and not state["Error"]:
        result.state = cri.CONTAINER_CREATED
        return result
    result.started_at = _time(state["StartedAt"])
    if status in _RUNNING:
        result.state = cri.CONTAINER_RUNNING
        result.pid = state["Pid"]
        return result
    result.state = cri.CONTAINER_EXITED
    # Docker sets the start's time when it learns of the start, maybe after a short-lived container has ended.
    result.finished_at = max(_time(state["FinishedAt"]), result.started_at)
    result.exit_code = state["ExitCode"]
    result.message = state["Error"]
    if status == "created" or (state["Error"] and not result.started_at):
        # It never ran. Docker does not record when the attempt was made, so use the time of the creation.
        result.exit_code = result.exit_code or START_ERROR
        result.reason = "ContainerCannotRun" if result.exit_code in (126, 127) else "StartError"
        result.started_at = result.started_at or result.created_at
        result.finished_at = result.finished_at or result.started_at
    elif state["OOMKilled"] and result.exit_code == KILLED:  # Docker says it of any process
        result.reason = "OOMKilled"
    else:
        result.reason = "Error" if result.exit_code else "Completed"
    return result


def _time(text: str) -> int:
    return 0 if text.startswith("0001-") else parse_time(text)


def _resources(labels: Mapping[str, str], host: HostConfig) -> cri.LinuxContainerResources:
    """Return the limits in force: those of the creation, overlaid with what Docker has now."""
    limits = cri.LinuxContainerResources.FromString(base64.b64decode(labels.get(LABEL_RESOURCES, "")))
    limits.cpu_period = host.get("CpuPeriod") or 0
    limits.cpu_quota = host.get("CpuQuota") or 0
    limits.cpu_shares = host.get("CpuShares") or 0
    limits.memory_limit_in_bytes = host.get("Memory") or 0
    limits.memory_swap_limit_in_bytes = host.get("MemorySwap") or 0
    limits.cpuset_cpus = host.get("CpusetCpus") or ""
    limits.cpuset_mems = host.get("CpusetMems") or ""
    return limits
