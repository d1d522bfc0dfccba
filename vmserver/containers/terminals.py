# SPDX-License-Identifier: Apache-2.0
"""The two ends of a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os

_TIOCGPTPEER = 0x5441  # ioctl_tty(2); termios has no name for it


def open_peer(controlling: int) -> int:
    """Return a descriptor of the commands' end of a terminal, whose controlling end is given."""
    return fcntl.ioctl(controlling, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
