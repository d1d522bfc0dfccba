"""The limits that were put in force after a container was made, kept until it is gone.

Docker knows of those that went through it alone; what was written to cgroups is kept here for agents to come.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from infranetes_common import cri
from infranetes_common.errors import FailedPrecondition


class Limits:
    """:param directory: one small file for each container; made when first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, Any] = {}

    def load(self) -> None:
        """Take up what an earlier agent kept."""
        for path in self._directory.glob("*"):
            try:
                self._known[path.name] = cri.LinuxContainerResources.FromString(path.read_bytes())
            except (OSError, DecodeError):
                continue

    def of(self, id: str) -> Any:
        """LinuxContainerResources, or None: nothing was changed."""
        return self._known.get(id)

    def put(self, id: str, later: Any) -> None:
        """Put `later` over what is kept. :raise FailedPrecondition: it can't be kept."""
        limits = cri.LinuxContainerResources()
        if id in self._known:
            limits.CopyFrom(self._known[id])
        overlay(limits, later)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._directory / id).write_bytes(limits.SerializeToString())
        except OSError as error:
            raise FailedPrecondition(f"the limits of container {id} can't be kept: {error}") from error
        self._known[id] = limits

    def drop(self, id: str) -> None:
        """Its container is gone. Unknown: nothing to do."""
        if self._known.pop(id, None) is not None:
            (self._directory / id).unlink(missing_ok=True)


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
