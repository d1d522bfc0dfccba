# SPDX-License-Identifier: Apache-2.0
"""Programs loaded at the same addresses each time, where the processor is emulated.

QEMU translates a VM's code when it is first executed, and only finds the translation again at the same
address. Without random addresses, the second run of conmon or crun needs no translation, nor does the code of
the C library that both use. Containers always have random addresses: `PERSONALITY` in their config.json
turns them on again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

PERSONALITY = {"domain": "LINUX"}  # OCI runtime-spec, linux.personality
_CPUINFO = Path("/proc/cpuinfo")
_EMULATED = "QEMU TCG CPU"  # in the names of QEMU's emulated processors
_NO_RANDOM_ADDRESSES = 0x0040000  # ADDR_NO_RANDOMIZE of linux/personality.h
_ASK = 0xFFFFFFFF  # returns the present personality and changes nothing

_libc = ctypes.CDLL(None)
_libc.personality.argtypes = (ctypes.c_ulong,)


@contextlib.contextmanager
def fixed_addresses() -> Iterator[None]:
    """Start this thread's programs without address randomization meanwhile, if that saves time."""
    before = _libc.personality(_ASK) if emulated() else -1
    if before >= 0:
        _libc.personality(before | _NO_RANDOM_ADDRESSES)
    try:
        yield
    finally:
        if before >= 0:
            _libc.personality(before)


@functools.cache
def emulated() -> bool:
    """Return whether QEMU emulates this machine's processor. Looks it up once."""
    try:
        return _EMULATED in _CPUINFO.read_text(errors="replace")
    except OSError:
        return False
