# SPDX-License-Identifier: Apache-2.0
"""What a client sees of a container's life, in whatever order answers, events, log ends and losses come."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial import unittest

from infranetes.cri.events import EventCalls
from infranetes.pods.containers.stop import STOP_DRAIN_SECONDS
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, Unavailable
from infranetes_common.wire import cri, vmserver
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.pods.fake_agent import FakeAgent, FakeStream
from tests.infranetes.pods.fake_images import IMAGE
from tests.infranetes.pods.fake_store import InlineStore
from tests.infranetes.pods.fakes import FakeLogs, FakeNode, box, pod

CREATED, RUNNING = cri.CONTAINER_CREATED, cri.CONTAINER_RUNNING
EXITED, UNKNOWN = cri.CONTAINER_EXITED, cri.CONTAINER_UNKNOWN
CONTAINERS = 2
MOST_STEPS = 30


class SlowStore(InlineStore):
    """Writes take effect, and are answered, when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.holding = False
        self.waiting: list[tuple[Any, Deferred[None]]] = []

    def _write(self, write: Any) -> Deferred[None]:
        if not self.holding:
            return super()._write(write)
        done: Deferred[None] = Deferred()
        self.waiting.append((write, done))
        return done

    def commit(self) -> None:
        write, done = self.waiting.pop(0)
        super()._write(write).chainDeferred(done)


@attrs.define
class Asked:
    """A start that was requested of the agent. `result`: its answer, once the agent has done it."""

    id: str
    answer: Deferred[Any]
    result: Any = None


class SlowAgent(FakeAgent):
    """Do what it is asked, answer, and send events, each when the test says so.

    Like a Watch stream, it sends only the latest state of each container.

    :ivar runs: how often each container was run.
    """

    def __init__(self, sandbox_id: str) -> None:
        super().__init__(sandbox_id)
        self.asked: list[Asked] = []
        self.unsent: dict[str, Any] = {}
        self.runs: Counter[str] = Counter()

    async def start(self, id: str) -> Any:
        self._reach()
        asked = Asked(id, Deferred())
        self.asked.append(asked)
        return await asked.answer

    def perform(self, asked: Asked, how: str) -> None:
        """Carry out, in the VM, the start that was requested."""
        state = self.containers[asked.id]
        if state.state == RUNNING:
            asked.result = self.copy(asked.id)
        elif state.state == EXITED:
            asked.result = FailedPrecondition("it has ended")
        elif how == "can't run":
            self.become(asked.id, EXITED, started_at=5, finished_at=5, exit_code=127,
                        reason="ContainerCannotRun")  # fmt: skip
            asked.result = InvalidArgument("no such file")
        else:
            self.runs[asked.id] += 1
            self.become(asked.id, RUNNING, started_at=6)
            asked.result = self.copy(asked.id)
            if how == "refused":
                self.become(asked.id, EXITED, finished_at=7, exit_code=137, reason="Error")
                asked.result = InvalidArgument("its limits can't be had")
            elif how == "ends":
                self.become(asked.id, EXITED, finished_at=7, reason="Completed")
                asked.result = self.copy(asked.id)

    def copy(self, id: str) -> vmserver.ContainerState:
        copy = vmserver.ContainerState()
        copy.CopyFrom(self.containers[id])
        return copy

    def become(self, id: str, state: cri.ContainerState, **fields: object) -> vmserver.ContainerState:
        known = self.containers.setdefault(id, vmserver.ContainerState(id=id, created_at=5))
        known.state = state
        for name, value in fields.items():
            setattr(known, name, value)
        self.unsent[id] = self.copy(id)
        return self.copy(id)

    async def stop(self, id: str, grace_seconds: int, within: float = 30.0) -> Any:
        self._reach()
        if self.containers[id].state == RUNNING:
            self.become(id, EXITED, finished_at=8, exit_code=143, reason="Error")
        return self.copy(id)

    def watch(self) -> FakeStream:
        self.unsent.clear()
        return super().watch()

    def send(self) -> None:
        id = next(iter(self.unsent))
        event = vmserver.WatchEvent(container=self.unsent.pop(id))
        for stream in self.streams:
            stream.feed(event)


