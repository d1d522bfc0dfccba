# SPDX-License-Identifier: Apache-2.0
"""Checks and conversions of LinuxContainerResources that several providers need."""

from __future__ import annotations

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri


def check_not_negative(limits: cri.LinuxContainerResources) -> None:
    """Check the limits that have no meaning below 0. :raise InvalidArgument: one is; names the field."""
    for field in ("cpu_period", "cpu_shares", "memory_limit_in_bytes"):
        if getattr(limits, field) < 0:
            raise InvalidArgument(f"resources.{field} {getattr(limits, field)}: expected 0 or more")


def check(limits: cri.LinuxContainerResources) -> None:
    """Check the ranges of limits. :raise InvalidArgument: one is out of range; names the field."""
    check_not_negative(limits)
    if not -1000 <= limits.oom_score_adj <= 1000:
        raise InvalidArgument(f"resources.oom_score_adj {limits.oom_score_adj}: expected -1000 to 1000")


def cpu_weight(shares: int) -> int:
    """Convert cgroup v1's shares (2 to 262144) to cgroup v2's weight (1 to 10000), as Kubernetes does."""
    return 1 + (min(max(shares, 2), 262144) - 2) * 9999 // 262142
