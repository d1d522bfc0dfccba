# SPDX-License-Identifier: Apache-2.0
"""The machine's mounts, as the kernel lists them."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from vmserver.machine.mounts import mounts


class TableTests(SynchronousTestCase):
    def points(self, *points: str) -> list[str]:
        """Return the mount points that are read from a table with these."""
        table = Path(self.mktemp())
        lines = [f"36 35 98:0 / {point} rw,noatime shared:1 - ext4 /dev/vda rw\n" for point in points]
        table.write_bytes(os.fsencode("".join(lines)))
        found = mounts(table)
        self.assertEqual({(one.device, one.kind) for one in found}, {("98:0", "ext4")})
        self.assertEqual(found[0].options, {"rw", "noatime"})
        return [one.point for one in found]

    def test_what_the_kernel_escapes_is_as_it_was(self) -> None:
        self.assertEqual(self.points("/", "/a\\040b\\012c\\134"), ["/", "/a b\nc\\"])

    def test_a_name_may_have_what_ends_a_line_elsewhere_and_any_bytes(self) -> None:
        """A container whose mounts propagate to its VM chooses their names."""
        for character in "\r\v\f\x1c\x85\u2028\udcff":
            self.assertEqual(self.points(f"/a{character}b", "/c"), [f"/a{character}b", "/c"])
