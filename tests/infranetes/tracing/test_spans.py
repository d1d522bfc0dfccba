# SPDX-License-Identifier: Apache-2.0
"""Which span is current: across coroutines, Deferreds, timers, and the ends of spans."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.tracing.agent_calls import observe
from infranetes.tracing.spans import (
    Attributes,
    Kind,
    NullTracer,
    PassedOn,
    Span,
    current,
    note,
    on_its_own,
    step,
    within_span,
)
from infranetes_common.concurrency import Flight, sleep, start
from infranetes_common.errors import NotFound
from infranetes_common.trace_context import TraceContext
from infranetes_common.wire import vmserver
from txgrpc import Code, GrpcError
from txgrpc.service import Method

CALLER = TraceContext("1" * 32, "2" * 16, sampled=True)


@attrs.define(eq=False)
class Recorded:
    """A span that keeps its data."""

    name: str
    kind: Kind = Kind.SERVER
    attributes: dict[str, object] = attrs.field(factory=dict)
    children: list[Recorded] = attrs.field(factory=list)
    ended: Code | None = None
    context: TraceContext = CALLER

    def child(self, name: str, kind: Kind = Kind.INTERNAL, attributes: Attributes | None = None) -> Span:
        made = Recorded(name, kind, dict(attributes or {}))
        self.children.append(made)
        return made

    def add(self, attributes: Attributes) -> None:
        self.attributes.update(attributes)

    def end(self, code: Code) -> None:
        assert self.ended is None
        self.ended = code

    def tree(self) -> object:
        """Return its name, and the trees of its children."""
        return (self.name, *(each.tree() for each in self.children)) if self.children else self.name


def names(spans: Iterable[Recorded]) -> list[str]:
    return [each.name for each in spans]


class CurrentTests(SynchronousTestCase):
    """Which span work belongs to."""

    def setUp(self) -> None:
        self.call = Recorded("call")
        self.assertIsNone(current())

    def tearDown(self) -> None:
        self.assertIsNone(current())

    def test_without_a_span_steps_are_not_made(self) -> None:
        with step("of nothing"):
            self.assertIsNone(current())
            note({"about": "nothing"})

    def test_steps_are_within_each_other(self) -> None:
        with within_span(self.call):
            with step("one"), step("inner"):
                note({"size": 3})
            with step("two"):
                pass
        self.assertEqual(self.call.tree(), ("call", ("one", "inner"), "two"))
        self.assertEqual(self.call.children[0].children[0].attributes, {"size": 3})
        self.assertIs(self.call.ended, Code.OK)

    def test_an_error_ends_what_it_goes_through(self) -> None:
        def fail() -> None:
            with within_span(self.call), step("one"):
                raise NotFound("no such thing")

        self.assertRaises(NotFound, fail)
        self.assertEqual((self.call.ended, self.call.children[0].ended), (Code.NOT_FOUND, Code.NOT_FOUND))

    def test_calls_that_wait_side_by_side_do_not_mix(self) -> None:
        """Whoever fires the Deferreds for which they wait."""
        gates: list[Deferred[None]] = [Deferred(), Deferred()]
        calls = [Recorded("a"), Recorded("b")]

        async def answer(call: Recorded, gate: Deferred[None]) -> None:
            with within_span(call):
                await gate
                with step(f"of {call.name}"):
                    await sleep(clock, 1.0)
                with step(f"after {call.name}"):
                    pass

        clock = Clock()
        running = [start(answer(*each)) for each in zip(calls, gates, strict=True)]
        for gate in reversed(gates):
            gate.callback(None)
        clock.advance(1.0)
        for each in running:
            self.successResultOf(each)
        self.assertEqual(
            [each.tree() for each in calls], [("a", "of a", "after a"), ("b", "of b", "after b")]
        )

    def test_what_is_started_within_a_span_belongs_to_it(self) -> None:
        """Even if one coroutine makes another fire the Deferred for which a third one waits."""
        gate: Deferred[None] = Deferred()

        async def work() -> None:
            await gate
            with step("work"):
                pass

        async def answer() -> None:
            with within_span(self.call), step("launch"):
                await Flight(work()).join()

        async def another() -> None:
            with within_span(other):
                gate.callback(None)

        other = Recorded("other")
        answered = start(answer())
        self.successResultOf(start(another()))
        self.successResultOf(answered)
        self.assertEqual((self.call.tree(), other.tree()), (("call", ("launch", "work")), "other"))

    def test_work_that_outlives_its_step_belongs_to_the_next_span_around(self) -> None:
        """And once all of these have ended, to none."""
        clock = Clock()

        async def loop() -> None:
            for number in range(4):
                with step(f"turn {number}"):
                    await sleep(clock, 1.0)

        async def answer() -> None:
            with within_span(self.call):
                with step("launch"):
                    looping.append(start(loop()))
                    await sleep(clock, 0.5)
                await sleep(clock, 1.0)

        looping: list[Deferred[None]] = []
        answered = start(answer())
        clock.pump([0.5] * 10)
        self.successResultOf(answered)
        self.successResultOf(looping[0])
        self.assertEqual(self.call.tree(), ("call", ("launch", "turn 0"), "turn 1"))

    def test_what_a_call_only_gives_the_occasion_for_does_not_belong_to_it(self) -> None:
        with within_span(self.call):
            with on_its_own(), step("of nothing"):
                self.assertIsNone(current())
            self.assertIs(current(), self.call)
        self.assertEqual(self.call.tree(), "call")

    def test_a_caller_that_goes_away(self) -> None:
        async def answer() -> None:
            with within_span(self.call), step("wait"):
                await Deferred()

        answered = start(answer())
        answered.cancel()
        self.failureResultOf(answered, CancelledError)
        self.assertEqual((self.call.ended, self.call.children[0].ended), (Code.CANCELLED, Code.CANCELLED))


class AgentCallTests(SynchronousTestCase):
    """The trace context that agents are sent."""

    def setUp(self) -> None:
        methods = vmserver.Agent.methods_by_name
        self.create = Method.from_descriptor(methods["CreateContainer"])
        self.watch = Method.from_descriptor(methods["Watch"])
        self.put = Method.from_descriptor(methods["PutLayer"])

    def test_without_a_span_they_are_told_nothing(self) -> None:
        self.assertIsNone(observe(self.create))

    def test_a_call_is_a_span_and_is_told_it(self) -> None:
        call = Recorded("call")
        with within_span(call):
            observed = [observe(self.create), observe(self.put)]
        self.assertEqual([tuple(each.metadata) for each in observed], [CALLER.to_metadata()] * 2)
        observed[0].ended(None, ())
        observed[1].ended(GrpcError(Code.UNAVAILABLE, "gone"), ())
        self.assertEqual([each.ended for each in call.children], [Code.OK, Code.UNAVAILABLE])
        self.assertEqual(
            names(call.children),
            ["infranetes.vmserver.v1.Agent/CreateContainer", "infranetes.vmserver.v1.Agent/PutLayer"],
        )

    def test_a_stream_is_told_but_is_no_span(self) -> None:
        call = Recorded("call")
        with within_span(call):
            observed = observe(self.watch)
        self.assertEqual(tuple(observed.metadata), CALLER.to_metadata())
        observed.ended(None, ())
        self.assertEqual(call.children, [])

    def test_where_nothing_is_recorded_the_callers_own_span_is_passed_on(self) -> None:
        tracer = NullTracer()
        self.assertIsNone(tracer.call("a", None, {}))
        span = tracer.call("a", CALLER, {})
        self.assertEqual(span, PassedOn(CALLER))
        assert span is not None
        with within_span(span), step("launch"):
            self.assertEqual(tuple(observe(self.create).metadata), CALLER.to_metadata())