class SlowLogs(FakeLogs):
    """The log of each container is complete when the test says so, in this daemon and the next ones."""

    def __init__(self, complete: set[str]) -> None:
        super().__init__()
        self.complete = complete
        self.draining: list[tuple[str, Deferred[None]]] = []

    def drain(self, container: Any) -> Deferred[None]:
        done: Deferred[None] = Deferred()
        if container.id in self.complete:
            done.callback(None)
        else:
            self.draining.append((container.id, done))
        return done

    def end(self, id: str) -> None:
        self.complete.add(id)
        for one, done in self.draining:
            if one == id and not done.called:
                done.callback(None)


@attrs.define
class Client:
    """What a client was answered about one container, and what it has seen of it.

    :ivar hidden: it was UNKNOWN for a while, as its agent could not be reached.
    :ivar refused: the agent refused to start it. :ivar lost: the answer to its start was lost.
    """

    started: bool = False
    hidden: bool = False
    refused: bool = False
    lost: bool = False
    seen: list[int] = attrs.field(factory=list)
    events: list[int] = attrs.field(factory=list)
    told: set[int] = attrs.field(factory=set)  # by the current daemon


class SlowFakeNode(FakeNode):
    """A node with a slow store, agent and logs, and an observer of each daemon from its start."""

    logs: SlowLogs

    def __init__(self, look: Callable[[SlowFakeNode], None]) -> None:
        self.complete: set[str] = set()
        self.look = look
        super().__init__()

    def begin(self) -> None:
        self.store: SlowStore = getattr(self, "slow_store", None) or SlowStore()
        self.slow_store = self.store
        super().begin()

    def make_logs(self) -> SlowLogs:
        return SlowLogs(self.complete)

    def made(self) -> None:
        self.look(self)


