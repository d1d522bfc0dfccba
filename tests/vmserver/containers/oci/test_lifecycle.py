# SPDX-License-Identifier: Apache-2.0
"""The steps between a container's phases, where one of them fails or comes late."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import start
from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from tests.support.threads import in_this_thread
from vmserver.containers.hooks import Hook
from vmserver.containers.oci import index as index_module
from vmserver.containers.oci import lifecycle as module
from vmserver.containers.oci import record as records
from vmserver.containers.oci import state as states
from vmserver.containers.oci.conmon import CannotRun, Exit, Process
from vmserver.containers.oci.container import OciContainer
from vmserver.containers.oci.index import ContainerIndex
from vmserver.containers.oci.lifecycle import STOP_SECONDS, Lifecycle
from vmserver.containers.oci.record import OciRecord, Phase

PROCESS = Process(7, 70, 8, 80)


@attrs.define
class Status:
    """What crun says of a container."""

    waiting: bool
    alive: bool = True


class Watch:
    """A watch of a container. :ivar seen: tells its end."""

    def __init__(self, seen: Callable[[Exit], None]) -> None:
        self.seen = seen
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Machine:
    """Stands for conmon, crun, the file systems, the bundles and the rotation of logs.

    :ivar calls: in their order. :ivar failing: the errors of calls, by their names. :ivar status_: crun's.
    :ivar then: crun's status once it was told to start it. :ivar found: what conmon finds."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, Exception] = {}
        self.status_: Status | None = Status(waiting=True)
        self.then: Status | None = None
        self.found: Process | Exit | None = PROCESS
        self.watches: list[Watch] = []
        self.rotated: set[str] = set()
        self.unread = 0
        self.filters = self

    def keep(self, spec: object, id: str) -> None:
        """Take the filter of crun's; it is not looked at."""

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise self.failing[name]

    async def prepare(self, container: OciContainer) -> dict[str, Any]:
        self._call("prepare")
        return {"linux": {}}

    async def create(self, monitored: object) -> Process:
        self._call("create")
        return PROCESS

    def find(self, monitored: object) -> Process | Exit | None:
        return self.found

    def status(self, id: str) -> Status | None:
        return self.status_

    async def start(self, id: str) -> None:
        self.status_ = self.then or self.status_
        self._call("start")

    async def discard(self, monitored: object) -> None:
        self._call("discard")

    async def unmount(self, container: OciContainer) -> None:
        self._call("unmount")

    async def delete(self, directory: Path) -> None:
        self._call("delete")

    def watch(self, monitored: object, process: Process, seen: Callable[[Exit], None]) -> Watch:
        self.watches.append(Watch(seen))
        return self.watches[-1]

    def add(self, id: str, *_: object) -> None:
        self.rotated.add(id)

    def remove(self, id: str) -> None:
        self.rotated.discard(id)

    def close(self) -> None:
        self.calls.append("close")

    async def freeze(self, ids: list[str]) -> None:
        self._call("freeze")

    async def thaw(self, ids: list[str]) -> None:
        self._call("thaw")

    async def tell(self, container: OciContainer, hook: object) -> None:
        self._call("tell")


class LifecycleTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(index_module, "run_in_thread", in_this_thread)
        self.patch(module, "run_in_thread", in_this_thread)
        self.patch(module, "kill_strays", lambda id: self.machine.calls.append(f"strays of {id}"))
        self.fresh()

    def fresh(self) -> None:
        """Have another container, that was created."""
        top = Path(tempfile.mkdtemp(prefix="lifecycle-"))
        self.addCleanup(shutil.rmtree, top)
        self.clock, self.told = Clock(), list[int]()
        self.machine = Machine()
        self.index = ContainerIndex(installed(), top)
        self.index.watch(lambda state: self.told.append(state.state), lambda id: self.told.append(-1))
        every: Any = self.machine
        clock: Any = self.clock
        self.lifecycle = Lifecycle(clock, self.index, every, every, every, every, every, every)
        self.container = self.index.new(OciRecord(messages.ContainerState(id="c1"), cri.ContainerConfig()))
        self.container.directory.mkdir(parents=True)
        self.successResultOf(start(self.index.add(self.container)))
        self.told.clear()

    def started(self) -> Deferred[None]:
        return start(self.lifecycle.start(self.container))

    def recovered(self, phase: Phase) -> Phase:
        self.container.record.phase = phase
        self.successResultOf(start(self.lifecycle.recover(self.container)))
        return self.phase()

    def phase(self) -> Phase:
        """Return the phase, which is also the recorded one."""
        recorded = records.load(self.container.directory)
        assert recorded is not None
        self.assertEqual(recorded.phase, self.container.record.phase)
        return recorded.phase

    def state(self) -> messages.ContainerState:
        return self.container.record.state

    def test_it_is_made_started_and_watched_until_it_has_ended(self) -> None:
        self.successResultOf(self.started())
        self.assertEqual(self.machine.calls, ["prepare", "create", "start"])
        self.assertEqual((self.phase(), self.state().pid), (Phase.RUNNING, 7))
        self.assertEqual((self.container.process, self.machine.rotated), (PROCESS, {"c1"}))
        (watch,) = self.machine.watches
        watch.seen(Exit(3, 10, oom_killed=False))
        self.assertEqual((self.phase(), self.state().exit_code), (Phase.EXITED, 3))
        self.assertEqual(self.machine.calls[3:], ["discard", "unmount"])
        self.assertEqual((watch.closed, self.machine.rotated), (True, set()))
        self.assertEqual(self.told, [cri.CONTAINER_RUNNING, cri.CONTAINER_EXITED])

    def test_what_can_not_run_has_ended_and_says_why(self) -> None:
        for name, error, kind, reason in (
            ("create", CannotRun("no such file", 127), InvalidArgument, "ContainerCannotRun"),
            ("create", CannotRun("odd", 128), FailedPrecondition, "StartError"),
            ("start", Unavailable("crun hangs"), FailedPrecondition, "StartError"),
        ):
            self.fresh()
            self.machine.failing = {name: error}
            failure = self.failureResultOf(self.started(), kind)
            self.assertIn(f"container c1 can't be started: {error}", str(failure.value))
            self.assertEqual((self.phase(), self.state().reason), (Phase.EXITED, reason))
            self.assertEqual(self.machine.calls[-2:], ["discard", "unmount"])
            self.assertEqual(self.told, [cri.CONTAINER_EXITED])

    def test_one_that_crun_does_not_know_any_more_has_not_been_started(self) -> None:
        self.machine.failing = {"start": NotFound("crun has no container")}
        self.machine.status_ = None
        self.failureResultOf(self.started(), FailedPrecondition)
        self.assertEqual((self.phase(), self.state().reason), (Phase.EXITED, "StartError"))

    def test_a_start_that_failed_for_another_reason_may_be_tried_again(self) -> None:
        for name in ("prepare", "create"):
            self.machine.failing = {name: Unavailable("crun hangs")}
            self.failureResultOf(self.started(), Unavailable)
            self.assertEqual((self.phase(), self.state().started_at), (Phase.CREATED, 0))
            self.assertEqual(self.machine.calls[-1], "discard")
        self.machine.failing = {"prepare": Unavailable("away"), "discard": Unavailable("away")}
        self.failureResultOf(self.started(), Unavailable)
        self.assertEqual(self.phase(), Phase.CREATING)
        self.machine.failing, self.machine.calls = {}, []
        self.successResultOf(self.started())
        self.assertEqual(self.machine.calls, ["discard", "prepare", "create", "start"])
        self.assertEqual(self.told, [cri.CONTAINER_RUNNING])

    def test_one_that_an_earlier_agent_has_let_go_is_not_let_go_again(self) -> None:
        for status, calls in (
            (Status(waiting=False), []),
            (Status(waiting=True), ["start"]),
            (None, ["start"]),
        ):
            self.fresh()
            self.machine.status_ = status
            self.assertEqual(self.recovered(Phase.STARTING), Phase.RUNNING)
            self.assertEqual(self.machine.calls, calls)

    def test_a_start_that_fails_although_it_has_run_is_none_that_failed(self) -> None:
        self.machine.failing = {"start": Unavailable("it does not answer")}
        self.machine.then = Status(waiting=False, alive=False)
        self.successResultOf(self.started())
        self.assertEqual(self.phase(), Phase.RUNNING, "its watch tells how it has ended")

    def test_what_the_next_agent_makes_of_each_phase(self) -> None:
        for phase, found, then, calls in (
            (Phase.CREATED, None, Phase.CREATED, []),
            (Phase.CREATING, None, Phase.CREATED, ["strays of c1", "discard"]),
            (Phase.RUNNING, PROCESS, Phase.RUNNING, []),
            (Phase.RUNNING, Exit(4, 10, oom_killed=False), Phase.EXITED, ["discard", "unmount"]),
            (Phase.RUNNING, None, Phase.EXITED, ["discard", "unmount"]),
            (Phase.STARTING, Exit(4, 10, oom_killed=False), Phase.EXITED, ["discard", "unmount"]),
            (Phase.KEPT, PROCESS, Phase.KEPT, ["freeze"]),
            (Phase.GIVEN, PROCESS, Phase.GIVEN, ["freeze"]),
            (Phase.GIVEN, Exit(4, 10, oom_killed=False), Phase.EXITED, ["discard", "unmount"]),
            (Phase.ENDED, None, Phase.EXITED, ["discard", "unmount"]),
            (Phase.EXITED, None, Phase.EXITED, []),
        ):
            self.fresh()
            self.machine.found = found
            self.container.record.phase = phase
            self.successResultOf(start(self.index.note(self.container)))
            self.assertEqual((self.recovered(phase), self.machine.calls), (then, calls), phase)
            self.assertEqual(len(self.machine.watches), found is PROCESS)

    def given(self, hook: Hook | None = None) -> None:
        """Make it one that ran in a pod that was kept, and that this pod was given."""
        self.successResultOf(self.started())
        states.kept(self.container.record)
        self.container.quiet = True
        config = cri.ContainerConfig()
        self.successResultOf(start(self.index.give(self.container, "c2", config, hook, 5)))
        self.machine.calls.clear()
        self.machine.status_ = Status(waiting=False)
        self.told.clear()

    def test_a_container_that_was_given_goes_on_when_it_is_started(self) -> None:
        self.given(Hook(("reseed",), 0, 1.0))
        self.assertEqual((self.phase(), self.state().state), (Phase.GIVEN, cri.CONTAINER_CREATED))
        self.successResultOf(self.started())
        self.assertEqual(self.machine.calls, ["thaw", "tell"])
        self.assertEqual((self.phase(), self.state().id), (Phase.RUNNING, "c2"))
        self.assertIsNone(self.container.record.hook)
        self.assertEqual(self.told, [cri.CONTAINER_RUNNING])

    def test_a_start_that_was_cut_short_runs_its_hook_again(self) -> None:
        self.given(Hook(("reseed",), 0, 1.0))
        states.starting(self.container.record, 9)
        self.successResultOf(start(self.index.save(self.container)))
        recorded = records.load(self.container.directory)
        assert recorded is not None
        self.assertEqual((recorded.hook, recorded.engine_id), (Hook(("reseed",), 0, 1.0), "c1"))
        self.assertEqual(self.recovered(Phase.STARTING), Phase.RUNNING)
        self.assertEqual(self.machine.calls, ["thaw", "tell"])

    def test_one_whose_hook_fails_is_ended(self) -> None:
        self.given(Hook(("reseed",), 0, 1.0))
        self.machine.failing = {"tell": FailedPrecondition("ended with 3")}
        failure = self.failureResultOf(self.started(), FailedPrecondition)
        self.assertIn("container c2 can't be started: ended with 3", str(failure.value))
        self.assertEqual((self.phase(), self.state().reason), (Phase.EXITED, "StartError"))

    def test_a_kept_one_that_ends_is_removed_and_nobody_is_told(self) -> None:
        for seen in (True, False):
            self.fresh()
            self.successResultOf(self.started())
            states.kept(self.container.record)
            self.container.quiet = True
            self.successResultOf(start(self.index.note(self.container)))
            self.told.clear()
            if seen:
                self.machine.watches[-1].seen(Exit(0, 10, oom_killed=False))
            else:
                self.machine.found = None
                self.successResultOf(start(self.lifecycle.recover(self.container)))
            self.assertEqual((self.told, self.index.all()), ([], []))
            self.assertEqual(self.machine.calls[-3:], ["discard", "unmount", "delete"])

    def test_one_that_cant_be_given_stays_as_it_was(self) -> None:
        self.successResultOf(self.started())
        states.kept(self.container.record)
        self.container.quiet = True
        self.patch(records, "save", self.refuse)
        giving = start(self.index.give(self.container, "c2", cri.ContainerConfig(), None, 5))
        self.failureResultOf(giving, ResourceExhausted)
        self.assertEqual((self.container.record.phase, self.container.id), (Phase.KEPT, "c1"))
        self.assertEqual(self.state().state, cri.CONTAINER_RUNNING)
        self.assertIs(self.index.get("c1"), self.container)

    def test_a_removal_is_gone_on_with(self) -> None:
        self.container.record.phase = Phase.REMOVING
        self.successResultOf(start(self.lifecycle.recover(self.container)))
        self.assertEqual(self.machine.calls, ["discard", "unmount", "delete"])
        self.assertEqual((self.told, self.index.all()), ([-1], []))

    def test_a_removal_that_fails_is_known_to_the_next_agent(self) -> None:
        self.machine.failing = {"discard": Unavailable("crun hangs")}
        self.failureResultOf(start(self.lifecycle.remove(self.container)), Unavailable)
        self.assertEqual((self.phase(), self.machine.calls), (Phase.REMOVING, ["discard"]))

    def test_one_that_is_not_cleaned_up_is_still_one_that_has_ended(self) -> None:
        self.successResultOf(self.started())
        self.machine.failing = {"discard": Unavailable("crun hangs")}
        self.machine.watches[0].seen(Exit(0, 10, oom_killed=False))
        self.assertEqual((self.phase(), self.told[-1]), (Phase.ENDED, cri.CONTAINER_EXITED))
        self.machine.failing = {}
        self.assertEqual(self.recovered(Phase.ENDED), Phase.EXITED)

    def test_an_end_that_can_not_be_recorded_leaves_the_files_that_tell_it(self) -> None:
        self.successResultOf(self.started())
        self.patch(records, "save", self.refuse)
        self.machine.watches[0].seen(Exit(0, 10, oom_killed=False))
        self.assertEqual(self.told[-1], cri.CONTAINER_EXITED)
        self.assertNotIn("discard", self.machine.calls)

    def refuse(self, *_: object) -> None:
        raise OSError(28, "No space left on device")

    def test_a_full_disk_prevents_no_removal(self) -> None:
        self.successResultOf(self.started())
        self.patch(records, "save", self.refuse)
        self.successResultOf(start(self.lifecycle.remove(self.container)))
        self.assertEqual(self.machine.calls[-3:], ["discard", "unmount", "delete"])
        self.assertEqual((self.machine.watches[0].closed, self.index.all()), (True, []))

    def test_an_end_that_is_seen_while_it_is_removed_is_none_any_more(self) -> None:
        self.successResultOf(self.started())
        lock = self.successResultOf(self.container.lock.acquire())
        self.machine.watches[0].seen(Exit(0, 10, oom_killed=False))
        self.container.record.phase = Phase.REMOVING
        lock.release()
        self.assertEqual((self.container.record.phase, self.told), (Phase.REMOVING, [cri.CONTAINER_RUNNING]))

    def test_an_agent_that_stops_waits_for_ends_that_are_being_recorded_and_not_for_ever(self) -> None:
        self.successResultOf(self.started())
        lock = self.successResultOf(self.container.lock.acquire())
        self.machine.watches[0].seen(Exit(0, 10, oom_killed=False))
        stopping = start(self.lifecycle.stop())
        self.assertNoResult(stopping)
        self.clock.advance(STOP_SECONDS)
        self.successResultOf(stopping)
        lock.release()

    def test_once_it_has_stopped_nothing_is_watched(self) -> None:
        self.successResultOf(self.started())
        for _ in range(2):
            self.successResultOf(start(self.lifecycle.stop()))
        self.assertEqual((self.machine.watches[0].closed, self.machine.rotated), (True, set()))
        self.assertEqual(self.machine.calls.count("close"), 2)

    def test_a_bug_in_recording_an_end_is_logged_and_a_cancellation_is_not(self) -> None:
        for error, logged in ((ZeroDivisionError(), 1), (CancelledError(), 0)):
            self.fresh()
            self.successResultOf(self.started())
            self.machine.failing = {"discard": error}
            self.machine.watches[0].seen(Exit(0, 10, oom_killed=False))
            self.assertEqual(len(self.flushLoggedErrors()), logged)
