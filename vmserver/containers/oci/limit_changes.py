# SPDX-License-Identifier: Apache-2.0
"""Changes of a container's limits."""

from __future__ import annotations

from pathlib import Path

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers import resources
from vmserver.containers.oci.bundle import Bundles
from vmserver.containers.oci.container import OciContainer
from vmserver.containers.oci.index import ContainerIndex
from vmserver.containers.oci.limits import update_resources
from vmserver.containers.oci.runtime import Crun
from vmserver.stats import container as stats


async def change_limits(
    index: ContainerIndex,
    bundles: Bundles,
    crun: Crun,
    container: OciContainer,
    changes: cri.LinuxContainerResources,
) -> None:
    """Change the limits that are not 0 or empty. The caller holds the container's lock.

    :raise InvalidArgument: a limit is invalid, or can't be set; names the field."""
    state = container.record.state
    limits = cri.LinuxContainerResources()
    limits.CopyFrom(state.resources)
    kernel = await bundles.kernel()
    usage = stats.usage(state.pid) if container.exists and changes.memory_limit_in_bytes else None
    in_use = usage.memory.working_set if usage is not None else 0
    spec = update_resources(limits, changes, kernel, in_use)
    resources.overlay(limits, changes)
    if limits == state.resources:
        return
    if container.exists:
        await crun.update(container.engine_id, spec)
        if limits.oom_score_adj != state.resources.oom_score_adj:
            _adjust_oom_score(state.pid, limits.oom_score_adj)
    elif not container.over:
        await bundles.limit(container, limits)
    state.resources.CopyFrom(limits)
    container.record.config.linux.resources.CopyFrom(limits)
    await index.note(container)
    index.notify(container)


def _adjust_oom_score(pid: int, score: int) -> None:
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(score))
    except (ProcessLookupError, FileNotFoundError):
        pass  # it has ended
    except OSError as error:
        raise InvalidArgument(f"resources.oom_score_adj {score}: {error.strerror}") from error