class Story:
    """One random story: `steps` lists what can happen next; `take` makes it happen, then checks."""

    def __init__(self, test: unittest.SynchronousTestCase) -> None:
        self.test = test
        self.clients: dict[str, Client] = {}
        self.ended_at: dict[str, float] = {}
        self.calls: list[Deferred[Any]] = []
        self.dead: list[
            Any
        ] = []  # what dead daemons were doing; if it were collected, it would go on in its `finally`
        self.faults: list[str] = []
        self.world = SlowFakeNode(self._listen_to)
        self.complete, self.store = self.world.complete, self.world.store
        self.world.provider_ready()
        self.sandbox = self.test.successResultOf(start(self.world.sandboxes.run(pod(), "")))
        self.agent = SlowAgent(self.sandbox)
        self.agent.loaded = {IMAGE}
        self.world.agents[self.sandbox] = self.agent
        self.world.restart()
        for number in range(CONTAINERS):
            made = start(self.world.containers.create(self.sandbox, box(f"c{number}")))
            self.clients[self.test.successResultOf(made)] = Client()
        self.agent.unsent.clear()
        self.store.holding = True
        self.ids = list(self.clients)

    def _listen_to(self, world: SlowFakeNode) -> None:
        """Observe the daemon as a client that lists and listens to events."""
        self.list_calls = world.container_calls
        events: Any = EventCalls(world.node.inventory, world.now).GetContainerEvents(
            cri.GetEventsRequest(), NO_CALL
        )
        self.listening = start(self._listen(events))

    async def _listen(self, events: AsyncIterator[bytes]) -> None:
        async for event in events:
            told = cri.ContainerEventResponse.FromString(event)
            for status in told.containers_statuses:
                self._saw(status.id, status.state, status)
            if told.container_id not in self.clients:
                continue
            client, what = self.clients[told.container_id], told.container_event_type
            if what in client.told:
                self.faults.append(f"event {what} twice")
            client.told.add(what)
            client.events.append(what)

    # ---- the steps

    def steps(self) -> list[tuple[str, Any]]:
        """List what can happen next."""
        found: list[tuple[str, Any]] = [("pass_time", 0.3), ("pass_time", 3.0)]
        if self.store.waiting:
            found += [("commit", None)] * 3
        for number, id in enumerate(self.ids):
            found += [("start", number), ("stop", number)]
            if self.agent.containers[id].state == RUNNING:
                found.append(("end", number))
            if self.agent.containers[id].state == EXITED and id not in self.complete:
                found.append(("end_log", number))
        for number, asked in enumerate(self.agent.asked):
            if asked.result is None:
                found += [("perform", (number, how)) for how in ("runs", "ends", "can't run", "refused")]
            else:
                found.append(("answer", number))
            found.append(("lose_answer", number))
        if self.agent.unsent:
            found.append(("send", None))
        found.append(("come_back", None) if self.agent.away else ("go_away", None))
        found.append(("kill_daemon", None))
        return found

    def take(self, step: tuple[str, Any]) -> None:
        getattr(self, f"_{step[0]}")(step[1])
        self._look()

    def _pass_time(self, seconds: float) -> None:
        self.world.wait(seconds)

    def _commit(self, _: None) -> None:
        self.store.commit()

    def _start(self, number: int) -> None:
        id = self.ids[number]
        client = self.clients[id]
        call = start(self.world.containers.start(id))
        self.calls.append(call)
        node = self.world.node

        def answered(result: Any) -> None:
            if node is not self.world.node:
                return  # there is no one to answer any more
            if not isinstance(getattr(result, "value", None), Exception):
                client.started = True
            elif result.check(InvalidArgument):
                client.refused = True
            elif result.check(Unavailable):
                client.lost = True
            else:
                result.trap(FailedPrecondition)

        call.addBoth(answered)

    def _stop(self, number: int) -> None:
        call = start(self.world.containers.stop(self.ids[number], 1))
        self.calls.append(call.addErrback(lambda failure: failure.trap(InfranetesError) and None))

    def _perform(self, what: tuple[int, str]) -> None:
        asked = self.agent.asked[what[0]]
        self.agent.perform(asked, what[1])
        self._note_ends()

    def _note_ends(self) -> None:
        for id in self.ids:
            if self.agent.containers[id].state == EXITED:
                self.ended_at.setdefault(id, self.world.clock.seconds())

    def _answer(self, number: int) -> None:
        asked = self.agent.asked.pop(number)
        if isinstance(asked.result, Exception):
            asked.answer.errback(asked.result)
        else:
            asked.answer.callback(asked.result)

    def _lose_answer(self, number: int) -> None:
        asked = self.agent.asked.pop(number)
        asked.answer.errback(Unavailable("the connection is lost"))

    def _end(self, number: int) -> None:
        self.agent.become(self.ids[number], EXITED, finished_at=9, reason="Completed")
        self._note_ends()

    def _end_log(self, number: int) -> None:
        self.world.logs.end(self.ids[number])

    def _send(self, _: None) -> None:
        self.agent.send()

    def _go_away(self, _: None) -> None:
        self.agent.go_away()
        for asked in self.agent.asked:
            asked.answer.errback(Unavailable("the connection is lost"))
        self.agent.asked.clear()

    def _come_back(self, _: None) -> None:
        self.agent.away = False

    def _kill_daemon(self, _: None) -> None:
        for asked in self.agent.asked:
            if asked.result is None:  # it was sent already, and arrives all the same
                self.agent.perform(asked, "runs")
        self._forget_calls()
        for client in self.clients.values():
            client.told.clear()
        self.world.restart()

    def _forget_calls(self) -> None:
        """Forget the calls to a killed daemon: they are never answered."""
        for call in (*self.calls, self.listening):
            call.addErrback(lambda _: None)
        self.dead += [self.calls, self.listening, self.store.waiting, self.agent.asked, self.world.node]
        self.dead.append(list(self.agent.streams))
        self.calls, self.store.waiting, self.agent.asked = [], [], []

    def end(self) -> None:
        """Kill the last daemon."""
        self._forget_calls()
        self.world.kill()

    # ---- what is seen

    def _look(self) -> None:
        """Look at the containers in every way that the CRI has."""
        self._note_ends()
        looks = start(self._listed()), start(self._streamed()), *[start(self._status(id)) for id in self.ids]
        while not all(look.called for look in looks):
            self.world.clock.advance(0.05)
        for look in looks:
            self.test.successResultOf(look)
        if self.listening.called:
            self.test.successResultOf(self.listening)
        self.check()

    def check(self) -> None:
        self.test.assertEqual(self.faults, [])

    async def _listed(self) -> None:
        answer = await self.list_calls.ListContainers(cri.ListContainersRequest(), NO_CALL)
        for one in cri.ListContainersResponse.FromString(answer).containers:
            self._saw(one.id, one.state)

    async def _streamed(self) -> None:
        async for piece in self.list_calls.StreamContainers(cri.StreamContainersRequest(), NO_CALL):
            for one in cri.StreamContainersResponse.FromString(piece).containers:
                self._saw(one.id, one.state)

    async def _status(self, id: str) -> None:
        request = cri.ContainerStatusRequest(container_id=id)
        status = (await self.list_calls.ContainerStatus(request, NO_CALL)).status
        self._saw(id, status.state, status)

    def _saw(self, id: str, state: int, status: Any = None) -> None:
        client = self.clients.get(id)
        if client is None:
            return
        before = client.seen[-1] if client.seen else CREATED
        words = f"{cri.ContainerState.Name(state)} after {cri.ContainerState.Name(before)}"
        if state == UNKNOWN:
            expected = client.lost or client.refused
            client.hidden = client.hidden or not expected or not self._is_watched(id)
            return
        if state < before or (client.started and state == CREATED):
            self.faults.append(words)
        if (client.lost or client.refused) and state == CREATED and self.agent.runs[id]:
            self.faults.append(f"{words}, and it was run")
        if state == RUNNING and not self.agent.runs[id]:
            self.faults.append(f"{words}, and it never ran")
        if state == RUNNING and client.refused and RUNNING not in client.seen:
            self.faults.append(f"{words}, and its start was refused")
        if state == EXITED and RUNNING not in client.seen and client.started and not client.hidden:
            self.faults.append(f"{words}, and nothing in between")
        if state == EXITED and self.agent.runs[id] and id not in self.complete:
            waited = self.world.clock.seconds() - self.ended_at[id]
            if waited < STOP_DRAIN_SECONDS:
                self.faults.append(f"{words}, and its log was not complete")
        if status is not None and self.agent.runs[id] and state in (RUNNING, EXITED):
            until = status.finished_at if state == EXITED else status.started_at
            if not 0 < status.started_at <= until:
                self.faults.append(f"{words}, from {status.started_at} to {status.finished_at}")
        if state != before or not client.seen:
            client.seen.append(state)

    def _is_watched(self, id: str) -> bool:
        """Whether the daemon hears the container's agent."""
        watch = self.world.node.inventory.container(id).sandbox.watch
        return watch is not None and watch.live

    def finish(self) -> None:
        """Let everything that waits happen; then check that all was seen, and in order."""
        self._come_back(None)
        while self.store.waiting or self.agent.asked or self.agent.unsent:
            if self.store.waiting:
                self._commit(None)
            elif self.agent.unsent:
                self._send(None)
            elif self.agent.asked[0].result is None:
                self._perform((0, "runs"))
            else:
                self._answer(0)
            self._look()
        for number, id in enumerate(self.ids):
            if self.agent.containers[id].state == RUNNING:
                self._end(number)
            self._end_log(number)
        for _ in range(25):
            while self.store.waiting:
                self.store.commit()
            while self.agent.unsent:
                self.agent.send()
            self.world.wait(2.0)
            self._look()
        for id, client in self.clients.items():
            ran = self.agent.runs[id]
            if ran > 1:
                self.faults.append(f"it ran {ran} times")
            if self.agent.containers[id].state == EXITED and client.seen[-1] != EXITED:
                self.faults.append(
                    f"it has ended, and was last seen {cri.ContainerState.Name(client.seen[-1])}"
                )
            if ran and not client.refused and not client.hidden and RUNNING not in client.seen:
                self.faults.append(f"it ran and was seen {client.seen} alone")
            if client.events != sorted(client.events):
                self.faults.append(f"its events are {client.events}")
        self.check()


class StatesTests(unittest.SynchronousTestCase):
    """CREATED, RUNNING, EXITED in this order and without gaps, however and whenever a client looks."""

    def test_one_is_stopped_before_its_agent_is_heard_again(self) -> None:
        """It is UNKNOWN: first because the answer to its start was lost, then because its agent is away."""
        story = Story(self)
        try:
            for step in (
                ("start", 0),
                ("commit", None),
                ("perform", (0, "runs")),
                ("go_away", None),
                ("pass_time", 3.0),
                ("start", 1),
                ("pass_time", 3.0),
                ("come_back", None),
                ("stop", 0),
            ):
                story.take(step)
            story.finish()
            self.assertEqual(story.clients[story.ids[0]].events, [1, 2])
        finally:
            story.end()

    @given(st.data())
    def test_they_come_in_order_whatever_happens(self, data: st.DataObject) -> None:
        story = Story(self)
        try:
            for _ in range(data.draw(st.integers(1, MOST_STEPS), "steps")):
                story.take(data.draw(st.sampled_from(story.steps()), "step"))
            story.finish()
        finally:
            story.end()
