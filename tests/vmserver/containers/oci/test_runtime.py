# SPDX-License-Identifier: Apache-2.0
"""How crun's containers are read and started, without crun."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import TestCase

from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from infranetes_common.processes import start_ticks
from infranetes_common.reactors import installed
from vmserver.containers.oci import runtime
from vmserver.containers.oci.runtime import Crun


class RuntimeCase(TestCase):
    def setUp(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="crun-"))
        self.addCleanup(shutil.rmtree, self.root)
        self.crun = Crun(installed(), self.root, "no-crun")
        self.fifo = self.root / "c1" / "exec.fifo"
        self.fifo.parent.mkdir()

    def write(self, **changes: object) -> None:
        """Write crun's record of a container whose first process is this one."""
        own = os.getpid()
        record = {"pid": own, "process-start-time": start_ticks(own), "cgroup-path": "/c1"}
        (self.fifo.parent / "status").write_text(json.dumps({**record, **changes}))

    def waiting(self) -> int:
        """Have a container that waits for its start. Return the end of its FIFO that its process has."""
        os.mkfifo(self.fifo)
        reader = os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        return reader


class StatusTests(RuntimeCase):
    def test_what_crun_has_recorded(self) -> None:
        self.assertIsNone(self.crun.status("c1"))
        for path, has_one in (("/c1", True), ("/", False), ("", False)):
            self.write(**{"cgroup-path": path})
            status = self.crun.status("c1")
            assert status is not None
            self.assertEqual((status.pid, status.alive, status.waiting), (os.getpid(), True, False))
            self.assertEqual(status.cgroup is not None, has_one)
        self.waiting()
        status = self.crun.status("c1")
        assert status is not None
        self.assertTrue(status.waiting)

    def test_a_record_that_says_nothing_is_named(self) -> None:
        file = self.fifo.parent / "status"
        for text in ("", "{}", "[]", '{"pid": "x", "process-start-time": 1, "cgroup-path": ""}', "\xff"):
            file.write_bytes(text.encode("latin1"))
            with self.assertRaises(Unavailable) as caught:
                self.crun.status("c1")
            self.assertIn(str(file), str(caught.exception))
        file.unlink()
        file.mkdir()
        with self.assertRaises(Unavailable):
            self.crun.status("c1")


class ProgramTests(RuntimeCase):
    async def test_that_it_is_not_installed_is_told_once_it_is_needed(self) -> None:
        await self.crun.mount(self.root / "bin" / "crun")
        with self.assertRaises(FailedPrecondition) as caught:
            self.crun.command("list")
        self.assertIn("no-crun is missing; install the packages crun and conmon", str(caught.exception))

    async def test_nothing_is_deleted_where_nothing_is(self) -> None:
        for _ in range(2):
            await self.crun.delete("c2")


class StartTests(RuntimeCase):
    async def test_one_that_waits_goes_on_at_a_byte_and_waits_no_more(self) -> None:
        reader = self.waiting()
        self.write()
        await self.crun.start("c1")
        self.assertEqual((os.read(reader, 10), self.fifo.exists()), (b"\0", False))

    async def test_one_that_is_not_there_or_has_ended_is_not_started(self) -> None:
        with self.assertRaises(NotFound):
            await self.crun.start("c1")
        reader = self.waiting()
        self.write(**{"process-start-time": 1})
        with self.assertRaises(FailedPrecondition):
            await self.crun.start("c1")
        self.assertEqual(os.read(reader, 10), b"")

    async def test_one_that_ends_meanwhile_says_so(self) -> None:
        def broken(descriptor: int, data: bytes) -> int:
            raise BrokenPipeError

        self.waiting()
        self.write()
        before = len(os.listdir("/proc/self/fd"))
        self.patch(os, "write", broken)
        with self.assertRaises(Unavailable) as caught:
            await self.crun.start("c1")
        self.assertIn("ended while it was started", str(caught.exception))
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)


class DeleteTests(RuntimeCase):
    """A script stands for crun."""

    def program(self, script: str) -> None:
        program = self.root / "crun"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        self.crun = Crun(installed(), self.root, str(program))

    async def test_one_that_can_not_be_deleted_says_why_unless_it_is_gone(self) -> None:
        self.write()
        self.program("echo it is busy; exit 1")
        with self.assertRaises(Unavailable) as caught:
            await self.crun.delete("c1")
        self.assertIn("container c1 can't be deleted: it is busy", str(caught.exception))
        self.program(f"rm {self.fifo.parent / 'status'}; exit 1")
        for _ in range(2):
            await self.crun.delete("c1")
            self.assertFalse(self.fifo.parent.exists())

    async def test_of_one_that_crun_has_not_recorded_yet_the_files_are_deleted(self) -> None:
        self.waiting()
        self.program("exit 1")
        await self.crun.delete("c1")
        self.assertFalse(self.fifo.parent.exists())

    async def test_limits_that_are_refused_are_told_in_cruns_words(self) -> None:
        self.program(f"cat >{self.root}/said; echo too few; exit 1")
        with self.assertRaises(InvalidArgument) as caught:
            await self.crun.update("c1", {"cpu": {"shares": 2}})
        self.assertIn("too few", str(caught.exception))
        self.assertEqual(json.loads((self.root / "said").read_text()), {"cpu": {"shares": 2}})


class OpenedTests(RuntimeCase):
    """The FIFO of a container whose first process does not wait at it yet."""

    def setUp(self) -> None:
        super().setUp()
        self.clock = Clock()

    def opening(self) -> Deferred[int]:
        return start(runtime._opened(self.clock, self.fifo, 5.0))

    def test_it_is_waited_for(self) -> None:
        os.mkfifo(self.fifo)
        opening = self.opening()
        self.clock.pump([0.1] * 20)
        self.assertNoResult(opening)
        self.addCleanup(os.close, os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK))
        self.clock.advance(0.1)
        os.close(self.successResultOf(opening))

    def test_it_is_not_waited_for_for_ever(self) -> None:
        os.mkfifo(self.fifo)
        opening = self.opening()
        self.clock.pump([0.1] * 45)
        self.assertNoResult(opening)
        self.clock.pump([0.1] * 10)
        self.assertIn("c1 does not start", str(self.failureResultOf(opening, Unavailable).value))

    def test_one_that_is_gone_has_been_started(self) -> None:
        self.failureResultOf(self.opening(), FailedPrecondition)
        self.fifo.mkdir()
        self.assertIn("Is a directory", str(self.failureResultOf(self.opening(), Unavailable).value))
