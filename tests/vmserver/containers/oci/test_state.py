# SPDX-License-Identifier: Apache-2.0
"""A container's record: how its phases change it, how it is kept, and who is told of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, NotFound, ResourceExhausted
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from tests.support.threads import in_this_thread
from vmserver.containers.oci import index as index_module
from vmserver.containers.oci import limit_changes, record, state
from vmserver.containers.oci.conmon import LOST_CODE, Exit
from vmserver.containers.oci.container import OciContainer
from vmserver.containers.oci.index import ContainerIndex
from vmserver.containers.oci.kernel import Kernel
from vmserver.containers.oci.log import CriLog, Cursor
from vmserver.containers.oci.record import FILE, OciRecord, Phase


def a_record(id: str = "c1", **fields: Any) -> OciRecord:
    config = cri.ContainerConfig(tty=True, stdin=True, stdin_once=True)
    return OciRecord(messages.ContainerState(id=id, image_id="i1", **fields), config)


class PhaseTests(SynchronousTestCase):
    """The changes of a record, with all that a reader of it sees."""

    def setUp(self) -> None:
        self.record = a_record()

    def seen(self) -> tuple[Phase, int, str, int, int, int, int]:
        now = self.record.state
        return (
            self.record.phase, now.state, now.reason, now.exit_code, now.pid, now.started_at, now.finished_at
        )  # fmt: skip

    def test_it_runs_and_ends(self) -> None:
        state.starting(self.record, 10)
        self.assertEqual(self.seen(), (Phase.STARTING, cri.CONTAINER_CREATED, "", 0, 0, 10, 0))
        state.running(self.record, 7)
        self.assertEqual(self.seen(), (Phase.RUNNING, cri.CONTAINER_RUNNING, "", 0, 7, 10, 0))
        for code, oom_killed, reason in (
            (0, False, "Completed"),
            (3, False, "Error"),
            (137, True, "OOMKilled"),
        ):
            state.running(self.record, 7)
            state.ended(self.record, Exit(code, 20, oom_killed=oom_killed, message="said"))
            self.assertEqual(self.seen(), (Phase.ENDED, cri.CONTAINER_EXITED, reason, code, 0, 10, 20))
            self.assertEqual(self.record.state.message, "said")

    def test_its_end_is_never_before_its_start(self) -> None:
        state.starting(self.record, 10)
        state.ended(self.record, Exit(0, 9, oom_killed=False, message=""))
        self.assertEqual(self.record.state.finished_at, 10)

    def test_one_whose_end_nobody_saw(self) -> None:
        state.starting(self.record, 10)
        state.lost(self.record, 20)
        self.assertEqual(self.seen(), (Phase.ENDED, cri.CONTAINER_EXITED, "Error", LOST_CODE, 0, 10, 20))
        self.assertEqual(self.record.state.message, state.LOST)

    def test_one_that_can_not_be_started(self) -> None:
        for code, reason in ((126, "ContainerCannotRun"), (127, "ContainerCannotRun"), (128, "StartError")):
            for begun, started_at in ((True, 10), (False, 20)):
                self.record = a_record()
                if begun:
                    state.starting(self.record, 10)
                state.cannot_start(self.record, code, "why", 20)
                expected = (Phase.ENDED, cri.CONTAINER_EXITED, reason, code, 0, started_at, 20)
                self.assertEqual((self.seen(), self.record.state.message), (expected, "why"))

    def test_one_whose_start_failed_may_be_started_again(self) -> None:
        state.starting(self.record, 10)
        state.not_started(self.record)
        self.assertEqual(self.seen(), (Phase.CREATED, cri.CONTAINER_CREATED, "", 0, 0, 0, 0))


class ContainerTests(SynchronousTestCase):
    def test_what_conmon_is_told(self) -> None:
        made = OciContainer(a_record(), Path("/top/c1"))
        told = made.monitored
        self.assertEqual(
            (told.id, told.bundle, told.log), ("c1", Path("/top/c1/bundle"), Path("/top/c1/log"))
        )
        self.assertEqual((told.terminal, told.stdin, told.stdin_once), (True, True, True))
        self.assertEqual((made.root, made.written), (Path("/top/c1/bundle/rootfs"), Path("/top/c1/upper")))

    def test_who_waits_for_its_end_is_told_once_it_has_ended_or_is_removed(self) -> None:
        for end in ("ended", "removed"):
            made = OciContainer(a_record(), Path("/top/c1"))
            made.notify()
            waiting, code = made.when_over(), made.exit_code()
            self.assertNoResult(waiting)
            self.assertFalse(made.over)
            if end == "ended":
                state.ended(made.record, Exit(3, 20, oom_killed=False, message=""))
            else:
                made.removed = True
            made.notify()
            self.successResultOf(waiting)
            self.successResultOf(made.when_over())
            self.assertEqual((self.successResultOf(code), made.over), (3 if end == "ended" else 0, True))

    def test_of_one_that_had_ended_before_this_agent_the_end_is_known_at_once(self) -> None:
        made = OciContainer(a_record(state=cri.CONTAINER_EXITED, exit_code=4), Path("/top/c1"))
        self.successResultOf(made.when_over())
        self.assertEqual(self.successResultOf(made.exit_code()), 4)

    def test_it_is_read_as_far_as_its_last_reader_has_come(self) -> None:
        top = Path(tempfile.mkdtemp(prefix="container-"))
        self.addCleanup(shutil.rmtree, top)
        made = OciContainer(a_record(), top)
        made.log.write_text("2026-11-22T14:21:00Z stdout F text\n")
        self.assertIsNone(made.read_to)
        made.reading = CriLog(made.log)
        self.addCleanup(made.reading.close)
        self.assertIsNone(made.read_to)
        made.reading.read()
        self.assertEqual(made.read_to, Cursor(1, made.log.stat().st_size))

    def test_its_state_is_a_copy(self) -> None:
        made = OciContainer(a_record(), Path("/top/c1"))
        made.state().exit_code = 9
        self.assertEqual(made.record.state.exit_code, 0)

    def test_its_images_are_its_own_and_those_that_are_volumes(self) -> None:
        its = a_record()
        its.config.mounts.add(container_path="/v", image=cri.ImageSpec(image="i2"))
        its.config.mounts.add(container_path="/h", host_path="/h")
        self.assertEqual(its.images, {"i1", "i2"})


class IndexTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.top = Path(tempfile.mkdtemp(prefix="index-"))
        self.addCleanup(shutil.rmtree, self.top)
        self.directory = self.top / "state" / "containers"
        self.patch(index_module, "run_in_thread", in_this_thread)
        self.told: list[str] = []
        self.index = self.made()

    def made(self) -> ContainerIndex:
        found = ContainerIndex(installed(), self.directory)
        found.watch(lambda state: self.told.append(f"{state.id} changed"), lambda id: self.told.append(id))
        return found

    def done(self, work: Any) -> Any:
        return self.successResultOf(start(work))

    def add(self, id: str, created_at: int = 0) -> OciContainer:
        made = self.index.new(a_record(id, created_at=created_at))
        made.directory.mkdir(parents=True)
        self.done(self.index.add(made))
        return made

    def test_what_is_added_is_listed_told_and_known_to_the_next_agent_by_its_age(self) -> None:
        self.assertEqual(self.done(self.index.load()), [])
        for id, created_at in (("a", 3), ("b", 1), ("c", 2)):
            made = self.add(id, created_at)
            self.assertIs(self.index.get(id), made)
            self.assertIs(self.index.existing(id), made)
        self.assertEqual(self.told, ["a changed", "b changed", "c changed"])
        self.assertEqual([one.id for one in self.index.all()], ["a", "b", "c"])
        self.index = self.made()
        self.done(self.index.load())
        found = self.index.all()
        self.assertEqual([one.id for one in found], ["b", "c", "a"])
        self.assertEqual(found[0].record, a_record("b", created_at=1))
        self.assertEqual(found[0].directory, self.directory / "b")

    def test_directories_without_a_record_are_returned_and_what_is_no_containers_is_left_alone(self) -> None:
        self.add("a")
        for name in ("half", "Not_an_id"):
            (self.directory / name).mkdir()
        self.index = self.made()
        self.assertEqual(self.done(self.index.load()), [self.directory / "half"])
        self.assertEqual([one.id for one in self.index.all()], ["a"])

    def test_users_of_a_user_namespace_may_pass_its_directory_and_not_list_it(self) -> None:
        self.addCleanup(os.umask, os.umask(0o077))
        self.done(self.index.load())
        self.assertEqual(self.directory.stat().st_mode & 0o777, 0o711)

    def test_a_record_that_is_anothers_of_another_version_or_damaged_is_named(self) -> None:
        self.add("a")
        file = self.directory / "a" / FILE
        good = json.loads(file.read_text())
        shutil.copytree(self.directory / "a", self.directory / "b")
        wrong: list[Any] = [{**good, "version": 2}, {**good, "phase": "x"}, {**good, "state": "x"}, [], {}]
        for damage in (good, *wrong):
            (self.directory / "b" / FILE).write_text(json.dumps(damage))
            failure = self.failureResultOf(start(self.made().load()), FailedPrecondition)
            self.assertIn(f"b/{FILE}", str(failure.value))

    def test_a_record_is_private_and_has_all_of_it(self) -> None:
        made = self.add("a")
        made.record.phase, made.record.stop_signal = Phase.RUNNING, 10
        self.assertTrue(self.done(self.index.note(made)))
        self.assertEqual(record.load(made.directory), made.record)
        self.assertEqual((made.directory / FILE).stat().st_mode & 0o777, 0o600)

    def test_only_a_running_one_is_running(self) -> None:
        made = self.add("a")
        self.assertRaises(FailedPrecondition, self.index.running, "a")
        state.running(made.record, 7)
        self.assertIs(self.index.running("a"), made)
        for find in (self.index.running, self.index.existing):
            self.assertRaises(NotFound, find, "b")
        self.assertIsNone(self.index.get("b"))

    def test_one_that_is_removed_is_told_once_and_its_waiters_wake(self) -> None:
        made = self.add("a")
        waiting = made.when_over()
        self.told.clear()
        for _ in range(2):
            self.index.remove(made)
        self.successResultOf(waiting)
        self.assertEqual((self.told, self.index.all()), (["a"], []))

    def test_a_record_that_can_not_be_written_says_whether_there_is_room(self) -> None:
        made = self.add("a")
        for number, kind in (
            (errno.ENOSPC, ResourceExhausted),
            (errno.EDQUOT, ResourceExhausted),
            (errno.EIO, FailedPrecondition),
        ):

            def fails(*_: object, number: int = number) -> None:
                raise OSError(number, os.strerror(number))

            self.patch(record, "save", fails)
            self.failureResultOf(start(self.index.save(made)), kind)
            self.assertFalse(self.done(self.index.note(made)))


class Machine:
    """Stands for crun and for the bundles: notes what they are asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    async def kernel(self) -> Kernel:
        return Kernel()

    async def update(self, id: str, resources: Any) -> None:
        self.asked.append((id, resources))

    async def limit(self, container: OciContainer, limits: Any) -> None:
        self.asked.append((container.id, limits.memory_limit_in_bytes))

    async def note(self, container: OciContainer) -> bool:
        self.asked.append(("noted", container.record.state.resources.memory_limit_in_bytes))
        return True

    def notify(self, container: OciContainer) -> None:
        self.asked.append(("told", container.record.config.linux.resources.memory_limit_in_bytes))


