# SPDX-License-Identifier: Apache-2.0
"""Huge pages: the names of their sizes, and the number that the limits of a container ask for."""

from __future__ import annotations

import re

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri

_NAME = re.compile(r"([0-9]{1,6})([KMG])B")
_UNITS = {"G": 1 << 30, "M": 1 << 20, "K": 1 << 10}


def page_bytes(name: str) -> int:
    """Return the size of this name in limits, in bytes. :raise InvalidArgument: there is no such size."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise InvalidArgument(f"resources.hugepage_limits: {name[:40]!r} is not a page size (2MB, 1GB)")
    return int(found[1]) * _UNITS[found[2]]


def limit_name(size: int) -> str:
    """Return a size's name in limits and in a cgroup's files, such as 2MB."""
    return f"{_short(size)}B"


def resource_name(size: int) -> str:
    """Return a size's name in a pod's specification, such as hugepages-2Mi."""
    return f"hugepages-{_short(size)}i"


def pages_of(limits: cri.LinuxContainerResources) -> dict[int, int]:
    """Return the number of pages that limits ask for, by size in bytes. Sizes without a page are left out.

    :raise InvalidArgument: a size is malformed."""
    found: dict[int, int] = {}
    for limit in limits.hugepage_limits:
        size = page_bytes(limit.page_size)
        if size and limit.limit >= size:
            found[size] = max(found.get(size, 0), limit.limit // size)
    return found


def bytes_of(limits: cri.LinuxContainerResources) -> int:
    """Return the bytes of the pages that limits ask for. Raises as `pages_of`."""
    return sum(size * number for size, number in pages_of(limits).items())


def _short(size: int) -> str:
    unit = next((unit for unit, one in _UNITS.items() if size >= one), "K")
    return f"{size // _UNITS[unit]}{unit}"
