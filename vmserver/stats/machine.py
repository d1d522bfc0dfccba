# SPDX-License-Identifier: Apache-2.0
"""Resource usage of the whole VM, from proc(5)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from infranetes_common import machine_usage
from infranetes_common.machine_usage import FILES, MAX_FILE
from infranetes_common.wire import vmserver as messages


def read(names: Sequence[str] = FILES, proc: Path = Path("/proc")) -> dict[str, str]:
    """Read files of /proc, by name; files that can't be read are left out."""
    found = {}
    for name in names:
        try:
            with (proc / name).open(errors="replace") as file:
                found[name] = file.read(MAX_FILE)
        except OSError:
            continue
    return found


def usage(files: Mapping[str, str]) -> messages.Usage:
    """Parse the files of `read`. The numbers of processes and threads are left to the caller."""
    return machine_usage.usage(files, time.time_ns())
