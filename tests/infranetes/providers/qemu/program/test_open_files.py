# SPDX-License-Identifier: Apache-2.0
"""The files that QEMU is handed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.program.command_line import Fd
from infranetes.providers.qemu.program.open_files import OpenFiles


class OpenFilesTests(SynchronousTestCase):
    """The descriptors that QEMU is handed."""

    def open_files(self) -> set[str]:
        return {*os.listdir("/proc/self/fd")}

    def test_all_are_closed_in_the_end_though_one_is_closed_already(self) -> None:
        path = Path(self.mktemp())
        path.mkdir()
        before = self.open_files()
        with contextlib.closing(OpenFiles()) as files:
            files.listen(Fd.QMP, path / "qmp")
            files.open(Fd.CONSOLE, path / "console", os.O_RDWR | os.O_CREAT)
            files.open(Fd.KERNEL, path / "console")
            files.set_standard_streams(path / "output")
            handed = files.by_number()
            self.assertEqual({*handed}, {0, 1, 2, Fd.QMP, Fd.CONSOLE, Fd.KERNEL})
            self.assertEqual(len(self.open_files() - before), len(handed))
            os.close(handed[Fd.KERNEL])
        self.assertEqual(self.open_files(), before)
        self.assertEqual(files.by_number(), {})
