# SPDX-License-Identifier: Apache-2.0
"""The node asks a VM without our agent what it asks one with it."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from twisted.internet.defer import CancelledError, Deferred
from zope.interface.verify import verifyObject

from infranetes.machines.agentless.agent import BRING_AGAIN_SECONDS, PRESS_AGAIN_SECONDS
from infranetes.machines.agentless.ways import LOOK_AGAIN_SECONDS, PROBE_SECONDS, Ways
from infranetes.machines.interface import IAgent
from infranetes.providers.hypervisor import GuestState, GuestStatus
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, NotOffered, Unavailable
from infranetes_common.filesync.manifest import FILE, Entry
from infranetes_common.wire import cri, vmserver
from tests.infranetes.machines.agentless.agent_case import ID, AgentCase
from tests.infranetes.machines.agentless.fakes import FakeHypervisor, FakeWay, PoweringWay


class LifeTests(AgentCase):
    """A container that is a guest."""

    def test_it_is_an_agent(self) -> None:
        verifyObject(IAgent, self.agent)

    def test_it_answers_under_its_sandbox(self) -> None:
        info = self.do(self.agent.info())
        self.assertEqual((info.sandbox_id, info.now_nanos, info.steady_nanos), ("s1", 77, 0))

    def test_it_does_not_answer_for_a_vm_that_is_destroyed(self) -> None:
        self.hypervisor.destroyed = True
        self.refused(NotFound, self.agent.info())

    def test_a_created_container_does_not_execute(self) -> None:
        state = self.create()
        self.assertEqual((state.id, state.state), (ID, cri.CONTAINER_CREATED))
        self.assertEqual(self.hypervisor.calls, ["insert_cds"])

    def test_a_command_is_refused(self) -> None:
        self.assertIn("leave out command", self.refused(InvalidArgument, self.creation(command=["sh"])))
        self.refused(InvalidArgument, self.creation(args=["-x"]))

    def test_the_guest_is_told_its_name_environment_and_address(self) -> None:
        self.create(envs=[cri.KeyValue(key="A", value=b"1")])
        self.assertEqual(self.facts[0].hostname, "web-0")
        self.assertEqual(self.facts[0].environment, {"A": "1"})
        self.assertEqual(self.hypervisor.cds[0][0].files["address"], b"10.0.0.2/24")

    def test_a_started_container_runs(self) -> None:
        self.create()
        state = self.do(self.agent.start(ID))
        self.assertEqual((state.state, state.started_at), (cri.CONTAINER_RUNNING, 5))

    def test_a_guest_that_powers_off_has_exited_with_0(self) -> None:
        self.run_guest()
        state = self.do(self.agent.stop(ID, 30))
        self.assertEqual((state.state, state.exit_code, state.reason), (cri.CONTAINER_EXITED, 0, "Completed"))
        self.assertNotIn("switch_off", self.hypervisor.calls)

    def test_one_that_ignores_its_power_button_is_pressed_again_and_then_switched_off(self) -> None:
        self.run_guest()
        self.hypervisor.obeys = False
        stopping = start(self.agent.stop(ID, 25))
        self.reactor.advance(PRESS_AGAIN_SECONDS)
        self.assertEqual(self.hypervisor.calls.count("press_power_button"), 2)
        self.reactor.advance(PRESS_AGAIN_SECONDS)
        self.assertNoResult(stopping)
        self.reactor.advance(5)
        state = self.successResultOf(stopping)
        self.assertEqual((state.exit_code, state.reason), (137, "Error"))
        self.assertEqual(self.hypervisor.calls[-1], "switch_off")
        self.assertEqual(self.hypervisor.watched, 0)

    def test_one_that_powers_off_late_is_waited_for_and_not_switched_off(self) -> None:
        self.run_guest()
        self.hypervisor.obeys = False
        stopping = start(self.agent.stop(ID, 25))
        self.reactor.advance(3)
        self.hypervisor.become(GuestStatus(GuestState.OFF, 5, 9))
        self.assertEqual(self.successResultOf(stopping).exit_code, 0)
        self.assertNotIn("switch_off", self.hypervisor.calls)

    def test_without_a_grace_period_it_is_switched_off_at_once(self) -> None:
        self.run_guest()
        self.assertEqual(self.do(self.agent.stop(ID, 0)).exit_code, 137)
        self.assertNotIn("press_power_button", self.hypervisor.calls)

    def test_another_container_is_not_there_and_the_guest_stays_as_it_is(self) -> None:
        self.run_guest()
        before = list(self.hypervisor.calls)
        other = "d" * 64
        self.refused(NotFound, self.agent.start(other))
        self.refused(NotFound, self.agent.stop(other, 0))
        self.refused(NotFound, self.agent.exec_sync(other, ["ls"], 0, 10.0, 100))
        self.assertEqual(self.hypervisor.calls, before)

    def test_one_that_never_ran_is_told_as_it_is(self) -> None:
        self.create()
        self.assertEqual(self.do(self.agent.stop(ID, 30)).state, cri.CONTAINER_CREATED)
        self.assertEqual(self.hypervisor.calls, ["insert_cds"])

    def test_a_guest_that_ignores_its_power_button_powers_off_by_a_way_that_can(self) -> None:
        self.run_guest()
        self.hypervisor.obeys = False
        off = GuestStatus(GuestState.OFF, 5, 9)
        self.way = PoweringWay(lambda: self.reactor.callLater(3, self.hypervisor.become, off))
        stopping = start(self.agent.stop(ID, 25))
        self.reactor.advance(3)
        self.assertEqual(self.successResultOf(stopping).exit_code, 0)
        self.assertNotIn("switch_off", self.hypervisor.calls)

    def test_a_way_that_is_not_open_keeps_no_stop_waiting(self) -> None:
        self.run_guest()
        self.way.answer = Unavailable("it is still booting")
        self.assertEqual(self.do(self.agent.stop(ID, 25)).exit_code, 0)

    def test_a_cancelled_stop_leaves_nothing_that_watches(self) -> None:
        self.run_guest()
        self.hypervisor.obeys = False
        stopping = start(self.agent.stop(ID, 25))
        stopping.addErrback(lambda _: None)
        stopping.cancel()
        self.assertEqual(self.hypervisor.watched, 0)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_removal_ends_a_guest_that_runs(self) -> None:
        self.run_guest()
        self.do(self.agent.remove(ID))
        self.assertEqual(self.hypervisor.calls[-1], "switch_off")

    def test_removal_of_what_is_destroyed_does_nothing(self) -> None:
        self.hypervisor.destroyed = True
        self.do(self.agent.remove(ID))

    def test_what_only_our_agent_can_do_is_not_offered(self) -> None:
        self.assertIn("lacks our agent", self.refused(NotOffered, self.agent.new_key()))
        self.refused(NotOffered, self.agent.correct_clock(1, 2, 3))
        self.assertEqual(self.do(self.agent.images()), set())


class EventTests(AgentCase):
    """The stream of the guest's states."""

    def watched(self) -> list[vmserver.WatchEvent]:
        """Watch the guest from now on; return the list to which its events are added."""
        events: list[vmserver.WatchEvent] = []
        self.stream = self.agent.watch()

        async def watch() -> None:
            async for event in self.stream:
                events.append(event)

        self.watching = start(watch())
        self.watching.addErrback(lambda _: None)
        return events

    def states(self, events: Sequence[vmserver.WatchEvent]) -> list[int]:
        return [one.container.state for one in events if one.HasField("container")]

    def test_it_begins_with_the_present_state(self) -> None:
        events = self.watched()
        self.assertEqual([one.WhichOneof("event") for one in events], ["container", "synced"])
        self.assertEqual(self.states(events), [cri.CONTAINER_CREATED])

    def test_a_vm_without_a_container_has_none(self) -> None:
        self.container = ""
        self.assertEqual([one.WhichOneof("event") for one in self.watched()], ["synced"])

    def test_each_change_is_told(self) -> None:
        events = self.watched()
        self.do(self.agent.start(ID))
        self.hypervisor.become(
            GuestStatus(GuestState.CRASHED, 5, 9, 134, "GuestPanicked", "its kernel panicked")
        )
        self.assertEqual(
            self.states(events), [cri.CONTAINER_CREATED, cri.CONTAINER_RUNNING, cri.CONTAINER_EXITED]
        )
        last = events[-1].container
        self.assertEqual(
            (last.exit_code, last.reason, last.message), (134, "GuestPanicked", "its kernel panicked")
        )

    def test_a_stream_that_is_ended_no_longer_watches(self) -> None:
        self.watched()
        self.assertEqual(self.hypervisor.watched, 1)
        self.stream.cancel()
        self.assertEqual(self.hypervisor.watched, 0)


