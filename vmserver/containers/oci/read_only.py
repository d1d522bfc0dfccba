# SPDX-License-Identifier: Apache-2.0
"""crun on a read-only mount of its own file, so that each run executes it only once.

To keep containers from writing to the program that they see as /proc/PID/exe (CVE-2019-5736), crun copies
itself to memory and executes the copy, in each run. It omits that if its file is on a read-only file system,
which protects it as well. In an emulated VM this saves more than one start: a copy is new code, and all of
its instructions would be translated again. Source: containers/crun src/libcrun/cloned_binary.c.
"""

from __future__ import annotations

import os
from pathlib import Path

from twisted.logger import Logger

from infranetes_common.errors import InfranetesError
from vmserver.machine.mounts import Flag, mount, unmount

_log = Logger()


def thd_read_only(program: str, at: Path) -> str:
    """Return the path to run a program from: `at`, a read-only mount, or its own path if mounting fails.

    The mount outlives the agent and the programs that run from it. Idempotent. Blocks."""
    try:
        if not _is_mounted(program, at):
            at.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            unmount(at)  # that of a program which was replaced since
            at.touch()
            _mount(program, at)
    except (OSError, InfranetesError) as error:
        _log.info(
            "{program} runs from its own path, not from a read-only mount: {error}",
            program=program,
            error=error,
        )
        return program
    return str(at)


def _is_mounted(program: str, at: Path) -> bool:
    try:
        return os.path.samefile(program, at) and bool(os.statvfs(at).f_flag & os.ST_RDONLY)
    except FileNotFoundError:
        return False


def _mount(program: str, at: Path) -> None:
    mount(program, str(at), "", Flag.BIND)
    try:
        mount("", str(at), "", Flag.BIND | Flag.REMOUNT | Flag.READ_ONLY | Flag.NO_DEVICES)
    except BaseException:
        unmount(at)  # on a writable mount, crun would be less protected than without a mount
        raise
