# SPDX-License-Identifier: Apache-2.0
"""Programs loaded at the same addresses each time, where the processor is emulated.

QEMU translates a VM's code as it is first executed, and finds the translation again only at the same address.
Without random addresses the second run of conmon or crun is spared that, as is what both use of the C
library. Containers have random addresses in any case: `PERSONALITY` in their config.json gives them back.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from twisted.logger import Logger

PERSONALITY = {"domain": "LINUX"}  # OCI runtime-spec, linux.personality
_EMULATED = "QEMU TCG CPU"  # as QEMU's emulated processors are called
_NO_RANDOM_ADDRESSES = 0x0040000  # ADDR_NO_RANDOMIZE of linux/personality.h
_ASK = 0xFFFFFFFF

_log = Logger()


def fix_addresses(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Have programs that this thread starts from now on loaded at the same addresses, if that saves time.

    Return whether it does."""
    if not _emulated(cpuinfo):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.personality.argtypes = (ctypes.c_ulong,)
    now = libc.personality(_ASK)
    if now < 0 or libc.personality(now | _NO_RANDOM_ADDRESSES) < 0:
        _log.info("programs keep random addresses: {words}", words=os.strerror(ctypes.get_errno()))
        return False
    return True


def _emulated(cpuinfo: Path) -> bool:
    try:
        return _EMULATED in cpuinfo.read_text(errors="replace")
    except OSError:
        return False