class CommandTests(AgentCase):
    """Commands by the ways into the guest."""

    def setUp(self) -> None:
        super().setUp()
        self.run_guest()

    def test_a_command_runs_by_the_way_that_answers(self) -> None:
        answer = self.do(self.agent.exec_sync(ID, ["ls", "/"], 0, 10.0, 100))
        self.assertEqual(answer.stdout, b"ssh")
        self.assertEqual(self.way.ran, [("ls", "/")])

    def test_without_a_way_it_is_refused_with_what_can_be_done(self) -> None:
        self.way.answer = Unavailable("nothing listens on port 22")
        why = self.refused(FailedPrecondition, self.agent.exec_sync(ID, ["ls"], 0, 10.0, 100))
        self.assertIn("kubectl attach", why)
        self.assertIn("nothing listens on port 22", why)

    def test_a_way_that_is_lost_is_looked_for_again(self) -> None:
        self.do(self.agent.exec_sync(ID, ["a"], 0, 10.0, 100))
        self.way.run_error = Unavailable("the connection was lost")
        self.refused(Unavailable, self.agent.exec_sync(ID, ["b"], 0, 10.0, 100))
        self.way.run_error = None
        self.do(self.agent.exec_sync(ID, ["c"], 0, 10.0, 100))
        self.assertEqual(self.way.asked, 2)

    def test_a_command_that_fails_by_itself_does_not_lose_the_way(self) -> None:
        self.way.run_error = NotFound("there is no such program")
        self.refused(NotFound, self.agent.exec_sync(ID, ["a"], 0, 10.0, 100))
        self.assertIs(self.agent.ways.current, self.way)

    def test_a_session_that_no_way_serves_fails_where_it_is_read_too(self) -> None:
        self.way.answer = Unavailable("no")
        call = self.agent.exec()
        self.refused(FailedPrecondition, call.send(vmserver.SessionInput()))

        async def read() -> None:
            async for _ in call:
                pass

        self.refused(FailedPrecondition, read())

    def test_what_the_guest_uses_is_told_by_itself_where_it_can(self) -> None:
        stats = self.do(self.agent.stats())
        self.assertEqual(stats.machine.cpu.total_nanos, 7)
        self.assertEqual([(one.id, one.written.bytes) for one in stats.containers], [(ID, 50)])
        self.do(self.agent.exec_sync(ID, ["a"], 0, 10.0, 100))
        self.assertEqual(self.do(self.agent.stats()).machine.processes, 3)

    def test_and_by_its_hypervisor_where_it_no_longer_can(self) -> None:
        self.do(self.agent.exec_sync(ID, ["a"], 0, 10.0, 100))
        self.way.run_error = Unavailable("gone")
        self.assertEqual(self.do(self.agent.stats()).machine.cpu.total_nanos, 7)


