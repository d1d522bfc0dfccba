# SPDX-License-Identifier: Apache-2.0
"""Launches that fail: what is known of them, what waits for their end, and what is done once."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.defer import Deferred

from infranetes.machines.timeline import bounded
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.store.states import SandboxState
from infranetes.providers.interface import InstanceState
from infranetes_common.concurrency import start
from infranetes_common.errors import AlreadyExists, NotFound, ResourceExhausted, Unavailable
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import pod

LONG = f"the cloud at https://user:tell-nobody@cloud.example does not answer{' at all' * 500}"


class FailedCase(PodsTestCase):
    def sandbox(self) -> Sandbox:
        (sandbox,) = self.world.node.inventory
        return sandbox

    def booting(self, config: Any = None) -> tuple[Deferred[str], Deferred[None]]:
        """Begin a launch; return its answer, and what its VM's boot waits for."""
        booting = self.world.provider.booting = Deferred()
        return self.start(config), booting

    def destructions(self) -> list[str]:
        return [id for call, id in self.world.provider.calls if call == "destroy"]

    def hold_destructions(self) -> Deferred[None]:
        """Have VMs that are destroyed be gone when this fires."""
        held: Deferred[None] = Deferred()
        destroy = self.world.provider._destroy

        async def slowly(instance_id: str) -> None:
            if not held.called:
                waiting: Deferred[None] = Deferred()
                held.addCallback(waiting.callback)
                await waiting
            await destroy(instance_id)

        self.patch(self.world.provider, "_destroy", slowly)
        return held


class WhyTests(FailedCase):
    """The reason is told in few words and without secrets, wherever one looks for it."""

    def test_of_a_launch_whose_vm_is_not_destroyed_yet_by_this_daemon_and_the_next(self) -> None:
        launching, booting = self.booting()
        self.world.provider.destroy_error = Unavailable("the IaaS is down")
        booting.errback(Unavailable(LONG))
        self.failureResultOf(launching, Unavailable)
        self.assertEqual(self.sandbox().failure, bounded(LONG))
        self.assertNotIn("tell-nobody", self.sandbox().failure)
        self.assertEqual(self.record(self.sandbox().id).message, bounded(LONG))
        self.world.kill()
        self.world.begin()
        self.assertEqual(self.sandbox().trouble, bounded(LONG))

    def test_of_one_that_could_not_be_recorded(self) -> None:
        self.world.store.failing = ResourceExhausted(LONG)
        self.failureResultOf(self.start(), ResourceExhausted)
        self.assertEqual(self.world.node.inventory.past[-1].trouble, bounded(LONG))

    def test_of_one_that_was_stopped_while_it_was_recorded(self) -> None:
        recorded: Deferred[None] = Deferred()
        put = self.world.store.put_sandbox
        patch = self.patch(
            self.world.store, "put_sandbox", lambda one: recorded.addCallback(lambda _: put(one))
        )
        launching = self.start()
        stopping = start(self.world.sandboxes.stop(self.sandbox().id))
        patch.restore()
        recorded.callback(None)
        self.successResultOf(stopping)
        words = str(self.failureResultOf(launching, Unavailable).value)
        self.assertIn("it was stopped while its VM was being launched", words)

    def test_of_one_whose_vm_has_ended_it_stays_that_though_it_is_stopped_then(self) -> None:
        launching, _ = self.booting()
        held = self.hold_destructions()
        (instance,) = self.world.provider.instances
        sandbox = self.sandbox()
        self.world.provider.end(instance, "its kernel panicked")
        stopping = start(self.world.sandboxes.stop(sandbox.id))
        held.callback(None)
        self.successResultOf(stopping)
        self.assertIn("its kernel panicked", sandbox.aborted)
        self.assertIn("its kernel panicked", str(self.failureResultOf(launching, Unavailable).value))

    def test_a_lost_pod_says_so_in_its_timeline_and_what_the_provider_said_last_is_known(self) -> None:
        self.run_pod()
        (instance,) = self.world.provider.instances
        self.world.provider.end(instance, "out of memory")
        sandbox = self.sandbox()
        self.assertIn(
            ("the pod is lost", "the VM ended by itself: out of memory"),
            [(step.what, step.error) for step in sandbox.timeline.steps],
        )
        assert sandbox.instance is not None
        self.assertIs(sandbox.instance.state, InstanceState.ENDED)

    def test_one_that_is_asked_for_and_turns_out_to_have_ended_is_lost(self) -> None:
        self.run_pod()
        (instance,) = self.world.provider.instances.values()
        ended = attrs.evolve(instance, state=InstanceState.ENDED, detail="power")
        self.world.provider.instances[instance.id] = ended
        self.do(self.world.sandboxes.look(self.sandbox()))
        self.assertIs(self.sandbox().state, SandboxState.LOST)


