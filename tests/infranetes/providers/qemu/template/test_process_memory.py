# SPDX-License-Identifier: Apache-2.0
"""How the kinds of memory of a QEMU process are distinguished, on which tests and benches of clones rely."""

from __future__ import annotations

import os

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.template import ram
from tests.support import process_memory
from tests.support.process_memory import Kind, Memory

MAPPING = """\
{range} {rights} 00000000 00:01 {inode} {name}
Size:              {size} kB
Rss:                4096 kB
Pss:                3072 kB
Shared_Clean:       1024 kB
Shared_Dirty:       1024 kB
Private_Clean:       512 kB
Private_Dirty:      1536 kB
Referenced:         4096 kB
Anonymous:          2048 kB
THPeligible:           0
VmFlags: rd wr mr mw me ac sd
"""
EACH = Memory(proportional=3.0, private=2.0, shared=2.0, written=2.0)


def mapping(rights: str, name: str) -> str:
    return MAPPING.format(range="7f00-7f80", rights=rights, inode=7, name=name, size=8192)


class MappingTests(SynchronousTestCase):
    def test_mappings_are_told_apart_by_what_they_are_for(self) -> None:
        smaps = "".join(
            (
                mapping("rw-p", f"/memfd:{ram.NAME} (deleted)"),
                mapping("rwxp", ""),
                mapping("rw-p", "[heap]"),
                mapping("rw-p", ""),
                mapping("r-xp", "/usr/bin/qemu-system-x86_64"),
            )
        )
        found = process_memory.parse(smaps)
        self.assertEqual(
            found,
            {Kind.GUEST: EACH, Kind.CODE: EACH, Kind.HEAP: EACH + EACH, Kind.PROGRAM: EACH},
        )
        self.assertEqual(process_memory.total(found), Memory(15.0, 10.0, 10.0, 10.0))

    def test_the_kernel_writes_it_so(self) -> None:
        data = bytearray(os.urandom(4 << 20))
        found = process_memory.of_process(os.getpid())
        self.assertGreater(found[Kind.HEAP].written, len(data) / (1 << 20) - 1)
        self.assertGreater(found[Kind.PROGRAM].proportional, 1)
