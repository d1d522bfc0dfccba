# SPDX-License-Identifier: Apache-2.0
"""Tests that fail, which test_kept runs in a process of their own. The runner itself finds only test_*.py."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from tests.support.kept import KeptCase


class Failing(KeptCase, TestCase):
    """Tests with a program that writes a log and ends in a clean-up."""

    timeout = 2.0

    def setUp(self) -> None:
        self.log = Path(self.mktemp())
        with self.log.open("w") as out:
            command = "echo the program runs; exec sleep 300"
            self.program = subprocess.Popen(["sh", "-c", command], stdout=out)
        self.addCleanup(self.program.wait)
        self.addCleanup(self.program.kill)
        self.addCleanup(self.log.unlink)
        while not self.log.stat().st_size:
            pass

    def kept_logs(self) -> Iterable[Path]:
        return [self.log]

    def ways_in(self) -> Iterable[str]:
        return [f"program {self.program.pid}"]

    def test_fails(self) -> None:
        self.fail("on purpose")

    async def test_hangs(self) -> None:
        await Deferred()

    def test_passes(self) -> None:
        pass