class LimitChangeTests(SynchronousTestCase):
    """Whom a change of limits is for depends on the container's phase."""

    def setUp(self) -> None:
        self.machine: Any = Machine()
        self.container = OciContainer(a_record(), Path("/top/c1"))

    def change(self, **fields: Any) -> list[tuple[str, Any]]:
        changes = cri.LinuxContainerResources(**fields)
        machine, asked = self.machine, self.machine.asked
        asked.clear()
        work: Deferred[None] = start(
            limit_changes.change_limits(machine, machine, machine, self.container, changes)
        )
        self.successResultOf(work)
        return list(asked)

    def test_one_that_has_not_run_has_them_in_its_bundle(self) -> None:
        self.assertEqual(self.change(memory_limit_in_bytes=5), [("c1", 5), ("noted", 5), ("told", 5)])
        self.assertEqual(self.change(memory_limit_in_bytes=5), [], "nothing changes")
        self.assertEqual(self.change(), [])

    def test_one_that_runs_has_them_from_crun(self) -> None:
        state.running(self.container.record, 2**22)  # no such process: it has just ended
        (asked, *_) = self.change(memory_limit_in_bytes=5, oom_score_adj=3)
        self.assertEqual(asked, ("c1", {"memory": {"limit": 5, "swap": 5}}))

    def test_of_one_that_has_ended_they_are_only_recorded(self) -> None:
        state.lost(self.container.record, 20)
        self.assertEqual(self.change(memory_limit_in_bytes=5), [("noted", 5), ("told", 5)])
