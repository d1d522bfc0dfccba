# SPDX-License-Identifier: Apache-2.0
"""What an ELF file asks its loader for: which libraries, and which loader. Only what that takes is read."""

from __future__ import annotations

import struct
from pathlib import Path

import attrs

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_LOAD, _DYNAMIC, _INTERP = 1, 2, 3  # p_type
_NEEDED, _STRTAB = 1, 5  # d_tag


@attrs.frozen
class Elf:
    """What a file asks for.

    :ivar needed: the libraries that it names.
    :ivar interpreter: its loader; "": it is a library, or static.
    """

    needed: tuple[str, ...]
    interpreter: str


def read(path: Path) -> Elf | None:
    """Return what a file asks for; None: it is no ELF file."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return None
        file.seek(0)
        data = file.read()
    offset, size, count = struct.unpack_from("<Q14xHH", data, 32)
    headers = [struct.unpack_from("<IIQQQQQQ", data, offset + number * size) for number in range(count)]

    def place(address: int) -> int:
        """Return where in the file an address of memory is."""
        for kind, _, start, virtual, _, length, _, _ in headers:
            if kind == _LOAD and virtual <= address < virtual + length:
                return int(start + address - virtual)
        raise ValueError(f"{path}: no segment has the address {address:#x}")

    interpreter, entries = "", []
    for kind, _, start, _, _, length, _, _ in headers:
        if kind == _INTERP:
            interpreter = data[start : start + length].rstrip(b"\0").decode()
        elif kind == _DYNAMIC:
            entries = [struct.unpack_from("<QQ", data, at) for at in range(start, start + length, 16)]
    strings = next((place(value) for tag, value in entries if tag == _STRTAB), 0)
    needed = [
        data[(at := strings + value) : data.index(b"\0", at)] for tag, value in entries if tag == _NEEDED
    ]
    return Elf(tuple(name.decode() for name in needed), interpreter)
