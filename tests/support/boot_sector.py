# SPDX-License-Identifier: Apache-2.0
"""A whole operating system in one sector, for tests of what a VM's hypervisor does.

It boots by BIOS from any disk, in a fraction of a second, also without KVM.

It writes hello to its serial console, and then does what it reads there:

O  it writes bye and powers off; as it does when its power button is pressed
L  it writes L, and does likewise two seconds later
R  it reboots
P  it panics, by the device pvpanic
F  it writes the letter x for ever
H  it writes H, halts, and reads nothing more

All else it writes back. The source is `boot_sector.S`: `as --32`, then `ld -m elf_i386
--oformat binary -Ttext 0`.
"""

from __future__ import annotations

from pathlib import Path

_CODE = bytes.fromhex(
    "fa31c08ed88ed0bc007cfcba0206b80001efbafa03b0c7eebea77cac84c07405e87500ebf6ba0006edf6c4017537"
    "bafd03eca8017504fbf4ebebbaf803ec3c4f74233c52743b3c50743f3c4674433c4c74093c487426e83f00ebcae8"
    "3a00fbb92400f4e2fdbeaf7cac84c07405e82800ebf6ba0406b80020eff4ebfde81900ebf8baf90cb006eeebf0ba"
    "0505b001eeebe8b078e80200ebf950bafd03eca82074fb58baf803eec368656c6c6f0d0a006279650d0a00"
)
SIZE = 1 << 20


def write(path: Path) -> Path:
    """Write its disk, of the format raw, to a file. Return the file."""
    sector = _CODE.ljust(510, b"\0") + b"\x55\xaa"
    path.write_bytes(sector.ljust(SIZE, b"\0"))
    return path
