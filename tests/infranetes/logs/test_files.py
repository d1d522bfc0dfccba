# SPDX-License-Identifier: Apache-2.0
"""What may be at a log's path."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.logs.files import LogFiles


class LogFilesTests(SynchronousTestCase):
    def test_what_is_no_regular_file_is_refused_and_holds_up_nobody(self) -> None:
        """One thread writes many logs, and a pipe without a reader would block it."""
        directory = Path(self.mktemp())
        directory.mkdir()
        os.mkfifo(directory / "pipe")
        (directory / "link").symlink_to("/dev/null")
        (directory / "directory").mkdir()
        freeing = threading.Timer(5.0, lambda: os.open(directory / "pipe", os.O_RDONLY | os.O_NONBLOCK))
        freeing.start()
        self.addCleanup(freeing.cancel)
        for path in (directory / "pipe", directory / "link", directory / "directory", Path("/dev/null")):
            self.assertRaises(OSError, LogFiles().current, path)
        self.assertTrue(freeing.is_alive())
        found = LogFiles().current(directory / "deep" / "log")
        self.assertEqual((found.size, found.at_path), (0, True))
