# SPDX-License-Identifier: Apache-2.0
"""Which containers' logs are written, where, until when, and how far the next daemon knows."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import TestCase

from infranetes.pods.node import logs as logs_module
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.node.logs import LONGEST_SECONDS, Logs, log_file, wait_while_advancing
from infranetes.pods.store.records import ContainerRecord, LogPosition, SandboxRecord
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.pods.store.store import Store
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
)
from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver
from tests.infranetes.pods.fakes import box, pod
from tests.support.waiting import until


class Agent:
    """An agent that has two lines of each container's output, and knows whether the container has ended.

    :ivar asked: the container and the cursor of each reading. :ivar reading: how many readings go on.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.ended: Deferred[None] = Deferred()
        self.reading = 0
        self.last_words = b""

    async def read_log(
        self, container_id: str, cursor: str, follow: bool
    ) -> AsyncIterator[vmserver.LogRecord]:
        assert follow, "the end of the container would be taken for that of its output"
        self.asked.append((container_id, cursor))
        self.reading += 1
        try:
            for number in range(int(cursor or 0), 2):
                yield vmserver.LogRecord(line=b"line %d" % number, cursor=str(number + 1))
            if not self.ended.called:
                await self.ended
            if self.last_words:
                yield vmserver.LogRecord(text=self.last_words, cursor="3")
                yield vmserver.LogRecord(cursor="4")
        finally:
            self.reading -= 1


class Positions:
    """The part of the store that logs use. :ivar error: why none can be written."""

    def __init__(self) -> None:
        self.saved: dict[str, LogPosition] = {}
        self.error: Exception | None = None

    def put_log(self, container_id: str, position: LogPosition) -> Deferred[None]:
        if self.error is not None:
            return fail(self.error)
        self.saved[container_id] = position
        return succeed(None)


