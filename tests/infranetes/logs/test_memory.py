# SPDX-License-Identifier: Apache-2.0
"""A container that writes more than the daemon may hold in memory, while a disk is blocked."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from pathlib import Path

from twisted.trial.unittest import TestCase

from infranetes.logs import Checkpoint, ContainerLog
from infranetes.logs.files import LogFiles
from infranetes.logs.writer import BATCH_BYTES
from infranetes_common.concurrency import run_in_thread
from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver
from tests.contract.container_sessions import GROWTH, STREAMED, resident
from tests.infranetes.logs.log_scenario import record
from tests.support.waiting import until

reactor = installed()
LINE = bytes(16 * 1024)


class Disk(LogFiles):
    """A disk that blocks until it is released."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.goes_on = threading.Event()

    def append(self, path: Path, inode: int, data: bytes) -> int:
        self.asked.set()
        assert self.goes_on.wait(60)
        return super().append(path, inode, data)


class MemoryTests(TestCase):
    async def test_much_output_takes_no_memory_however_slow_the_disk(self) -> None:
        count = STREAMED // len(LINE)
        read = 0

        async def source(cursor: str) -> AsyncGenerator[vmserver.LogRecord, None]:
            nonlocal read
            while read < count:
                read += 1
                yield record(read, LINE)

        async def save(checkpoint: Checkpoint) -> None:
            pass

        path, disk = Path(self.mktemp()) / "0.log", Disk()
        self.addCleanup(disk.goes_on.set)
        before = resident()
        log = ContainerLog(reactor, path, source, None, save, files=disk, in_thread=run_in_thread)
        log.start()
        await until(disk.asked.is_set, "something is written")
        # What is being written, what is queued, and the record at which reading stopped.
        self.assertLessEqual(read * len(LINE), 2 * BATCH_BYTES + 2 * len(LINE))
        disk.goes_on.set()
        most = 0

        def through() -> bool:
            nonlocal most
            most = max(most, resident())
            return log.finished.called

        await until(through, "all of it is written", 60.0)
        self.assertEqual(read, count)
        self.assertGreater(path.stat().st_size, STREAMED)
        self.assertLess(most - before, GROWTH)
