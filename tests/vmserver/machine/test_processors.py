# SPDX-License-Identifier: Apache-2.0
"""How many processors are used: directories like the kernel's, which a shell emulates."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import installed
from vmserver.machine.processors import SET_STATE, MachineProcessors

reactor = installed()
SECONDS = 60.0


class ProcessorTests(TestCase):
    """A machine with eleven processors, the first of which is always used."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="vmserver-"))
        self.addCleanup(shutil.rmtree, self.directory)
        for name in ("cpufreq", "cpuidle", "cpu0"):
            (self.directory / name).mkdir()
        for number in range(1, 11):
            (self.directory / f"cpu{number}").mkdir()
            self.file(number).write_text("1\n")
        self.processors = MachineProcessors(reactor, self.directory)

    def file(self, number: int) -> Path:
        return self.directory / f"cpu{number}" / "online"

    def used(self) -> list[int]:
        return [0, *(number for number in range(1, 11) if self.file(number).read_text().strip() == "1")]

    async def test_the_last_ones_rest_and_are_used_again(self) -> None:
        for count in (11, 3, 3, 1, 2, 10, 11):
            await self.processors.use(count, SECONDS)
            self.assertEqual(self.used(), list(range(count)))

    async def test_more_than_there_are_is_all(self) -> None:
        await self.processors.use(2, SECONDS)
        await self.processors.use(64, SECONDS)
        self.assertEqual(len(self.used()), 11)

    async def test_one_is_always_used(self) -> None:
        await self.processors.use(0, SECONDS)
        self.assertEqual(self.used(), [0])

    async def test_what_the_kernel_refuses_is_told(self) -> None:
        refusing = (*SET_STATE[:2], "echo 'cpu busy' >&2; exit 1", "sh")
        processors = MachineProcessors(reactor, self.directory, refusing)
        refused: Deferred[Any] = start(processors.use(4, SECONDS))  # Any: the error
        error = await self.assertFailure(refused, FailedPrecondition)
        self.assertIn("cpu4: cpu busy", str(error))