class LogsTests(TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.agent = Agent()
        self.store = Positions()
        self.logs = Logs(installed(), cast(Store, self.store))
        self.container = self.make()

    def make(
        self,
        path: str = "0.log",
        position: LogPosition | None = None,
        directory: str | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> Container:
        """Return a container that runs."""
        blob = pod(log_directory=str(self.directory) if directory is None else directory).SerializeToString()
        record = SandboxRecord("5" * 32, "70" * 16, SandboxState.READY, "web", blob, "", 0, "fake", "docker")
        machine = SimpleNamespace(client=self.agent)
        sandbox = Sandbox(record, lambda _: cast(Any, machine))
        config = box(log_path=path, annotations=annotations or {}).SerializeToString()
        kept = ContainerRecord("c" * 32, sandbox.id, ContainerState.RUNNING, config, "", "", 0)
        container = Container(sandbox, kept, position)
        self.addCleanup(self.logs.stop, [container])
        return container

    def end(self, container: Container) -> None:
        """Let the container end, which its agent tells all who read its output."""
        container.record = container.record.to(ContainerState.EXITED)
        ended, self.agent.ended = self.agent.ended, succeed(None)
        ended.callback(None)

    def lines(self, path: str = "0.log") -> list[str]:
        return [line.split(" ", 3)[3] for line in (self.directory / path).read_text().splitlines()]

    async def written(self) -> None:
        """Wait until the file has both lines."""
        file = self.directory / "0.log"
        await until(lambda: file.exists() and len(self.lines()) == 2, "both lines")

    def test_a_log_is_below_the_pods_directory_or_nowhere(self) -> None:
        self.assertEqual(log_file(self.make("a/0.log")), self.directory / "a/0.log")
        for path, directory in (("", None), ("0.log", "")):
            self.assertIsNone(log_file(self.make(path, directory=directory)))
        for path, directory in (
            ("/0.log", None),
            ("../0.log", None),
            ("a/../../0.log", None),
            ("0.log", "relative"),
        ):
            self.assertRaises(InvalidArgument, log_file, self.make(path, directory=directory))

    async def test_a_last_line_is_ended_unless_it_is_the_termination_message(self) -> None:
        """kubelet takes an empty record for a newline: the message would be `DONE\\n`."""
        self.agent.last_words = b"1970-01-01T00:00:01.000000000Z stderr P DONE\n"
        for policy, last in (("File", ["DONE", ""]), ("FallbackToLogsOnError", ["DONE"])):
            path, annotations = f"{policy}.log", {"io.kubernetes.container.terminationMessagePolicy": policy}
            container, self.agent.ended = self.make(path, annotations=annotations), Deferred()
            self.logs.ensure(container)
            drained = self.logs.drain(container)
            self.end(container)
            await drained
            self.assertEqual(self.lines(path), ["line 0", "line 1", *last])

    async def test_it_has_all_that_was_written_once_the_container_has_ended(self) -> None:
        for _ in range(2):
            self.logs.ensure(self.container)
        await self.logs.wait_until_open(self.container)
        self.assertTrue((self.directory / "0.log").exists())
        drained = self.logs.drain(self.container)
        self.assertNoResult(drained)
        self.end(self.container)
        await drained
        self.assertEqual(self.lines(), ["line 0", "line 1"])
        self.assertEqual(self.agent.asked, [(self.container.id, "")])
        position = self.store.saved[self.container.id]
        self.assertEqual((position.cursor, position.done), ("2", True))
        self.assertEqual(position.size, (self.directory / "0.log").stat().st_size)

    async def test_one_that_is_complete_is_not_begun_again_and_one_that_is_not_goes_on(self) -> None:
        self.logs.ensure(self.container)
        await self.written()
        await self.logs.stop([self.container])
        position = self.store.saved[self.container.id]
        self.assertEqual((position.cursor, position.done, self.agent.reading), ("2", False, 0))
        again = self.make(position=position)  # the next daemon's
        self.end(again)
        await self.logs.drain(again)
        self.assertEqual(self.agent.asked[1:], [(again.id, "2")])
        self.assertEqual(self.lines(), ["line 0", "line 1"])
        last = self.make(position=self.store.saved[again.id])
        last.record = last.record.to(ContainerState.EXITED)
        await self.logs.drain(last)
        self.assertIsNone(last.pump)

    async def test_it_is_made_before_the_start_or_the_start_is_told_why_not(self) -> None:
        await self.logs.prepare(self.make("new/0.log"))
        self.assertEqual((self.directory / "new/0.log").read_bytes(), b"")
        await self.logs.prepare(self.make(""))
        (self.directory / "file").touch()
        (self.directory / "directory.log").mkdir()
        (self.directory / "link.log").symlink_to("/dev/null")
        for path, reason in (
            ("file/0.log", "Not a directory"),
            ("directory.log", "Is a directory"),
            ("link.log", "Too many levels of symbolic links"),
        ):
            with self.assertRaises(FailedPrecondition) as caught:
                await self.logs.prepare(self.make(path))
            self.assertIn(f"the log {self.directory / path} can't be made: {reason}", str(caught.exception))

    async def test_a_full_disk_or_one_that_hangs_holds_up_no_start(self) -> None:
        for error in (ResourceExhausted("the disk is full"), DeadlineExceeded("5 s")):

            async def fails(*_: object, error: Exception = error) -> None:
                raise error

            self.patch(logs_module, "make_file", fails)
            await self.logs.prepare(self.container)
        self.patch(logs_module, "OPEN_SECONDS", 0.01)

        async def hangs(*_: object) -> None:
            await Deferred()

        self.patch(logs_module, "make_file", hangs)
        await self.logs.prepare(self.container)

    async def test_without_a_path_or_a_vm_there_is_none_and_nobody_waits_for_it(self) -> None:
        unlogged, gone = self.make(""), self.make("gone.log")
        gone.sandbox.machine = cast(Any, SimpleNamespace(client=None))
        for container in (unlogged, gone):
            self.logs.ensure(container)
            self.assertIsNone(container.pump)
            await self.logs.wait_until_open(container)
            self.successResultOf(self.logs.drain(container))
            self.logs.abort(container, "its VM is gone")
            with self.assertRaises(FailedPrecondition):
                await self.logs.reopen(container)
        await self.logs.stop([unlogged, gone])

    async def test_that_of_a_running_container_is_not_begun_by_who_waits_for_its_end(self) -> None:
        self.successResultOf(self.logs.drain(self.container))
        self.assertIsNone(self.container.pump)

    async def test_reopened_it_goes_on_in_a_new_file(self) -> None:
        self.logs.ensure(self.container)
        await self.written()
        (self.directory / "0.log").rename(self.directory / "old.log")
        await self.logs.reopen(self.container)
        self.assertEqual((self.lines("old.log"), self.lines()), (["line 0", "line 1"], []))

    async def test_aborted_it_keeps_what_it_has_and_is_never_begun_again(self) -> None:
        self.logs.ensure(self.container)
        await self.written()
        for _ in range(2):
            self.logs.abort(self.container, "its VM is gone")
        await self.logs.drain(self.container)
        *lines, last = self.lines()
        self.assertEqual((lines, self.agent.reading), (["line 0", "line 1"], 0))
        self.assertEqual(
            last, "infranetes: this log ends here: its VM is gone; what was written last may be missing"
        )
        self.assertTrue(self.store.saved[self.container.id].done)
        self.assertFalse(self.logs.abort(self.container, "it is complete"))

    def test_it_is_waited_for_as_long_as_it_advances_and_somebody_waits(self) -> None:
        for steps, limit, waited in (
            ([], None, 2.0),  # it stands still
            ([1.5] * 4, None, 8.0),  # it advances for six seconds
            ([1.5] * 1000, None, LONGEST_SECONDS),
            ([1.5] * 1000, 30.0, 30.0),
            ([1.5] * 1000, 0.5, 2.0),  # at least as if it stood still
        ):
            clock, log = Clock(), SimpleNamespace(progress=0)
            container = cast(Any, SimpleNamespace(pump=SimpleNamespace(log=log)))
            never: Deferred[None] = Deferred()
            ends = None if limit is None else partial(float, limit)
            waiting = start(wait_while_advancing(clock, container, never, 2.0, ends))
            after = 0.0
            while not waiting.called:
                clock.advance(0.5)
                after += 0.5
                if steps and after % 1.5 == 0:
                    log.progress += 1
                    steps.pop()
            self.failureResultOf(waiting, DeadlineExceeded)
            self.assertTrue(waited <= after <= waited + 2, (after, waited))

    async def test_a_file_that_can_not_be_made_and_an_end_that_can_not_be_recorded_hold_up_nobody(
        self,
    ) -> None:
        nowhere = self.make("0.log", directory=f"{self.directory}/file")
        (self.directory / "file").write_text("")
        self.logs.ensure(nowhere)
        await self.logs.wait_until_open(nowhere)
        self.store.error = ResourceExhausted("full")
        self.logs.abort(nowhere, "its VM is gone")
        await self.logs.drain(nowhere)
        assert nowhere.log_position is not None
        self.assertTrue(nowhere.log_position.done)

    async def test_a_cursor_that_the_agent_does_not_know_ends_it(self) -> None:
        async def refuse(container_id: str, cursor: str, follow: bool) -> AsyncIterator[Any]:
            raise InvalidArgument("no such cursor")
            yield

        self.patch(self.agent, "read_log", refuse)
        self.logs.ensure(self.container)
        self.container.record = self.container.record.to(ContainerState.EXITED)
        await self.logs.drain(self.container)
        self.assertTrue(self.store.saved[self.container.id].done)
        self.assertTrue(self.flushLoggedErrors(InvalidArgument))
