# SPDX-License-Identifier: Apache-2.0
"""Lists of the node's processors and memory nodes, such as 0-2,4, to which containers are pinned."""

from __future__ import annotations

import re
from collections.abc import Iterable

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri

CPUS, MEMS = "cpuset.cpus", "cpuset.mems"  # the files of a control group, and so the fields of `unified`
MOST = 8192  # the kernel's highest number of processors is below it
_PART = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", re.ASCII)


def parse(text: str, field: str) -> frozenset[int]:
    """Return the numbers in a list; "": none.

    :raise InvalidArgument: it is no list; names the field."""
    numbers: set[int] = set()
    for part in text.split(",") if text else ():
        match = _PART.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not 0 <= first <= last < MOST:
            raise InvalidArgument(f"{field}: {text[:80]!r} is not a list of numbers such as 0-2,4")
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def union(texts: Iterable[str], field: str) -> str:
    """Return a list with the numbers of all of these lists."""
    parts: list[list[int]] = []
    for number in sorted({number for text in texts for number in parse(text, field)}):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def cpus_of(resources: cri.LinuxContainerResources) -> str:
    """Return the processors that a container is to run on; "": any."""
    return resources.cpuset_cpus or resources.unified.get(CPUS, "")


def mems_of(resources: cri.LinuxContainerResources) -> str:
    """Return the memory nodes that a container is to use; "": any."""
    return resources.cpuset_mems or resources.unified.get(MEMS, "")


def check(resources: cri.LinuxContainerResources, field: str) -> None:
    """Check both lists. :raise InvalidArgument: one is no list; names the field below `field`."""
    parse(cpus_of(resources), f"{field}.cpuset_cpus")
    parse(mems_of(resources), f"{field}.cpuset_mems")


def without(resources: cri.LinuxContainerResources) -> cri.LinuxContainerResources:
    """Return the resources for a guest, to which the node's numbers mean nothing."""
    rest = cri.LinuxContainerResources()
    rest.CopyFrom(resources)
    clear(rest)
    return rest


def clear(resources: cri.LinuxContainerResources) -> None:
    """Remove both lists."""
    resources.ClearField("cpuset_cpus")
    resources.ClearField("cpuset_mems")
    for name in [name for name in resources.unified if name.startswith("cpuset.")]:
        del resources.unified[name]
