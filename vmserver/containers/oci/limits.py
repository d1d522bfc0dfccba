# SPDX-License-Identifier: Apache-2.0
"""The limits of a container as the `linux.resources` of the OCI runtime-spec.

crun writes them to cgroups of either version. Source: OCI runtime-spec, config-linux.md.
"""

from __future__ import annotations

import re

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers import resources
from vmserver.containers.oci.kernel import Kernel

Spec = dict[str, object]
"""An object of the OCI runtime-spec."""

_PERIODS = (1000, 1_000_000)  # microseconds; the range that the kernel accepts
_PERIOD = 100_000  # the kernel's default
_LEAST_QUOTA = 1000
_SHARES = (2, 262_144)
_SET = re.compile(r"[0-9]{1,6}(?:-[0-9]{1,6})?(?:,[0-9]{1,6}(?:-[0-9]{1,6})?)*")
_MAX_SET = 4096


def check(limits: cri.LinuxContainerResources, kernel: Kernel) -> None:
    """Validate limits. :raise InvalidArgument: one can't be set; names the field."""
    resources.check(limits)
    resources.check_files(limits)
    if not kernel.cgroup2:
        resources.check_unified(limits)
    low, high = _PERIODS
    if limits.cpu_period and not low <= limits.cpu_period <= high:
        raise InvalidArgument(f"resources.cpu_period {limits.cpu_period}: expected {low} to {high}")
    if 0 < limits.cpu_quota < _LEAST_QUOTA:
        raise InvalidArgument(
            f"resources.cpu_quota {limits.cpu_quota}: expected {_LEAST_QUOTA} or more, or -1 for no limit"
        )
    memory, swap = limits.memory_limit_in_bytes, limits.memory_swap_limit_in_bytes
    if swap > 0 and memory <= 0:
        raise InvalidArgument("resources.memory_swap_limit_in_bytes: needs memory_limit_in_bytes beside it")
    if 0 < swap < memory:
        raise InvalidArgument(
            f"resources.memory_swap_limit_in_bytes {swap}: is memory and swap together, so at least {memory}"
        )
    for field in ("cpuset_cpus", "cpuset_mems"):
        value = getattr(limits, field)
        if value and (len(value) > _MAX_SET or not _SET.fullmatch(value)):
            raise InvalidArgument(f"resources.{field}: {value[:80]!r} is not a list of numbers such as 0-2,4")


def linux_resources(limits: cri.LinuxContainerResources, kernel: Kernel) -> Spec:
    """Return limits in the OCI runtime-spec's form, without those that are 0 or empty.

    A page size that the VM does not have is left out: there is nothing to limit.

    :raise InvalidArgument: a limit can't be set; names the field.
    """
    check(limits, kernel)
    found: Spec = {}
    if memory := _memory(limits):
        found["memory"] = memory
    if cpu := _cpu(limits, kernel):
        found["cpu"] = cpu
    pages: list[Spec] = [
        {"pageSize": page.page_size, "limit": page.limit}
        for page in limits.hugepage_limits
        if page.page_size in kernel.hugepages
    ]
    if pages:
        found["hugepageLimits"] = pages
    if limits.unified and kernel.cgroup2:
        found["unified"] = dict(limits.unified)
    return found


def update_resources(
    before: cri.LinuxContainerResources,
    changes: cri.LinuxContainerResources,
    kernel: Kernel,
    memory_in_use: int = 0,
) -> Spec:
    """Return the input of `crun update --resources`.

    It contains all limits, because crun resets some that are missing when others change.

    :param before: the limits so far; `vmserver.containers.resources.overlay` keeps them.
    :param memory_in_use: bytes; the kernel would end processes rather than refuse a limit below it.
    :raise InvalidArgument: a limit can't be set; names the field.
    """
    limit = changes.memory_limit_in_bytes
    if 0 < limit < memory_in_use:
        raise InvalidArgument(f"resources.memory_limit_in_bytes {limit}: {memory_in_use} bytes are in use")
    if before.cpu_quota > 0 > changes.cpu_quota and not kernel.cgroup2:
        raise InvalidArgument("resources.cpu_quota: a quota can't be taken away, as the VM has no cgroup v2")
    limits = cri.LinuxContainerResources()
    limits.CopyFrom(before)
    resources.overlay(limits, changes)
    return linux_resources(limits, kernel)


def _memory(limits: cri.LinuxContainerResources) -> Spec:
    limit, swap = limits.memory_limit_in_bytes, limits.memory_swap_limit_in_bytes
    found: Spec = {"limit": limit} if limit else {}
    if swap < 0:
        found["swap"] = -1
    elif limit:
        found["swap"] = swap or limit  # no swap unless a limit is set
    return found


def _cpu(limits: cri.LinuxContainerResources, kernel: Kernel) -> Spec:
    found: Spec = {}
    if limits.cpu_shares:
        low, high = _SHARES
        found["shares"] = min(max(limits.cpu_shares, low), high)
    if limits.cpu_quota > 0 or (limits.cpu_quota and kernel.cgroup2):  # for version 1, crun writes -1 wrongly
        found["quota"] = max(limits.cpu_quota, -1)
    if limits.cpu_quota or limits.cpu_period:
        found["period"] = limits.cpu_period or _PERIOD
    for name in ("cpus", "mems"):
        if value := getattr(limits, f"cpuset_{name}"):
            found[name] = value
    return found
