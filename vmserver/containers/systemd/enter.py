# SPDX-License-Identifier: Apache-2.0
"""Commands in a running container: in its control group and mounts, with its user and capabilities."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from infranetes_common.wire import cri
from vmserver.containers.systemd.privileges import setpriv

# The first shell joins the cgroups named in $0. The second exits with 126 or 127 if it can't execute.
_JOIN = 'for group in $0; do echo 0 >"$group" || :; done 2>/dev/null; exec "$@"'
_RUN = 'cd "$0" && exec "$@"'
_CGROUPS = Path("/sys/fs/cgroup")


def entering(
    pid: int, config: cri.ContainerConfig, command: Sequence[str], mounts: Path = Path("/proc/mounts")
) -> list[str]:
    """Return the arguments of a process that enters a container and executes `command`.

    :param pid: the container's first process. :param config: the container's.
    :raise ProcessLookupError: there is no such process.
    """
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        raise ProcessLookupError(pid) from None
    return [
        "/bin/sh", "-c", _JOIN, " ".join(_procs_files(groups, mounts)),
        "nsenter", f"--target={pid}", "--mount", "--",
        *setpriv(config.linux.security_context), "/bin/sh", "-c", _RUN, config.working_dir or "/", *command,
    ]  # fmt: skip


def _procs_files(groups: str, mounts: Path) -> list[str]:
    """Return the cgroup.procs of each hierarchy's group, from /proc/PID/cgroup (cgroups(7))."""
    where: dict[str, str] = {}
    for line in mounts.read_text().splitlines():
        _, path, kind, options = line.split()[:4]
        if kind == "cgroup2":
            where[""] = path
        elif kind == "cgroup":
            for option in options.split(","):
                where[option] = path
    found = []
    for line in groups.splitlines():
        _, controllers, group = line.split(":", 2)
        root = where.get(controllers.split(",")[0])
        if root is not None and group != "/" and " " not in group:
            found.append(os.path.join(root, group.lstrip("/"), "cgroup.procs"))
    return found
