"""Whom processes run as."""

from __future__ import annotations

from typing import Any

from infranetes_common import cri


def process_user(pid: int) -> Any:
    """The ContainerUser of a running process; None where it is gone."""
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        uid, gid = int(fields["Uid"].split()[0]), int(fields["Gid"].split()[0])
        groups = [int(group) for group in fields["Groups"].split()]
    except (OSError, KeyError, ValueError, IndexError):
        return None
    user = cri.LinuxContainerUser(uid=uid, gid=gid, supplemental_groups=groups)
    return cri.ContainerUser(linux=user)
