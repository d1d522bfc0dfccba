# SPDX-License-Identifier: Apache-2.0
"""Checks and conversions of LinuxContainerResources that several providers need."""

from __future__ import annotations

import re

from infranetes_common.errors import InvalidArgument
from infranetes_common.huge_pages import page_bytes
from infranetes_common.wire import cri

_FILE = re.compile(r"(?:cpu|memory|io|pids|hugetlb|cpuset|misc|rdma)\.[a-zA-Z0-9_.]{1,64}")
_MAX_VALUE = 256
# kubelet adds these to every container, or every one with limits, where the *node* has cgroup v2.
_BY_NODE = frozenset({"memory.high", "memory.min", "memory.oom.group", "memory.swap.max"})


def check_not_negative(limits: cri.LinuxContainerResources) -> None:
    """Check the limits that have no meaning below 0. :raise InvalidArgument: one is; names the field."""
    for field in ("cpu_period", "cpu_shares"):
        if getattr(limits, field) < 0:
            raise InvalidArgument(f"resources.{field} {getattr(limits, field)}: expected 0 or more")
    limit = limits.memory_limit_in_bytes
    if limit < -1:
        raise InvalidArgument(f"resources.memory_limit_in_bytes {limit}: expected 0 or more, or -1 for none")


def check(limits: cri.LinuxContainerResources) -> None:
    """Check the ranges of limits. :raise InvalidArgument: one is out of range; names the field."""
    check_not_negative(limits)
    if not -1000 <= limits.oom_score_adj <= 1000:
        raise InvalidArgument(f"resources.oom_score_adj {limits.oom_score_adj}: expected -1000 to 1000")


def check_files(limits: cri.LinuxContainerResources) -> None:
    """Check the limits that name files of a cgroup.

    :raise InvalidArgument: one is malformed; names the field."""
    for page in limits.hugepage_limits:
        page_bytes(page.page_size)
    for name, value in limits.unified.items():
        if not _FILE.fullmatch(name) or ".." in name or len(value) > _MAX_VALUE or not value.isprintable():
            raise InvalidArgument(
                f"resources.unified: {name[:80]!r} is not a file of a cgroup, or its value not one line"
            )


def check_unified(limits: cri.LinuxContainerResources) -> None:
    """Check limits for a VM without cgroup v2, where what kubelet adds for its node's sake has no effect.

    :raise InvalidArgument: somebody else asks for a file of cgroup v2."""
    if others := sorted(set(limits.unified) - _BY_NODE):
        raise InvalidArgument(f"resources.unified: {others[0][:80]}: the VM has no cgroup v2")


def cpu_weight(shares: int) -> int:
    """Convert cgroup v1's shares (2 to 262144) to cgroup v2's weight (1 to 10000), as Kubernetes does."""
    return 1 + (min(max(shares, 2), 262144) - 2) * 9999 // 262142


_FIELDS = ("cpu_period", "cpu_quota", "cpu_shares", "memory_limit_in_bytes", "memory_swap_limit_in_bytes",
           "oom_score_adj", "cpuset_cpus", "cpuset_mems")  # fmt: skip


def overlay(limits: cri.LinuxContainerResources, changes: cri.LinuxContainerResources) -> None:
    """Apply `changes` to `limits`; fields that are 0 or empty in `changes` stay as they are."""
    for field in _FIELDS:
        if getattr(changes, field):
            setattr(limits, field, getattr(changes, field))
    if changes.memory_limit_in_bytes and not changes.memory_swap_limit_in_bytes:
        limits.memory_swap_limit_in_bytes = changes.memory_limit_in_bytes  # no swap unless a limit is set
    limits.unified.update(changes.unified)
    _overlay_pages(limits, changes)


def merge(limits: cri.LinuxContainerResources, changes: cri.LinuxContainerResources) -> None:
    """As `overlay`, for a runtime where every limit is only what was set: none follows from another."""
    others = cri.LinuxContainerResources()
    others.CopyFrom(changes)
    others.ClearField("hugepage_limits")
    if changes.unified:
        limits.ClearField("unified")
    limits.MergeFrom(others)
    _overlay_pages(limits, changes)


def _overlay_pages(limits: cri.LinuxContainerResources, changes: cri.LinuxContainerResources) -> None:
    sizes = {page.page_size for page in changes.hugepage_limits}
    unchanged = [page for page in limits.hugepage_limits if page.page_size not in sizes]
    pages = [*unchanged, *changes.hugepage_limits]
    limits.ClearField("hugepage_limits")
    limits.hugepage_limits.extend(pages)
