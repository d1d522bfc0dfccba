# SPDX-License-Identifier: Apache-2.0
"""The init of a pod's own PID namespace: a program of the VM that reaps processes and does nothing else."""

from __future__ import annotations

import shutil

from infranetes_common.commands import PATH
from infranetes_common.errors import FailedPrecondition

# catatonit's pauses by itself. tini comes with Docker; it needs a child, and ends with it.
_COMMANDS = (("catatonit", "-P"), ("tini", "--", "/usr/bin/sleep", "infinity"))

MEMORY_BYTES = 32 << 20
PROCESSES = 8
"""The most that the init may have."""

VISIBLE = "/usr"
"""What the init sees of the VM's files: its program and the C library."""

LINKS = {name: f"usr/{name}" for name in ("lib", "lib64")}
"""The symbolic links in its root."""


def init_command() -> list[str]:
    """Return the command of the init, whose program is below `VISIBLE`.

    :raise FailedPrecondition: no such program is installed."""
    for name, *arguments in _COMMANDS:
        path = shutil.which(name, path=PATH)
        if path is not None and path.startswith(f"{VISIBLE}/"):
            return [path, *arguments]
    raise FailedPrecondition(
        "the pod's containers can't share their processes: neither catatonit nor tini is installed in this "
        "VM; install the package catatonit in its image"
    )
