"""The limits that were put in force after a container was made, kept until it is gone.

Docker knows of those that went through it alone; what was written to cgroups is kept here for agents to come.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infranetes_common import cri
from infranetes_common.errors import FailedPrecondition
from vmserver.containers.docker.kept import Kept


class Limits(Kept):
    """LinuxContainerResources by container; None where nothing was changed.

    :param directory: one small file for each container; made when first needed."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, cri.LinuxContainerResources)

    def put(self, id: str, later: Any) -> None:
        """Put `later` over what is kept. :raise FailedPrecondition: it can't be kept."""
        limits = cri.LinuxContainerResources()
        if (before := self.of(id)) is not None:
            limits.CopyFrom(before)
        overlay(limits, later)
        try:
            super().put(id, limits)
        except OSError as error:
            raise FailedPrecondition(f"the limits of container {id} can't be kept: {error}") from error


_FIELDS = ("cpu_period", "cpu_quota", "cpu_shares", "memory_limit_in_bytes", "memory_swap_limit_in_bytes",
           "oom_score_adj", "cpuset_cpus", "cpuset_mems")  # fmt: skip


def overlay(limits: Any, later: Any) -> None:
    """Put into `limits` what `later` has; fields left 0 there stay as they are."""
    for field in _FIELDS:
        if getattr(later, field):
            setattr(limits, field, getattr(later, field))
    if later.memory_limit_in_bytes and not later.memory_swap_limit_in_bytes:
        limits.memory_swap_limit_in_bytes = later.memory_limit_in_bytes  # no swap unless asked for
    limits.unified.update(later.unified)
    sizes = {page.page_size for page in later.hugepage_limits}
    kept = [page for page in limits.hugepage_limits if page.page_size not in sizes]
    pages = [*kept, *later.hugepage_limits]
    limits.ClearField("hugepage_limits")
    limits.hugepage_limits.extend(pages)
