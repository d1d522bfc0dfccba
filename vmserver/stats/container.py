# SPDX-License-Identifier: Apache-2.0
"""A container's resource usage, found through its first process."""

from __future__ import annotations

import time
from pathlib import Path

from infranetes_common.wire import vmserver as messages
from vmserver.stats import cgroup, family

CGROUP2 = Path("/sys/fs/cgroup")


def usage(pid: int, limit: int = 0, named: str = "", cgroup2: Path = CGROUP2) -> messages.Usage | None:
    """Measure the control group of `pid` or, without cgroup v2, the process and its descendants.

    :param limit: the memory limit in bytes, used without cgroup v2; 0 for none.
    :param named: a part of the control group's path. If the path lacks it, `pid` belongs to another process
        by now.
    :return: None if the process has ended.
    """
    group = cgroup.of_process(pid)
    if group:
        if named and named not in group:
            return None
        found = cgroup.usage(cgroup.read(cgroup2 / group), time.time_ns())
        if found is not None:
            return found
    return family.usage(pid, limit)
