# SPDX-License-Identifier: Apache-2.0
"""Keeping pods for others to start from, and every way in which that fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred

from infranetes.pods.keeping import states
from infranetes.pods.keeping.keeper import GO_ON_SECONDS
from infranetes.pods.keeping.states import Stage
from infranetes_common.concurrency import replace_file, start
from infranetes_common.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from infranetes_common.wire import cri
from tests.infranetes.pods.fakes import FakeNode, box, pod
from tests.infranetes.pods.keeping.kept_case import SECRET, KeptCase, keeper_of


class KeepTests(KeptCase):
    def test_the_pod_is_held_kept_and_goes_on_with_its_secrets(self) -> None:
        def seen() -> None:
            self.seen = (self.agent.held, set(self.world.secrets.still), set(self.world.states.held))

        self.keeping.before = seen
        state = self.kept()
        self.assertEqual(self.seen, (True, {self.pod_id}, {self.pod_id}))
        self.assertEqual(self.agent.holds, [({}, {SECRET}, False)])
        self.assertEqual(self.world.secrets.brought, [self.pod_id])
        self.assert_pod_runs()
        self.assertEqual((state.stage, state.called, state.pod), (Stage.READY, "default/warm", "default/web"))
        self.assertEqual([(each.id, each.name) for each in state.containers], [(self.container, "main")])
        self.assertEqual((state.kept_at, state.pause_seconds), (1_700_000_000.5, 0.25))
        self.assertEqual(self.keeping.prepared, [self.world.states.files(state.id)])
        self.assertEqual(
            [path.name for path in sorted(self.world.states.files(state.id).iterdir())], ["disk.qcow2", "ram"]
        )

    def test_what_is_on_the_disk_is_roots_alone_and_says_nothing_of_the_configuration(self) -> None:
        self.agent.become(self.container, cri.CONTAINER_RUNNING)
        secretive = self.run_container(
            self.pod_id,
            name="other",
            command=["run", "--password=hunter2"],
            envs=[cri.KeyValue(key="A", value=b"b")],
        )
        state = self.kept()
        self.assertEqual({each.id for each in state.containers}, {self.container, secretive})
        record = self.directory / "states" / state.id / "state.json"
        self.assertNotIn("hunter2", record.read_text())
        self.assertEqual(json.loads(record.read_text())["format"], states.FORMAT)
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (record, record.parent, record.parent.parent)]
        self.assertEqual(modes, [0o600, 0o700, 0o700])

    def test_containers_that_have_ended_are_no_part_of_it(self) -> None:
        ended = self.run_container(self.pod_id, name="init")
        self.successResultOf(start(self.world.containers.stop(ended, 0)))
        self.assertEqual([each.id for each in self.kept().containers], [self.container])

    def test_the_next_daemon_has_it(self) -> None:
        state = self.kept()
        for _ in range(2):
            self.world.restart()
            self.assertEqual(list(self.world.states), [state])
            self.assertEqual(self.world.states.size, state.size)

    def test_when_it_was_used_last_outlives_the_daemon(self) -> None:
        state = self.kept()
        record = self.directory / "states" / state.id / "state.json"
        os.utime(record, (2_000_000_000, 2_000_000_000))
        self.world.restart()
        self.assertEqual(self.world.states.used_at(state), 2_000_000_000)
        self.successResultOf(start(self.world.states.use(state)))
        self.assertNotEqual(record.stat().st_mtime, 2_000_000_000)

    def test_one_that_can_not_be_removed_is_used_no_more_and_goes_with_the_next_start(self) -> None:
        state = self.kept()

        def fail(path: Path) -> None:
            raise OSError(errno.EIO, "Input/output error")

        self.patch(shutil, "rmtree", fail)
        for _ in range(2):
            self.failureResultOf(start(self.world.states.remove(state.id)), FailedPrecondition)
        (left,) = self.world.states
        self.assertEqual(left.stage, Stage.REMOVED)
        self.patch(shutil, "rmtree", _rmtree)
        self.world.restart()
        self.assert_goes_on()

    def test_a_name_is_taken_once_in_a_namespace(self) -> None:
        first = self.kept()
        for _ in range(2):
            self.assertIn("default/web", str(self.failureResultOf(self.keep(), AlreadyExists).value))
        self.assertEqual(list(self.world.states), [first])
        self.assert_pod_runs()
        self.assertEqual(len(self.keeping.asked), 1)
        second = self.kept(replace=True)
        self.assertEqual(list(self.world.states), [second])
        self.assertFalse((self.directory / "states" / first.id).exists())
        self.kept("other")
        self.assertEqual({each.name for each in self.world.states}, {"warm", "other"})

    def test_one_that_can_not_be_replaced_stays(self) -> None:
        first = self.kept()
        self.keeping.error = Unavailable("the hypervisor does not answer")
        self.failureResultOf(self.keep(replace=True), Unavailable)
        self.assertEqual(list(self.world.states), [first])
        self.assert_pod_runs()

    def test_the_templates_of_a_workload_have_one_each(self) -> None:
        first = self.kept()
        self.pod_id = self.run_pod(name="new", uid="u2", labels={"pod-template-hash": "abc"})
        self.run_container(self.pod_id)
        second = self.kept()
        self.assertEqual({each.template for each in (first, second)}, {"", "abc"})
        self.assertEqual(len(list(self.world.states)), 2)

    def test_twice_at_once_is_refused(self) -> None:
        self.keeping.waits = True
        first = self.keep(seconds=10.0)
        self.failureResultOf(self.keep("other"), FailedPrecondition)
        before, self.pod_id = self.pod_id, self.run_pod(name="new", uid="u2")
        self.run_container(self.pod_id)
        self.failureResultOf(self.keep(), AlreadyExists)
        self.pod_id = before
        self.world.wait(11.0)
        self.failureResultOf(first, DeadlineExceeded)
        self.assert_goes_on()

    def test_a_removed_one_can_be_made_again(self) -> None:
        state = self.kept()
        for _ in range(2):
            self.successResultOf(start(self.world.states.remove(state.id)))
        self.assertEqual(self.left(), [])
        self.kept()


class RefusalTests(KeptCase):
    def refused(self, error: type[Exception], sandbox: str = "") -> str:
        self.pod_id = sandbox or self.pod_id
        for _ in range(2):
            said = str(self.failureResultOf(self.keep(), error).value)
        self.assert_goes_on()
        self.assertEqual(self.agent.holds, [])
        return said

    def test_a_pod_without_a_running_container(self) -> None:
        self.assertIn("no container that runs", self.refused(FailedPrecondition, self.run_pod(uid="u2")))

    def test_a_pod_with_a_container_that_does_not_run_yet(self) -> None:
        self.successResultOf(start(self.world.containers.create(self.pod_id, box("second"))))
        self.assertIn("second is created", self.refused(FailedPrecondition))

    def test_a_pod_that_is_stopped(self) -> None:
        self.successResultOf(start(self.world.sandboxes.stop(self.pod_id)))
        self.failureResultOf(self.keep(), FailedPrecondition)
        self.assertEqual(self.left(), [])

    def test_a_clone_with_containers_that_nobody_has_started(self) -> None:
        self.agent.held = True
        said = str(self.failureResultOf(self.keep(), FailedPrecondition).value)
        self.assertIn("has started from a kept state", said)
        self.assertTrue(self.agent.held)
        self.assertEqual(self.left(), [])

    def test_the_pod_of_another_provider(self) -> None:
        world = FakeNode()
        world.provider_ready()
        self.addCleanup(world.kill)
        id = self.successResultOf(start(world.sandboxes.run(pod(), "")))
        keep = keeper_of(world.node, self.world.states).keep
        self.failureResultOf(start(keep(world.node.inventory.sandboxes[id], "warm", 60.0)), Unimplemented)


class FailureTests(KeptCase):
    def fails(self, error: type[Exception]) -> str:
        said = str(self.failureResultOf(self.keep(), error).value)
        self.assert_goes_on()
        return said

    def test_what_can_not_be_held_goes_on(self) -> None:
        self.agent.hold_error = FailedPrecondition("container main has a secret open")
        for _ in range(2):
            self.assertIn("a secret open", self.fails(FailedPrecondition))
        self.assertEqual(self.world.secrets.brought, [self.pod_id] * 2)
        self.assertEqual(self.keeping.asked, [])

    def test_containers_that_can_not_be_held_at_all_go_on(self) -> None:
        self.agent.hold_error = Unimplemented("containers of docker can't be held still")

        async def release() -> None:
            raise Unimplemented("containers of docker can't be held still")

        self.patch(self.agent, "release", release)
        self.fails(Unimplemented)

    def test_what_can_not_be_kept_goes_on(self) -> None:
        for error in (
            FailedPrecondition("it has volumes"),
            ResourceExhausted("no room"),
            Unavailable("ended"),
        ):
            self.keeping.error = error
            for _ in range(2):
                self.fails(type(error))
        self.assertEqual(self.keeping.prepared, [])

    def test_what_can_not_be_prepared_is_none(self) -> None:
        self.keeping.prepare_error = ResourceExhausted("no room")
        for _ in range(2):
            self.fails(ResourceExhausted)

    def test_a_full_disk_is_said(self) -> None:
        def full(*args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        self.patch(states, "replace_file", full)
        self.assertIn("make room", self.fails(ResourceExhausted))

    def test_a_directory_that_can_not_be_made_leaves_nothing(self) -> None:
        real = Path.mkdir

        def full(path: Path, *args: Any, **options: Any) -> None:
            if path.name == "vm":
                raise OSError(errno.ENOSPC, "No space left on device")
            real(path, *args, **options)

        self.patch(Path, "mkdir", full)
        for _ in range(2):
            self.fails(ResourceExhausted)
        self.assertEqual(self.agent.holds, [])

    def test_a_record_that_can_not_be_written_leaves_nothing(self) -> None:
        real = replace_file

        def full(path: Any, *args: Any) -> None:
            if path.name == "state.json":
                raise OSError(errno.ENOSPC, "No space left on device")
            real(path, *args)

        self.patch(states, "replace_file", full)
        self.fails(ResourceExhausted)
        self.assertEqual(len(self.keeping.prepared), 1)

    def test_one_that_takes_too_long_or_is_cancelled_is_ended(self) -> None:
        self.keeping.waits = True
        late = self.keep(seconds=5.0)
        self.world.wait(6.0)
        self.failureResultOf(late, DeadlineExceeded)
        self.assert_goes_on()
        cancelled = self.keep()
        cancelled.cancel()
        self.failureResultOf(cancelled, CancelledError)
        self.assertEqual(self.keeping.cancelled, 2)
        self.assert_goes_on()

    def test_a_pod_goes_on_once_its_secrets_are_there_again(self) -> None:
        self.world.secrets.error = Unavailable("the connection is lost")
        keeping = self.keep()
        self.assertNoResult(keeping)
        self.assertTrue(self.agent.held)
        self.world.wait(3.0)
        self.assertTrue(self.agent.held)
        self.world.secrets.error = None
        self.world.wait(6.0)
        self.successResultOf(keeping)
        self.assert_pod_runs()

    def test_one_that_is_cancelled_while_it_does_not_go_on_yet_goes_on(self) -> None:
        self.world.secrets.error = Unavailable("the connection is lost")
        keeping = self.keep()
        keeping.cancel()
        self.world.secrets.error = None
        self.world.wait(6.0)
        self.failureResultOf(keeping)
        self.assert_goes_on()

    def test_the_provider_has_the_time_that_is_left(self) -> None:
        held: Deferred[None] = Deferred()
        hold = self.agent.hold

        async def slow(*args: Any, **options: Any) -> None:
            await held
            await hold(*args, **options)

        self.patch(self.agent, "hold", slow)
        keeping = self.keep(seconds=60.0)
        self.world.clock.advance(20.0)
        held.callback(None)
        self.successResultOf(keeping)
        self.assertEqual(self.keeping.seconds, [40.0])

    def test_a_pod_that_does_not_go_on_in_time_goes_on_once_its_agent_is_heard(self) -> None:
        self.world.secrets.error = Unavailable("the connection is lost")
        keeping = self.keep(seconds=600.0)
        self.world.wait(GO_ON_SECONDS + 10)
        self.failureResultOf(keeping, Unavailable)
        self.assertEqual(self.left(), [f"held/{self.pod_id}"])
        self.assertIn("about to go on", str(self.failureResultOf(self.keep(), Unavailable).value))
        self.world.secrets.error = None
        self.successResultOf(start(self.world.node.features.live(self.sandbox)))
        self.assert_goes_on()

    def test_each_pass_tries_again(self) -> None:
        self.world.secrets.error = Unavailable("the connection is lost")
        self.keep(seconds=600.0).addErrback(lambda _: None)
        self.world.wait(GO_ON_SECONDS + 10)
        self.world.secrets.error = None
        self.successResultOf(start(self.world.node.features.sweep()))
        self.assert_goes_on()

    def test_a_pass_leaves_one_alone_whose_agent_is_not_heard(self) -> None:
        self.world.secrets.error = Unavailable("the connection is lost")
        self.keep(seconds=600.0).addErrback(lambda _: None)
        self.world.wait(GO_ON_SECONDS + 10)
        self.agent.away = True
        self.agent.streams[-1].break_(Unavailable("the connection is lost"))
        self.successResultOf(start(self.world.keeper.sweep()))
        self.assertEqual(self.left(), [f"held/{self.pod_id}"])


class OtherCallsTests(KeptCase):
    """Calls that come while a pod is held still."""

    def setUp(self) -> None:
        super().setUp()
        self.keeping.waits = True

    def test_containers_are_created_and_started_once_it_goes_on(self) -> None:
        keeping = self.keep(seconds=5.0)
        creating = start(self.world.containers.create(self.pod_id, box("second")))
        self.assertNoResult(creating)
        self.assertEqual([call for call, _ in self.agent.calls].count("create"), 1)
        self.world.wait(6.0)
        self.failureResultOf(keeping, DeadlineExceeded)
        second = self.successResultOf(creating)
        self.successResultOf(start(self.world.containers.start(second)))

    def test_an_agent_that_is_heard_again_lets_nothing_go_on_meanwhile(self) -> None:
        keeping = self.keep(seconds=5.0)
        for hook in (self.world.node.features.live(self.sandbox), self.world.node.features.sweep()):
            self.successResultOf(start(hook))
            self.assertTrue(self.agent.held)
        self.world.wait(6.0)
        self.failureResultOf(keeping, DeadlineExceeded)
        self.assert_goes_on()

    def test_they_wait_until_it_really_goes_on(self) -> None:
        self.world.secrets.error = Unavailable("the connection is lost")
        self.keep(seconds=5.0).addErrback(lambda _: None)
        self.world.wait(GO_ON_SECONDS + 15)
        creating = start(self.world.containers.create(self.pod_id, box("second")))
        self.assertNoResult(creating)
        self.world.secrets.error = None
        self.successResultOf(start(self.world.node.features.sweep()))
        self.successResultOf(creating)

    def test_a_stop_ends_it_and_leaves_nothing(self) -> None:
        keeping = self.keep()
        self.successResultOf(start(self.world.sandboxes.stop(self.pod_id)))
        self.failureResultOf(keeping)
        self.assertEqual(self.left(), [])
        self.assertEqual(self.world.states.held, set())
        self.assertEqual(self.world.provider.instances, {})

    def test_a_stop_lets_waiting_creations_end(self) -> None:
        self.world.secrets.error = Unavailable("the connection is lost")
        self.keep(seconds=5.0).addErrback(lambda _: None)
        creating = start(self.world.containers.create(self.pod_id, box("second")))
        self.successResultOf(start(self.world.sandboxes.stop(self.pod_id)))
        self.failureResultOf(creating)
        self.assertEqual(self.left(), [])
        self.assertEqual(self.world.keeper._holding, {})

    def test_a_vm_that_ends_meanwhile_leaves_nothing(self) -> None:
        keeping = self.keep(seconds=5.0)
        self.world.provider.end(self.sandbox.record.instance_id, "killed")
        self.world.wait(6.0)
        self.failureResultOf(keeping)
        self.successResultOf(start(self.world.sandboxes.stop(self.pod_id)))
        self.assertEqual(self.left(), [])

    def test_a_daemon_that_stops_has_it_go_on(self) -> None:
        self.keep().addErrback(lambda _: None)
        self.world.stop()
        self.assert_goes_on()

    def test_a_daemon_that_stops_waits_until_it_goes_on(self) -> None:
        self.keep().addErrback(lambda _: None)
        released: Deferred[None] = Deferred()
        release = self.agent.release

        async def slow() -> None:
            await released
            await release()

        self.patch(self.agent, "release", slow)
        stopping = start(self.world.keeper.stop())
        self.assertNoResult(stopping)
        released.callback(None)
        self.successResultOf(stopping)
        self.assert_goes_on()


class KilledDaemonTests(KeptCase):
    """The daemon is killed after each step, and another one starts."""

    def next_daemon(self) -> None:
        self.world.restart()
        self.assert_goes_on()
        self.assertEqual(self.world.secrets.brought, [self.pod_id])
        self.keeping.waits, self.keeping.error = False, None
        self.kept()

    def test_once_it_is_held(self) -> None:
        self.keeping.waits = True
        self.keep().addErrback(lambda _: None)
        self.assertTrue(self.agent.held)
        self.assertIn(f"held/{self.pod_id}", self.left())
        self.next_daemon()

    def test_once_it_is_marked(self) -> None:
        self.patch(self.world.secrets, "hold_still", _never)
        self.keep().addErrback(lambda _: None)
        self.assertFalse(self.agent.held)
        self.next_daemon()

    def test_once_its_secrets_are_there_again(self) -> None:
        release = self.agent.release
        self.patch(self.agent, "release", _never)
        self.keep().addErrback(lambda _: None)
        self.assertTrue(self.agent.held)
        self.patch(self.agent, "release", release)
        self.next_daemon()

    def test_while_it_is_prepared(self) -> None:
        self.patch(self.world.provider, "prepare", lambda directory, seconds: start(_never()))
        self.keep().addErrback(lambda _: None)
        self.assertFalse(self.agent.held)
        self.world.restart()
        self.assert_goes_on()

    def test_while_one_is_removed(self) -> None:
        state = self.kept()
        self.patch(shutil, "rmtree", lambda directory: None)
        self.successResultOf(start(self.world.states.remove(state.id)))
        self.assertTrue(self.left())
        self.patch(shutil, "rmtree", _rmtree)
        self.world.restart()
        self.assert_goes_on()

    def test_a_pod_that_ended_meanwhile_leaves_no_mark(self) -> None:
        (self.directory / "held").mkdir(parents=True)
        (self.directory / "held" / "gone").touch()
        self.world.restart()
        self.assert_goes_on()

    def test_records_that_can_not_be_read_are_removed(self) -> None:
        for content in ("", "{}", '{"format": 99}', "[1]", "\0"):
            state = self.kept()
            (self.directory / "states" / state.id / "state.json").write_text(content)
            self.world.restart()
            self.assert_goes_on()

    def test_a_record_of_another_state_is_removed(self) -> None:
        state = self.kept()
        top = self.directory / "states"
        shutil.copytree(top / state.id, top / "another")
        self.world.restart()
        self.assertEqual([each.id for each in self.world.states], [state.id])
        self.assertEqual([path.name for path in top.iterdir()], [state.id])


async def _never(*args: object) -> Any:  # Any: it returns nothing
    never: Deferred[None] = Deferred()
    await never


_rmtree = shutil.rmtree