class SlowWayTests(AgentCase):
    """Several ways, of which the best may be slow."""

    def setUp(self) -> None:
        super().setUp()
        self.other = FakeWay("guest-agent")
        self.ways = Ways(self.reactor, "s1", lambda: [self.way, self.other])

    def test_the_best_way_that_answers_is_taken(self) -> None:
        self.assertIs(self.do(self.ways.open()), self.way)
        self.assertEqual(self.ways.name, "ssh")

    def test_a_better_way_that_is_slow_is_waited_for(self) -> None:
        self.way.answer = Deferred()
        opening = start(self.ways.open())
        self.assertNoResult(opening)
        self.reactor.advance(PROBE_SECONDS)
        self.assertIs(self.successResultOf(opening), self.other)

    def test_all_who_wait_for_a_way_share_one_look(self) -> None:
        answer: Deferred[None] = Deferred()
        self.way.answer = answer
        opening = [start(self.ways.open()) for _ in range(3)]
        answer.callback(None)
        self.assertEqual([self.successResultOf(each) for each in opening], [self.way] * 3)
        self.assertEqual((self.way.asked, self.other.asked), (1, 1))

    def test_one_that_waits_no_longer_ends_it_for_no_other(self) -> None:
        answer: Deferred[None] = Deferred()
        self.way.answer = answer
        first, second = start(self.ways.open()), start(self.ways.open())
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.assertNoResult(second)
        answer.callback(None)
        self.assertIs(self.successResultOf(second), self.way)

    def test_a_way_that_is_no_longer_waited_for_leaves_no_error(self) -> None:
        self.other.answer = Deferred()
        self.assertIs(self.do(self.ways.open()), self.way)
        self.assertTrue(self.other.answer.called)
        self.other.answer = None
        gc.collect()
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_one_that_failed_is_followed_by_another(self) -> None:
        self.way.answer = self.other.answer = Unavailable("not yet")
        self.refused(FailedPrecondition, self.ways.open())
        self.way.answer = None
        self.assertIs(self.do(self.ways.open()), self.way)

    def test_a_close_ends_it_for_all_and_no_other_begins(self) -> None:
        self.way.answer, self.other.answer = Deferred(), Deferred()
        opening = [start(self.ways.open()) for _ in range(2)]
        self.do(self.ways.close())
        for each in opening:
            self.assertIn("closed", str(self.failureResultOf(each, Unavailable).value))
        self.assertTrue(self.way.closed and self.other.closed)
        self.refused(Unavailable, self.ways.open())
        self.assertEqual((self.way.asked, self.reactor.getDelayedCalls()), (1, []))

    def test_a_close_ends_a_look_that_nobody_waits_for(self) -> None:
        self.way.answer = Unavailable("not yet")
        self.do(self.ways.open())
        answer: Deferred[None] = Deferred()
        self.way.answer = answer
        self.reactor.advance(LOOK_AGAIN_SECONDS)
        self.assertIs(self.do(self.ways.open()), self.other)
        self.do(self.ways.close())
        self.assertTrue(answer.called)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_afterwards_nobody_waits_for_it_but_it_is_found_once_it_answers(self) -> None:
        self.way.answer = Unavailable("not yet")
        self.assertIs(self.do(self.ways.open()), self.other)
        self.way.answer = None
        self.assertIs(self.do(self.ways.open()), self.other)
        self.reactor.advance(LOOK_AGAIN_SECONDS)
        self.do(self.ways.open())
        self.assertIs(self.do(self.ways.open()), self.way)

    def test_without_any_way_its_name_says_so(self) -> None:
        ways = Ways(self.reactor, "s1", list)
        self.refused(FailedPrecondition, ways.open())
        self.assertEqual(ways.name, "none")


