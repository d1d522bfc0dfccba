# SPDX-License-Identifier: Apache-2.0
"""The limits that were changed after a container's creation.

Docker knows only those that were changed through it; limits that were written to cgroups are stored here for
a restarted agent.
"""

from __future__ import annotations

from pathlib import Path

from infranetes_common.errors import FailedPrecondition
from infranetes_common.wire import cri
from vmserver.containers.docker.message_store import MessageStore


class LimitStore(MessageStore[cri.LinuxContainerResources]):
    """The changed limits of each container.

    :param directory: see `MessageStore`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, cri.LinuxContainerResources)

    def put(self, id: str, message: cri.LinuxContainerResources) -> None:
        """Add changes to the stored ones. :raise FailedPrecondition: they can't be written."""
        limits = cri.LinuxContainerResources()
        if (before := self.get(id)) is not None:
            limits.CopyFrom(before)
        overlay(limits, message)
        try:
            super().put(id, limits)
        except OSError as error:
            raise FailedPrecondition(f"the limits of container {id} can't be written: {error}") from error


_FIELDS = ("cpu_period", "cpu_quota", "cpu_shares", "memory_limit_in_bytes", "memory_swap_limit_in_bytes",
           "oom_score_adj", "cpuset_cpus", "cpuset_mems")  # fmt: skip


def overlay(limits: cri.LinuxContainerResources, changes: cri.LinuxContainerResources) -> None:
    """Apply `changes` to `limits`; fields that are 0 or empty in `changes` stay as they are."""
    for field in _FIELDS:
        if getattr(changes, field):
            setattr(limits, field, getattr(changes, field))
    if changes.memory_limit_in_bytes and not changes.memory_swap_limit_in_bytes:
        limits.memory_swap_limit_in_bytes = changes.memory_limit_in_bytes  # no swap unless it is set
    limits.unified.update(changes.unified)
    sizes = {page.page_size for page in changes.hugepage_limits}
    unchanged = [page for page in limits.hugepage_limits if page.page_size not in sizes]
    pages = [*unchanged, *changes.hugepage_limits]
    limits.ClearField("hugepage_limits")
    limits.hugepage_limits.extend(pages)
