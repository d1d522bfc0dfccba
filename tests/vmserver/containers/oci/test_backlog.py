# SPDX-License-Identifier: Apache-2.0
"""conmon is stopped while too much of its container's log is unread, and at no other time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from twisted.internet.task import Clock
from twisted.trial.unittest import TestCase

from infranetes_common.processes import process_state, start_ticks
from tests.support.waiting import until
from vmserver.containers.oci.backlog import LAG_BYTES, PATIENCE_SECONDS, Backlog, unread
from vmserver.containers.oci.conmon import Process
from vmserver.containers.oci.log import Cursor, renamed


class Case(TestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="backlog-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.log = self.directory / "log"

    def write(self, number: int, size: int) -> None:
        """Write a rotated file of the log."""
        renamed(self.log, number).write_bytes(bytes(size))


class UnreadTests(Case):
    def test_it_is_the_rest_of_the_file_that_is_read_and_all_later_ones(self) -> None:
        for number in (1, 2, 3):
            self.write(number, 100)
        for position, expected in (
            (Cursor(4, 0), 7),
            (Cursor(4, 7), 0),
            (Cursor(3, 100), 7),
            (Cursor(3, 1), 99 + 7),
            (Cursor(1, 40), 60 + 200 + 7),
        ):
            self.assertEqual(unread(self.log, position, 7), expected, position)

    def test_of_a_log_that_was_never_full_it_is_the_rest_of_its_only_file(self) -> None:
        self.assertEqual(unread(self.log, Cursor(1, 5), 7), 2)

    def test_where_the_file_that_was_read_is_deleted_it_is_all_that_is_left(self) -> None:
        self.write(5, 100)
        self.assertEqual(unread(self.log, Cursor(3, 60), 7), 107)

    def test_a_file_that_disappears_meanwhile_counts_nothing(self) -> None:
        renamed(self.log, 1).symlink_to("nowhere")
        self.write(2, 100)
        self.assertEqual(unread(self.log, Cursor(1, 60), 7), 107)


class BacklogTests(Case):
    """A conmon is stopped and goes on; it and its container are processes of these tests."""

    def setUp(self) -> None:
        super().setUp()
        self.clock = Clock()
        self.clock.advance(1000)
        self.position: Cursor | None = Cursor(1, 0)
        self.conmon, self.first = self.child(), self.child()
        self.process = Process(
            self.first.pid, start_ticks(self.first.pid), self.conmon.pid, start_ticks(self.conmon.pid)
        )

    def child(self) -> subprocess.Popen[bytes]:
        made = subprocess.Popen(["sleep", "600"])
        self.addCleanup(made.wait)
        self.addCleanup(made.kill)
        return made

    def made(self, process: Process | None = None) -> Backlog:
        """Return the backlog of a container that is held back above 100 bytes."""
        return Backlog(self.clock, process or self.process, lambda: self.position, 100)

    async def stopped(self, expected: bool) -> None:
        """Wait until conmon is stopped, or goes on."""
        await until(
            lambda: (process_state(self.conmon.pid)[0] == "T") == expected, f"conmon is stopped: {expected}"
        )

    async def test_it_is_held_back_above_the_bound_and_goes_on_at_half_of_it(self) -> None:
        backlog = self.made()
        for _ in range(2):  # also where nothing has changed
            self.assertFalse(backlog.check(self.log, 100))
        self.assertTrue(backlog.check(self.log, 101))
        await self.stopped(True)
        self.position = Cursor(1, 50)
        for _ in range(2):
            self.assertTrue(backlog.check(self.log, 101))
        self.position = Cursor(1, 51)
        self.assertFalse(backlog.check(self.log, 101))
        await self.stopped(False)
        self.assertFalse(backlog.check(self.log, 151))
        self.assertTrue(backlog.check(self.log, 152))

    async def test_where_nobody_reads_it_is_not_held_back_and_nothing_is_kept(self) -> None:
        self.position = None
        backlog = self.made()
        for size in (101, 10**9):
            self.assertFalse(backlog.check(self.log, size))
            self.assertIsNone(backlog.needed())
        self.position = Cursor(1, 0)
        self.assertTrue(backlog.check(self.log, 10**9))

    async def test_a_reader_that_does_not_come_back_is_waited_for_some_time(self) -> None:
        backlog = self.made()
        self.assertTrue(backlog.check(self.log, 200))
        self.clock.advance(PATIENCE_SECONDS - 1)
        self.position = Cursor(1, 1)
        self.assertTrue(backlog.check(self.log, 200), "it reads on")
        self.clock.advance(PATIENCE_SECONDS - 1)
        self.assertTrue(backlog.check(self.log, 200))
        self.assertIsNotNone(backlog.needed())
        self.clock.advance(1)
        self.assertFalse(backlog.check(self.log, 200))
        self.assertIsNone(backlog.needed())
        await self.stopped(False)
        self.position = Cursor(1, 2)
        self.assertTrue(backlog.check(self.log, 200), "it is back")
        await self.stopped(True)

    async def test_its_end_is_not_held_back(self) -> None:
        for reaped in (False, True):
            backlog = self.made()
            self.assertTrue(backlog.check(self.log, 200))
            await self.stopped(True)
            self.first.kill()
            if reaped:
                self.first.wait()
            else:
                os.waitid(os.P_PID, self.first.pid, os.WEXITED | os.WNOWAIT)
            self.assertFalse(backlog.check(self.log, 200))
            await self.stopped(False)
            self.first = self.child()
            self.process = Process(
                self.first.pid, start_ticks(self.first.pid), self.conmon.pid, self.process.conmon_ticks
            )

    async def test_once_released_it_goes_on(self) -> None:
        backlog = self.made()
        self.assertTrue(backlog.check(self.log, 200))
        await self.stopped(True)
        backlog.release()
        await self.stopped(False)
        os.kill(self.conmon.pid, signal.SIGSTOP)  # somebody else
        await self.stopped(True)
        backlog.release()
        self.assertEqual(process_state(self.conmon.pid)[0], "T")

    async def test_one_that_an_agent_left_stopped_goes_on_with_the_next(self) -> None:
        os.kill(self.conmon.pid, signal.SIGSTOP)
        await self.stopped(True)
        self.made()
        await self.stopped(False)

    async def test_another_process_of_conmons_number_is_not_stopped(self) -> None:
        process = Process(self.process.pid, self.process.ticks, self.process.conmon, 1)
        self.assertTrue(self.made(process).check(self.log, 200))
        self.assertNotEqual(process_state(self.conmon.pid)[0], "T")

    async def test_a_conmon_that_ends_as_it_is_stopped_is_no_failure(self) -> None:
        def gone(pid: int, number: int) -> None:
            raise ProcessLookupError

        self.patch(os, "kill", gone)
        self.assertTrue(self.made().check(self.log, 200))

    def test_what_may_be_read_again_after_a_kill_of_the_daemon_is_kept(self) -> None:
        backlog = self.made()
        for position, oldest in (
            (Cursor(3, 0), 2),
            (Cursor(3, LAG_BYTES - 1), 2),
            (Cursor(3, LAG_BYTES), 3),
        ):
            self.position = position
            backlog.check(self.log, 0)
            self.assertEqual(backlog.needed(), oldest)
