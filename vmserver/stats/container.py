"""A container's figures, found by its first process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vmserver.stats import cgroup, family

CGROUP2 = Path("/sys/fs/cgroup")


def usage(pid: int, limit: int = 0, named: str = "", cgroup2: Path = CGROUP2) -> Any:
    """The Usage of the control group of `pid`; without cgroup v2, of its family of processes. None: it is no
    more.

    :param limit: bytes of memory, 0: none; where no group tells.
    :param named: what the group's path has to have in it; if not, the process is another one by now.
    """
    group = cgroup.of_process(pid)
    if group:
        if named and named not in group:
            return None
        found = cgroup.usage(cgroup.read(cgroup2 / group), time.time_ns())
        if found is not None:
            return found
    return family.usage(pid, limit)
