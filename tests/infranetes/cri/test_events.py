# SPDX-License-Identifier: Apache-2.0
"""GetContainerEvents: which events are sent, in which order, and what happens to slow listeners."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from infranetes.cri import events
from infranetes.cri.events import EventCalls, Listener
from infranetes_common.concurrency import start
from infranetes_common.errors import ResourceExhausted, Unavailable
from infranetes_common.wire import cri
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import box, pod

CREATED, STARTED = cri.CONTAINER_CREATED_EVENT, cri.CONTAINER_STARTED_EVENT
STOPPED, DELETED = cri.CONTAINER_STOPPED_EVENT, cri.CONTAINER_DELETED_EVENT


class Listening:
    """Takes all events as they come."""

    def __init__(self, calls: EventCalls) -> None:
        self.events: list[Any] = []
        self.error: Any = None
        self.stream: Any = calls.GetContainerEvents(cri.GetEventsRequest(), NO_CALL)
        self.ended: Deferred[None] = start(self._take())
        self.ended.addErrback(self._failed)

    async def _take(self) -> None:
        try:
            async for event in self.stream:
                self.events.append(cri.ContainerEventResponse.FromString(event))
        finally:
            await self.stream.aclose()

    def _failed(self, failure: Any) -> None:
        self.error = failure.value

    def told(self) -> list[tuple[str, int]]:
        return [(one.container_id, one.container_event_type) for one in self.events]


class EventTests(PodsTestCase):
    """Events are made from changes of the records."""

    def setUp(self) -> None:
        super().setUp()
        self.calls = EventCalls(self.world.node.inventory, self.world.now)
        self.listening = self.listen()

    def listen(self) -> Listening:
        listening = Listening(self.calls)
        self.addCleanup(listening.ended.cancel)
        return listening

    def last(self) -> Any:
        return self.listening.events[-1]

    def test_the_life_of_a_pod(self) -> None:
        sandbox = self.run_pod()
        container = self.do(self.world.containers.create(sandbox, box()))
        self.do(self.world.containers.start(container))
        self.do(self.world.containers.stop(container, 0))
        self.do(self.world.containers.remove(container))
        self.do(self.world.sandboxes.stop(sandbox))
        self.do(self.world.sandboxes.remove(sandbox))
        self.assertEqual(
            self.listening.told(),
            [
                (sandbox, CREATED),
                (sandbox, STARTED),
                (container, CREATED),
                (container, STARTED),
                (container, STOPPED),
                (container, DELETED),
                (sandbox, STOPPED),
                (sandbox, DELETED),
            ],
        )

    def test_each_has_the_state_after_it(self) -> None:
        sandbox = self.run_pod()
        self.assertEqual(self.last().pod_sandbox_status.state, cri.SANDBOX_READY)
        self.assertEqual(self.last().pod_sandbox_status.network.ip, "10.0.0.1")
        container = self.do(self.world.containers.create(sandbox, box()))
        (status,) = self.last().containers_statuses
        self.assertEqual((status.id, status.state), (container, cri.CONTAINER_CREATED))
        self.do(self.world.containers.start(container))
        self.assertEqual(self.last().containers_statuses[0].state, cri.CONTAINER_RUNNING)
        other = self.do(self.world.containers.create(sandbox, box("other")))
        self.assertEqual({one.id for one in self.last().containers_statuses}, {container, other})
        self.do(self.world.containers.stop(container, 0))
        states = {one.id: one for one in self.last().containers_statuses}
        self.assertEqual((states[container].state, states[container].exit_code), (cri.CONTAINER_EXITED, 143))
        self.do(self.world.containers.remove(container))
        self.assertEqual([one.id for one in self.last().containers_statuses], [other])
        self.assertTrue(self.last().HasField("pod_sandbox_status"))
        self.do(self.world.sandboxes.remove(sandbox))
        self.assertFalse(self.last().HasField("pod_sandbox_status"))
        self.assertEqual(list(self.last().containers_statuses), [])
        self.assertGreater(self.last().created_at, 0)

    def test_a_pods_status_has_what_its_last_event_has(self) -> None:
        def asked() -> Any:
            request = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
            return self.do(self.world.sandbox_calls.PodSandboxStatus(request, NO_CALL))

        def same() -> None:
            answer = asked()
            self.assertEqual(answer.status, self.last().pod_sandbox_status)
            self.assertEqual(list(answer.containers_statuses), list(self.last().containers_statuses))
            self.assertGreaterEqual(answer.timestamp, self.last().created_at)

        sandbox = self.run_pod()
        container = self.do(self.world.containers.create(sandbox, box()))
        same()
        self.do(self.world.containers.start(container))
        same()
        self.assertEqual([one.state for one in asked().containers_statuses], [cri.CONTAINER_RUNNING])
        self.do(self.world.sandboxes.stop(sandbox))
        same()
        self.do(self.world.containers.remove(container))
        same()

    def test_one_that_ends_by_itself(self) -> None:
        sandbox = self.run_pod()
        container = self.do(self.world.containers.create(sandbox, box()))
        self.do(self.world.containers.start(container))
        self.world.agents[sandbox].become(
            container, cri.CONTAINER_EXITED, started_at=6, finished_at=8, exit_code=3
        )
        self.assertEqual(self.listening.told()[-1], (container, STOPPED))
        self.assertEqual(self.last().containers_statuses[0].exit_code, 3)

    def test_one_that_was_not_seen_running_has_been_started_all_the_same(self) -> None:
        sandbox = self.run_pod()
        container = self.do(self.world.containers.create(sandbox, box()))
        self.world.agents[sandbox].become(
            container, cri.CONTAINER_EXITED, started_at=6, finished_at=8, exit_code=0
        )
        self.assertEqual(
            self.listening.told()[-3:], [(container, CREATED), (container, STARTED), (container, STOPPED)]
        )

    def test_a_vm_that_ends_stops_its_containers_and_its_sandbox_once(self) -> None:
        sandbox = self.run_pod()
        container = self.do(self.world.containers.create(sandbox, box()))
        self.do(self.world.containers.start(container))
        del self.listening.events[:]
        (vm,) = self.world.provider.instances
        self.world.provider.end(vm, "power cut")
        self.assertEqual(sorted(self.listening.told()), sorted([(container, STOPPED), (sandbox, STOPPED)]))
        self.do(self.world.sandboxes.remove(sandbox))
        self.assertEqual(self.listening.told()[2:], [(container, DELETED), (sandbox, DELETED)])

    def test_a_running_one_that_is_removed_is_stopped_first(self) -> None:
        sandbox = self.run_pod()
        container = self.do(self.world.containers.create(sandbox, box()))
        self.do(self.world.containers.start(container))
        self.do(self.world.containers.remove(container))
        self.assertEqual(self.listening.told()[-2:], [(container, STOPPED), (container, DELETED)])

    def test_what_is_never_shown_is_never_told(self) -> None:
        sandbox = self.run_pod()
        del self.listening.events[:]
        self.world.agents[sandbox].create_error = Unavailable("no")
        self.failureResultOf(start(self.world.containers.create(sandbox, box())), Unavailable)
        self.world.provider.launch_error = Unavailable("no")
        self.failureResultOf(self.start(pod("other", uid="u2")), Unavailable)
        self.assertEqual(self.listening.told(), [])

    def test_one_who_does_not_take_them_is_dropped_and_the_others_go_on(self) -> None:
        stuck: Any = self.calls.GetContainerEvents(cri.GetEventsRequest(), NO_CALL)
        self.patch(events, "MAX_EVENTS", 10)
        first = start(anext(stuck))  # and asks for no more
        sandbox = self.run_pod()
        self.assertTrue(self.successResultOf(first))
        self.assertEqual(len(self.calls._listeners), 2)
        for number in range(10):
            self.do(self.world.containers.create(sandbox, box(f"c{number}")))
        self.assertEqual(len(self.calls._listeners), 1)
        self.assertEqual(len(self.listening.events), 12)
        error = self.failureResultOf(start(anext(stuck)), ResourceExhausted).value
        self.assertIn("list pods and containers, then listen again", str(error))
        self.do(self.world.sandboxes.stop(sandbox))
        self.assertEqual(self.listening.told()[-1], (sandbox, STOPPED))

    def test_one_who_vanishes_leaves_nothing(self) -> None:
        self.listening.ended.cancel()
        self.assertEqual(self.calls._listeners, set())
        self.run_pod()

    def test_no_more_than_so_many_listen(self) -> None:
        self.patch(events, "MAX_LISTENERS", 3)
        more = [self.listen() for _ in range(2)]
        refused = self.listen()
        self.assertIsInstance(refused.error, ResourceExhausted)
        more[0].ended.cancel()
        again = self.listen()
        self.run_pod()
        self.assertEqual(len(again.events), 2)

    def test_when_the_daemon_stops_all_are_told_so(self) -> None:
        self.run_pod()
        self.calls.stop()
        self.assertIsInstance(self.listening.error, Unavailable)
        self.assertEqual(self.calls._listeners, set())


class ListenerTests(PodsTestCase):
    """What is queued for a slow listener."""

    def test_it_is_bounded_in_bytes_too(self) -> None:
        listener = Listener()
        self.assertTrue(listener.put(b"x" * (events.MAX_BYTES - 10)))
        self.assertFalse(listener.put(b"x" * 11))
        self.assertEqual(len(listener._events), 0)
        self.failureResultOf(start(listener.take()), ResourceExhausted)

    def test_what_was_taken_makes_room(self) -> None:
        listener = Listener()
        for _ in range(3 * events.MAX_EVENTS):
            self.assertTrue(listener.put(b"event"))
            self.assertEqual(self.successResultOf(start(listener.take())), b"event")

    def test_what_waits_is_taken_before_the_end_is_told(self) -> None:
        listener = Listener()
        listener.put(b"last")
        listener.end(Unavailable("stopping"))
        self.assertEqual(self.successResultOf(start(listener.take())), b"last")
        self.failureResultOf(start(listener.take()), Unavailable)