class CloudTests(AgentCase):
    """A guest of a cloud, which was told what it is told when it was launched: it has no CD drives."""

    def setUp(self) -> None:
        super().setUp()
        self.hypervisor = FakeHypervisor(drives=0)
        self.agent = self.make_agent()

    def test_no_cds_are_made_for_it(self) -> None:
        self.run_guest()
        self.assertEqual(self.hypervisor.calls, ["execute"])
        self.assertEqual(self.facts, [])

    def test_what_its_pod_mounts_reaches_it_once_it_answers(self) -> None:
        self.do(self.secret(b"one"))
        self.do(self.put("v2", Entry(b"", FILE, 0o644, 0, 0, 3, 1), b"all", file=True))
        self.way.answer = Unavailable("it boots")
        self.create(("/etc/secret", "v1"), ("/etc/one", "v2"), ("/dev/termination-log", "v2"))
        self.assertEqual(self.way.files, {})
        self.do(self.agent.start(ID))
        self.reactor.advance(0)
        self.assertEqual(self.way.files, {})
        self.way.answer = None
        self.reactor.advance(BRING_AGAIN_SECONDS)
        self.assertEqual(self.way.files, {"/etc/secret": {"key": b"one"}})
        [ran] = self.way.ran
        self.assertEqual(ran[-2:], ("/etc/one", "644"))

    def test_what_changes_reaches_it_too(self) -> None:
        self.do(self.secret(b"one"))
        self.run_guest(("/etc/secret", "v1"))
        self.reactor.advance(0)
        self.do(self.secret(b"two"))
        self.assertEqual(self.way.files, {"/etc/secret": {"key": b"two"}})

    def test_a_mount_is_refused_if_nothing_reaches_the_guest(self) -> None:
        self.reached = False
        self.agent = self.make_agent()
        self.do(self.secret(b"one"))
        said = self.refused(InvalidArgument, self.creation(("/etc/secret", "v1")))
        self.assertIn("/etc/secret", said)
        self.assertIn("infranetes.io/guest: ssh", said)
        self.create(("/var/run/secrets/kubernetes.io/serviceaccount", "v1"))

    def test_a_volume_that_is_a_disk_is_refused(self) -> None:
        self.do(self.agent.mount_disk("pvc-1", "ext4"))
        self.assertIn("disk", self.refused(InvalidArgument, self.creation(("/data", "pvc-1"))))
