# SPDX-License-Identifier: Apache-2.0
"""Container logs in real processes, on real disks, and in large numbers."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.logs import Checkpoint, ContainerLog, stop_all
from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver
from tests.harness.durations import slow
from tests.harness.needs import needs_mounts
from tests.infranetes.logs.child import line
from tests.infranetes.logs.log_scenario import expected, record
from tests.support import warm

reactor = installed()


class KilledProcessTests(SynchronousTestCase):
    @slow(6, "eight processes are killed while they write, and another goes on")
    def test_sigkill_at_any_time_with_rotations_between_loses_and_doubles_nothing(self) -> None:
        directory = Path(self.mktemp()).absolute()
        directory.mkdir()
        path, request = directory / "0.log", directory / "reopen"
        count, chance = 60_000, random.Random(7)  # noqa: S311
        arguments = ("-m", "tests.infranetes.logs.child", str(directory), str(count))
        output = directory / "output"
        rotated: list[Path] = []
        kills = 0
        while True:
            with output.open("wb") as file:
                child = warm.Process(arguments, file.fileno(), warm.ROOT, os.environ)
            try:
                before = path.stat().st_size if path.exists() else 0
                until = time.monotonic() + 20
                while child.poll() is None and time.monotonic() < until:  # until there is some output
                    if path.exists() and path.stat().st_size != before:
                        break
                    time.sleep(0.002)
                if kills < 8:
                    if chance.random() < 0.6 and path.exists() and not request.exists():
                        rotated.append(directory / f"0.log.{len(rotated)}")
                        path.rename(rotated[-1])
                        request.touch()
                    time.sleep(chance.random() * 0.05)
                    kills += child.poll() is None
                    child.kill()
                code = child.wait()
            finally:
                child.kill()
                child.wait()
            if code == 0:
                break
            self.assertEqual(code, -9, output.read_text())
        self.assertGreater(kills, 3)
        self.assertGreater(len(rotated), 0)
        content = b"".join(file.read_bytes() for file in [*rotated, path] if file.exists())
        want = expected([line(number) for number in range(1, count + 1)])
        self.assertEqual(len(content), len(want))
        self.assertTrue(content == want, "other bytes")  # the difference may be megabytes long


async def nothing(_: Checkpoint) -> None:
    """Save no checkpoint."""


@needs_mounts
class FullDiskTests(TestCase):
    async def test_a_disk_that_is_full_for_a_while(self) -> None:
        mount = Path(self.mktemp()).absolute()
        mount.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(mount)], check=True)
        records = [record(i + 1, b"x" * 1000) for i in range(180)]
        (mount / "filler").write_bytes(bytes(128 << 10))

        async def read(cursor: str) -> AsyncGenerator[vmserver.LogRecord, None]:
            for one in records[int(cursor or 0) :]:
                await deferLater(reactor, 0.001)
                yield one

        log = ContainerLog(reactor, mount / "0.log", read, None, nothing)
        log.start()
        await deferLater(reactor, 1.0)
        self.assertFalse(log.finished.called)
        so_far = (mount / "0.log").read_bytes()
        self.assertTrue(expected(records).startswith(so_far))
        self.assertEqual(so_far[-1:], b"\n")
        (mount / "filler").unlink()
        await log.finished
        self.assertEqual((mount / "0.log").read_bytes(), expected(records))


class ManyTests(TestCase):
    async def test_three_thousand_logs_hold_no_descriptors_and_no_threads(self) -> None:
        directory = Path(self.mktemp()).absolute()
        records = [record(i + 1, b"x" * 100) for i in range(3)]
        cancelled: list[str] = []

        async def read(cursor: str) -> AsyncGenerator[vmserver.LogRecord, None]:
            for one in records[int(cursor or 0) :]:
                yield one
            try:
                await Deferred()
            except CancelledError:
                cancelled.append(cursor)
                raise

        before = len(os.listdir("/proc/self/fd"))
        logs = [ContainerLog(reactor, directory / str(i) / "0.log", read, None, nothing) for i in range(3000)]
        for log in logs:
            log.start()
        content = expected(records)
        while not all(log._writer._written.size == len(content) for log in logs):
            await deferLater(reactor, 0.02)
        self.assertLess(len(os.listdir("/proc/self/fd")) - before, 20)
        threads = len(os.listdir("/proc/self/task"))
        self.assertLess(threads, 30)
        for log in logs:
            self.assertEqual(log._path.read_bytes(), content)
        await stop_all(reactor, logs)
        self.assertEqual(len(cancelled), 3000)
