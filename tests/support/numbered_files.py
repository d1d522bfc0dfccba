# SPDX-License-Identifier: Apache-2.0
"""Starts a program that finds its files open under given numbers, as those of systemd and QEMU do."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO


def popen(
    command: Sequence[str], files: Mapping[int, int], output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start `command` with each of `files` under the number that is its key.

    In this process these numbers may be others' files: nothing is opened or closed under them here. The
    shell, of which the program takes the place, moves the files there.

    :param files: stay open, and are the caller's. :param output: where the program writes; None: as this one.
    """
    above = max(files, default=0) + 1  # so that none is where the shell puts another
    passed = {number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for number, file in files.items()}
    moves = "".join(f" {number:d}<&{file}" for number, file in passed.items())
    try:
        return subprocess.Popen(
            ["bash", "-c", f'exec "$@"{moves}', "bash", *command],
            pass_fds=list(passed.values()),
            stdout=output,
            stderr=output,
        )
    finally:
        for file in passed.values():
            os.close(file)
