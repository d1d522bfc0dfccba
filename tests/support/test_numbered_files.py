# SPDX-License-Identifier: Apache-2.0
"""A program has its files under the given numbers, and this process keeps what it has under these."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.support.numbered_files import popen


class NumberedFilesTests(SynchronousTestCase):
    def file(self, text: str) -> int:
        """Return a new file with this text, open from its beginning."""
        path = Path(self.mktemp())
        path.write_text(text)
        descriptor = os.open(path, os.O_RDONLY)
        self.addCleanup(os.close, descriptor)
        return descriptor

    def open_files(self) -> dict[int, str]:
        """Return what this process has open."""
        found = {}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        return found

    def test_each_is_where_it_is_meant_and_nothing_is_touched_here(self) -> None:
        first, second = self.file("first"), self.file("second")
        before = self.open_files()
        output = Path(self.mktemp())
        with output.open("wb") as file:
            # Each under the other's number, and one where this process has none.
            files = {first: second, second: first, max(before) + 9: first}
            show = ["bash", "-c", 'for n in "$@"; do cat /proc/self/fd/$n; echo; done', "bash"]
            process = popen([*show, *map(str, files)], files, file)
        self.assertEqual(process.wait(), 0)
        self.assertEqual(output.read_text().split(), ["second", "first", "first"])
        after = self.open_files()
        for number in files:
            self.assertEqual(after.get(number), before.get(number))