class UndoneTests(FailedCase):
    """What is left of a launch is destroyed once, and whoever asked waits for that."""

    def test_a_failure_is_answered_once_the_vm_is_destroyed(self) -> None:
        launching, booting = self.booting()
        held = self.hold_destructions()
        booting.errback(Unavailable("no boot"))
        self.assertNoResult(launching)
        held.callback(None)
        self.failureResultOf(launching, Unavailable)
        self.assertNothingLeft()

    def test_however_often_its_end_is_asked_for_it_is_destroyed_once(self) -> None:
        launching, booting = self.booting()
        held = self.hold_destructions()
        booting.errback(Unavailable("no boot"))
        passes = [start(self.world.reconciler.once(self.world.node_provider)) for _ in range(2)]
        stops = [start(self.world.sandboxes.stop(self.sandbox().id)) for _ in range(2)]
        self.assertNoResult(stops[0])
        held.callback(None)
        for one in (*passes, *stops):
            self.successResultOf(one)
        self.failureResultOf(launching, Unavailable)
        self.assertEqual(len(self.destructions()), 1)

    def test_a_stop_during_a_launch_destroys_the_vm_once(self) -> None:
        launching, _ = self.booting()
        self.do(self.world.sandboxes.stop(self.sandbox().id))
        self.failureResultOf(launching, Unavailable)
        self.assertEqual(len(self.destructions()), 1)

    def test_one_that_could_not_be_destroyed_is_not_shown_and_a_stop_tries_again(self) -> None:
        launching, booting = self.booting()
        self.world.provider.destroy_error = Unavailable("the IaaS is down")
        booting.errback(Unavailable("no boot"))
        self.failureResultOf(launching, Unavailable)
        id = self.sandbox().id
        self.assertRaises(NotFound, self.world.sandboxes.lookup, id)
        self.failureResultOf(start(self.world.sandboxes.stop(id)), Unavailable)
        self.world.provider.destroy_error = None
        self.do(self.world.sandboxes.stop(id))
        self.assertNothingLeft()

    def test_a_removal_that_failed_may_be_tried_again(self) -> None:
        id = self.run_pod()
        self.world.provider.destroy_error = Unavailable("the IaaS is down")
        self.failureResultOf(start(self.world.sandboxes.remove(id)), Unavailable)
        self.world.provider.destroy_error = None
        self.do(self.world.sandboxes.remove(id))
        self.assertNothingLeft()

    def test_a_removal_is_answered_once_the_record_is_deleted(self) -> None:
        id = self.run_pod()
        deleted: Deferred[None] = Deferred()
        delete = self.world.store.delete_sandbox
        self.patch(self.world.store, "delete_sandbox", lambda one: deleted.addCallback(lambda _: delete(one)))
        removing = start(self.world.sandboxes.remove(id))
        self.assertNoResult(removing)
        self.failureResultOf(self.start(), AlreadyExists)
        deleted.callback(None)
        self.successResultOf(removing)
        self.assertNothingLeft()

    def test_it_is_stopped_once_that_is_on_the_disk(self) -> None:
        id = self.run_pod()
        on_disk: Deferred[None] = Deferred()
        put = self.world.store.put_sandbox

        def slowly(record: Any) -> Deferred[None]:
            if record.state is not SandboxState.STOPPED:
                return put(record)
            return on_disk.addCallback(lambda _: put(record))

        self.patch(self.world.store, "put_sandbox", slowly)
        stopping = start(self.world.sandboxes.stop(id))
        self.assertIs(self.sandbox().state, SandboxState.STOPPING)
        on_disk.callback(None)
        self.successResultOf(stopping)
        self.assertIs(self.sandbox().state, SandboxState.STOPPED)

    def test_a_daemon_that_stops_leaves_one_that_is_being_recorded(self) -> None:
        recorded: Deferred[None] = Deferred()
        put = self.world.store.put_sandbox
        self.patch(self.world.store, "put_sandbox", lambda one: recorded.addCallback(lambda _: put(one)))
        launching = self.start()
        launching.addErrback(lambda failure: None)
        id = self.sandbox().id
        self.world.stop()
        recorded.callback(None)
        self.assertIs(self.record(id).state, SandboxState.LAUNCHING)


class AskedAgainTests(FailedCase):
    """A pod is asked for once more."""

    def test_one_that_was_lost_before_anybody_knew_of_it_is_not_given_to_who_asks_again(self) -> None:
        launching, booting = self.booting()
        launching.cancel()
        self.failureResultOf(launching)
        booting.callback(None)
        (instance,) = self.world.provider.instances
        self.world.provider.end(instance, "power")
        self.failureResultOf(self.start(), AlreadyExists)

    def test_until_when_it_is_waited_for_is_known_from_the_beginning_and_anew_with_each_call(self) -> None:
        seen: list[float] = []

        async def look(sandbox: Sandbox) -> None:
            seen.append(sandbox.asked_until)

        self.patch(self.world.node.features, "before_launch", look)
        self.world.provider.booting = Deferred()
        now = self.world.clock.seconds()
        first = start(self.world.sandboxes.run(pod(), "", 60.0))
        self.assertEqual(seen, [now + 60.0])
        self.world.clock.advance(30.0)
        second = start(self.world.sandboxes.run(pod(), "", 60.0))
        self.assertEqual(self.sandbox().asked_until, now + 90.0)
        self.world.provider.booting.callback(None)
        self.assertEqual(self.successResultOf(first), self.successResultOf(second))

    def test_that_a_client_knows_it_is_recorded_once(self) -> None:
        id = self.run_pod()
        writes = self.world.store.writes
        self.world.sandboxes.lookup(id)
        self.assertEqual(self.world.store.writes, writes)

    def test_a_stop_waits_for_logs_as_long_as_its_caller_less_the_time_that_the_vms_end_takes(self) -> None:
        for limit, seconds in ((60.0, 45.0), (20.0, 15.0)):
            id = self.run_pod(pod(uid=str(limit)))
            sandbox, now = self.world.node.inventory.sandboxes[id], self.world.clock.seconds()
            self.do(self.world.sandboxes.stop(id, limit))
            self.assertEqual(sandbox.awaited() - now, seconds)
            self.do(self.world.sandboxes.remove(id, 1.0))
            self.assertEqual(sandbox.awaited() - now, seconds, "who came first waits on")
