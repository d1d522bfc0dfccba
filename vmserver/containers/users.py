# SPDX-License-Identifier: Apache-2.0
"""The users and groups of processes."""

from __future__ import annotations

from infranetes_common.wire import cri


def process_user(pid: int) -> cri.ContainerUser | None:
    """Return the user and groups of a running process; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        uid, gid = int(fields["Uid"].split()[0]), int(fields["Gid"].split()[0])
        groups = [int(group) for group in fields["Groups"].split()]
    except (OSError, KeyError, ValueError, IndexError):
        return None
    user = cri.LinuxContainerUser(uid=uid, gid=gid, supplemental_groups=groups)
    return cri.ContainerUser(linux=user)
