"""Server and client in memory, time in the tests' hands: deadlines, keepalive, drain, flow control, loss."""

from __future__ import annotations

import gc
from typing import Any

from h2.errors import ErrorCodes
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionLost
from twisted.trial import unittest

from tests.txgrpc.demo import Note
from tests.txgrpc.memory import HIGH_WATER, SMALL, World
from tests.txgrpc.support import drain_iterator
from txgrpc import Code, GrpcError, Limits
from txgrpc.channel import Backoff
from txgrpc.http2 import goaway

NO_JITTER = Backoff(first=1, factor=2, most=8, jitter=0)


def start(coroutine: Any) -> Deferred[Any]:
    """Run a coroutine on its own."""
    return Deferred.fromCoroutine(coroutine)


class MemoryTests(unittest.SynchronousTestCase):
    """What the tests below share."""

    def world(self, **arguments: Any) -> World:
        """Both ends, cut off after the test."""
        world = World(**arguments)
        self.addCleanup(world.end)
        return world

    def settled(self, world: World, deferred: Deferred[Any]) -> Deferred[Any]:
        """`deferred` after all has moved that can."""
        world.settle()
        return deferred

    def code_of(self, deferred: Deferred[Any]) -> Code:
        """The status with which a call has failed by now."""
        failure = self.failureResultOf(deferred, GrpcError)
        error: GrpcError = failure.value
        return error.code


class DeadlineTests(MemoryTests):
    """grpc-timeout."""

    def test_client_gives_up(self) -> None:
        """The caller's time is over on the dot, though the server says nothing."""
        world = self.world()
        call = world.stub.Wait(Note(), timeout=5)
        world.settle()
        world.wire.stalled.add(world.wire.server)
        world.wait(4.9)
        self.assertNoResult(call)
        world.wait(0.1)
        self.assertEqual(self.code_of(call), Code.DEADLINE_EXCEEDED)

    def test_server_gives_up(self) -> None:
        """The server cancels the method when the deadline has passed, though the client is silent."""
        world = self.world()
        call = world.stub.Wait(Note(), timeout=5)
        world.settle()
        self.assertAlmostEqual(world.demo.calls[0].time_remaining(), 5, places=2)
        world.wire.stalled.add(world.wire.client)
        world.wait(4.9)
        self.assertEqual(world.demo.ended, [])
        world.wait(0.2)
        self.assertEqual(world.demo.ended, ["Wait cancelled"])
        self.assertEqual(world.demo.calls[0].time_remaining(), 0)
        self.assertEqual(self.code_of(call), Code.DEADLINE_EXCEEDED)

    def test_time_runs_while_connecting(self) -> None:
        """A call that waits for its connection ends in time too."""
        world = self.world()
        world.endpoint.hang = True
        call = world.stub.Echo(Note(), timeout=5)
        world.wait(5)
        self.assertEqual(self.code_of(call), Code.DEADLINE_EXCEEDED)

    def test_no_time_at_all(self) -> None:
        """A timeout that is over already."""
        world = self.world()
        call = world.stub.Echo(Note(), timeout=-1)
        world.settle()
        self.assertEqual(self.code_of(call), Code.DEADLINE_EXCEEDED)

    def test_ended_calls_leave_no_timer(self) -> None:
        """Nothing is scheduled for a call that has ended."""
        world = self.world(server={"keepalive": None})
        call = world.stub.Echo(Note(), timeout=5)
        world.settle()
        self.successResultOf(call)
        self.assertEqual(world.clock.getDelayedCalls(), [])


class CancellationTests(MemoryTests):
    """Cancelling from either side."""

    def test_deferred(self) -> None:
        """Cancelling the Deferred of a call cancels the method."""
        world = self.world()
        call = world.stub.Wait(Note())
        world.settle()
        call.cancel()
        self.assertEqual(self.code_of(call), Code.CANCELLED)
        world.settle()
        self.assertEqual(world.demo.ended, ["Wait cancelled"])
        self.assertEqual(world.server.connections.pop().running, 0)

    def test_before_it_began(self) -> None:
        """A call that is cancelled while it waits never reaches the server."""
        world = self.world()
        call = world.stub.Echo(Note())
        call.cancel()
        self.assertEqual(self.code_of(call), Code.CANCELLED)
        world.settle()
        self.assertEqual(world.demo.calls, [])

    def test_stream(self) -> None:
        """Cancelling a StreamCall closes the generator; who reads it sees CANCELLED."""
        world = self.world()
        call = world.stub.Chat()
        heard = start(drain_iterator(call))
        start(call.send(Note(text="x")))
        world.settle()
        call.cancel()
        world.settle()
        self.assertEqual(self.code_of(heard), Code.CANCELLED)
        self.assertEqual(world.demo.ended, ["Chat cancelled"])
        self.assertEqual(self.code_of(start(call.send(Note()))), Code.CANCELLED)

    def test_upload(self) -> None:
        """Cancelling an upload closes its iterable."""
        world = self.world(server={"limits": SMALL})
        ended = []

        async def requests() -> Any:
            try:
                while True:
                    yield Note(blob=b"x" * 10_000)
                    await Deferred()
            finally:
                ended.append(True)

        call = world.stub.Sum(requests())
        world.settle()
        call.cancel()
        world.settle()
        self.assertEqual((self.code_of(call), ended), (Code.CANCELLED, [True]))
        self.assertEqual(world.demo.ended, ["Sum cancelled"])

    def test_reading_may_be_given_up(self) -> None:
        """Cancelling the wait for a message leaves the call as it is."""
        world = self.world()
        call = world.stub.Chat()
        world.settle()
        heard = start(call.__anext__())
        heard.cancel()
        self.failureResultOf(heard, CancelledError)
        start(call.send(Note(text="still on")))
        world.settle()
        self.assertEqual(self.successResultOf(start(call.__anext__())).text, "STILL ON")

    def test_methods_that_do_not_end(self) -> None:
        """Methods of cancelled calls that go on count for the limit of calls at once."""
        world = self.world(server={"limits": Limits(max_concurrent_streams=3)})
        let_go: Deferred[None] = Deferred()

        async def stubborn(request: Any, call: Any) -> Any:
            try:
                await Deferred()
            finally:
                await let_go

        method, _ = world.server._methods[b"/txgrpc.demo.Demo/Wait"]
        world.server._methods[b"/txgrpc.demo.Demo/Wait"] = method, stubborn
        for _ in range(3):
            call = world.stub.Wait(Note())
            world.settle()
            call.cancel()
            self.assertEqual(self.code_of(call), Code.CANCELLED)
            world.settle()
        refused = world.stub.Echo(Note())
        world.settle()
        self.assertEqual(self.code_of(refused), Code.UNAVAILABLE)
        let_go.callback(None)
        world.settle()
        again = world.stub.Echo(Note(text="again"))
        world.settle()
        self.assertEqual(self.successResultOf(again).text, "again")

    def test_cleaning_up_may_take_time(self) -> None:
        """A cancelled generator's cleanup may wait; what it still says is dropped."""
        world = self.world()
        cleaned: list[str] = []

        async def count(request: Any, call: Any) -> Any:
            try:
                yield Note()
                await Deferred()
            finally:
                await world.demo.Wait(Note(number=1000), call)
                cleaned.append("cleaned")

        method, _ = world.server._methods[b"/txgrpc.demo.Demo/Count"]
        world.server._methods[b"/txgrpc.demo.Demo/Count"] = method, count
        call = world.stub.Count(Note())
        world.settle()
        call.cancel()
        world.settle()
        self.assertEqual(cleaned, [])
        world.wait(2)
        self.assertEqual(cleaned, ["cleaned"])


class FlowControlTests(MemoryTests):
    """Who is fast waits for who is slow."""

    def test_server_waits_for_a_slow_reader(self) -> None:
        """A generator gets no further ahead than the window, and goes on as the messages are taken."""
        world = self.world(channel={"limits": SMALL})
        call = world.stub.Count(Note(number=1000, blob=b"x" * 10_000))
        world.settle()
        ahead = world.demo.sent
        self.assertTrue(6 <= ahead <= 8, ahead)
        for _ in range(20):
            self.successResultOf(start(call.__anext__()))
            world.settle()
        self.assertTrue(ahead + 10 <= world.demo.sent <= ahead + 21, world.demo.sent)
        call.cancel()

    def test_client_waits_for_a_slow_server(self) -> None:
        """An upload's iterable is asked no further than the window while the method does not read."""
        world = self.world(server={"limits": SMALL})
        asked = 0
        gate: Deferred[None] = Deferred()

        async def slow_sum(requests: Any, call: Any) -> Any:
            await gate
            return Note(number=len([request async for request in requests]))

        method, _ = world.server._methods[b"/txgrpc.demo.Demo/Sum"]
        world.server._methods[b"/txgrpc.demo.Demo/Sum"] = method, slow_sum

        def requests() -> Any:
            nonlocal asked
            for _ in range(1000):
                asked += 1
                yield Note(blob=b"x" * 10_000)

        call = world.stub.Sum(requests())
        world.settle()
        self.assertTrue(6 <= asked <= 8, asked)
        gate.callback(None)
        world.settle()
        self.assertEqual(self.successResultOf(call).number, 1000)

    def test_transport_pushes_back(self) -> None:
        """A transport that takes nothing stops the writers, however large the windows are."""
        wide = Limits(stream_window=2**24, connection_window=2**24)
        world = self.world(channel={"limits": wide})
        world.settle()
        call = world.stub.Count(Note(number=10_000, blob=b"x" * 1000))
        world.clock.advance(0)
        world.wire.step()
        world.settle()
        heard = start(drain_iterator(call))
        world.settle()
        self.assertEqual(len(self.successResultOf(heard)), 10_000)
        self.assertLess(world.wire.server.most, HIGH_WATER + 40_000)

    def test_unread_calls_do_not_stop_others(self) -> None:
        """Streams that nobody reads hold up only themselves."""
        world = self.world(channel={"limits": SMALL})
        idle = [world.stub.Count(Note(number=1000, blob=b"x" * 10_000)) for _ in range(10)]
        world.settle()
        echo = world.stub.Echo(Note(blob=b"y" * 300_000))
        world.settle()
        self.assertEqual(len(self.successResultOf(echo).blob), 300_000)
        for call in idle:
            call.cancel()

    def test_writers_take_turns(self) -> None:
        """A small answer does not wait behind a large one."""
        world = self.world()
        world.stub.Echo(Note(blob=b"y" * 10_000_000)).addErrback(lambda _: None)
        small = world.stub.Echo(Note(text="small"))
        for _ in range(20):
            world.clock.advance(0)
            for wire in world.wires:
                wire.step()
        self.assertEqual(self.successResultOf(small).text, "small")

    def test_peer_that_reads_nothing(self) -> None:
        """Who asks on and on without reading the answers is cut off."""
        limits = Limits(max_unread_output=4096)
        world = self.world(server={"limits": limits})
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        world.wire.stalled.add(world.wire.server)
        world.stub.Echo(Note(blob=b"x" * 100_000)).addErrback(lambda _: None)
        for _ in range(1000):
            for _ in range(10):
                # Answers to unknown methods are headers, which no window holds back.
                world.stub.Missing(Note(text="x" * 100)).addErrback(lambda _: None)
            world.settle()
            if not world.wire.up:
                break
        self.assertTrue(world.wire.server.aborted)
        self.assertLess(world.wire.server.most, 150_000)


class TurnTests(MemoryTests):
    """No peer has the reactor for itself: what arrived is handled in more turns than one."""

    def hurried(self) -> World:
        """Both ends connected, and from now on time is always up when they look at the clock."""
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        clock = world.clock
        seconds = clock.seconds

        def later() -> float:
            clock.rightNow += 0.011
            return seconds()

        self.patch(clock, "seconds", later)
        return world

    def test_in_order(self) -> None:
        """Every call is answered, the messages of a stream come in order, and reading goes on."""
        world = self.hurried()
        calls = [world.stub.Echo(Note(number=n)) for n in range(50)]
        stream = start(drain_iterator(world.stub.Count(Note(number=50))))
        chat = world.stub.Chat()
        for n in range(50):
            start(chat.send(Note(text=str(n))))
        world.wire.step()
        self.assertFalse(world.wire.server.reading)
        self.assertLess(len(world.demo.calls), 1 + 50)
        world.settle()
        self.assertTrue(world.wire.server.reading and world.wire.client.reading)
        self.assertEqual([self.successResultOf(call).number for call in calls], list(range(50)))
        self.assertEqual(len(self.successResultOf(stream)), 50)
        texts = [self.successResultOf(start(chat.__anext__())).text for _ in range(50)]
        self.assertEqual(texts, [str(n) for n in range(50)])

    def test_much_to_send(self) -> None:
        """A method that never waits does not keep the reactor until all its messages are sent."""
        world = self.world()
        stream = start(drain_iterator(world.stub.Count(Note(number=1000))))
        others = [start(drain_iterator(world.stub.Count(Note(number=10)))) for _ in range(100)]
        world.clock.advance(0)
        while not world.demo.calls:
            world.wire.step()
        self.assertLess(world.demo.sent, 64 + 101)
        world.settle()
        self.assertEqual(len(self.successResultOf(stream)), 1000)
        self.assertEqual([len(self.successResultOf(other)) for other in others], [10] * 100)

    def answered_and_lost(self) -> tuple[World, list[Deferred[Any]]]:
        """A client that has all answers, but not looked at most of them, when its connection is lost."""
        world = self.hurried()
        calls = [world.stub.Echo(Note(number=n)) for n in range(50)]
        while not world.wire.client.protocol._backlog:
            world.wire.step()
            if world.wire.client.reading:
                world.clock.advance(0)
        while world.wire.server.protocol._backlog:
            world.clock.advance(0)
        world.wire.client.protocol.dataReceived(world.wire.server.take())
        world.wire.cut(ConnectionLost())
        self.assertTrue([call for call in calls if not call.called])
        return world, calls

    def test_answers_before_a_loss(self) -> None:
        """What came before the connection was lost counts; the next call connects anew."""
        world, calls = self.answered_and_lost()
        world.settle()
        self.assertEqual([self.successResultOf(call).number for call in calls], list(range(50)))
        again = world.stub.Echo(Note(text="again"))
        world.settle()
        self.assertEqual(self.successResultOf(again).text, "again")
        self.assertEqual(len(world.wires), 2)

    def test_closed_meanwhile(self) -> None:
        """Closing the channel ends what was not looked at yet, and leaves nothing to do."""
        world, calls = self.answered_and_lost()
        closed = world.channel.close()
        world.settle()
        self.successResultOf(closed)
        self.assertTrue(all(call.called for call in calls))
        self.assertEqual(self.code_of(calls[-1]), Code.CANCELLED)
        for call in calls:
            call.addErrback(lambda failure: failure.trap(GrpcError))

    def test_cut_off_meanwhile(self) -> None:
        """A connection that is ended in the middle of what arrived has no turn left."""
        for end in ("close", "abort"):
            world = self.hurried()
            calls = [world.stub.Wait(Note()) for _ in range(50)]
            world.wire.step()
            server = world.wire.server.protocol
            self.assertTrue(server._backlog)
            server.close(ErrorCodes.NO_ERROR, "over") if end == "close" else server.abort("over")
            self.assertFalse(server._backlog)
            self.assertIsNone(server._turn)
            self.assertEqual(world.wire.server.reading, end == "close")
            seen = len(world.demo.calls) - 1
            self.assertLess(seen, 50)
            world.settle()
            self.assertEqual(world.demo.ended[:seen], ["Wait cancelled"] * seen)
            self.assertEqual(self.code_of(calls[0]), Code.UNAVAILABLE)
            for call in calls[1:]:  # those that the server has not looked at may be sent again
                call.addErrback(lambda failure: failure.trap(GrpcError))


class KeepaliveTests(MemoryTests):
    """PING."""

    def test_client_notices_a_dead_server(self) -> None:
        """Silence during a call is followed by a PING, and silence after that by the loss of the call."""
        world = self.world(channel={"keepalive": 10, "limits": Limits(keepalive_timeout=3)})
        call = world.stub.Wait(Note())
        world.wait(60)
        self.assertNoResult(call)
        world.wire.stalled.add(world.wire.server)
        world.wait(9)
        self.assertNoResult(call)
        world.wait(6)
        failure = self.failureResultOf(call, GrpcError)
        self.assertEqual(failure.value.code, Code.UNAVAILABLE)
        self.assertIn("PING", failure.value.message)
        self.assertTrue(world.wire.client.aborted)

    def test_server_notices_a_dead_client(self) -> None:
        """The methods of a client that is gone are cancelled."""
        world = self.world(server={"keepalive": 10})
        world.stub.Wait(Note()).addErrback(lambda _: None)
        world.wait(100)
        self.assertEqual(world.demo.ended, [])
        world.wire.stalled.add(world.wire.client)
        world.wait(35)
        self.assertEqual(world.demo.ended, ["Wait cancelled"])
        self.assertEqual(world.server.connections, set())

    def test_idle_client_is_quiet(self) -> None:
        """Without a call in progress the client sends nothing."""
        world = self.world(channel={"keepalive": 1}, server={"keepalive": None})
        world.stub.Echo(Note())
        world.settle()
        world.wire.stalled.add(world.wire.client)
        world.wait(30)
        self.assertEqual(bytes(world.wire.client.unsent), b"")

    def test_peer_that_never_begins(self) -> None:
        """A connection without HTTP/2's first bytes is closed."""
        world = self.world()
        world.stub.Echo(Note()).addErrback(lambda _: None)
        world.clock.advance(0)
        world.wire.stalled.update((world.wire.client, world.wire.server))
        world.wait(21)
        self.assertTrue(world.wire.server.aborted)
        self.assertEqual(world.server.connections, set())


class DrainTests(MemoryTests):
    """GOAWAY."""

    def test_running_calls_end(self) -> None:
        """Draining waits for the calls that run, and closes then; nothing is lost."""
        world = self.world()
        call = world.stub.Wait(Note(number=5000))
        world.settle()
        drained = world.server.drain(60)
        world.wait(4)
        self.assertNoResult(call)
        self.assertNoResult(drained)
        world.wait(2)
        self.assertEqual(self.successResultOf(call).number, 5000)
        self.successResultOf(drained)
        self.assertFalse(world.wire.up)

    def test_calls_under_way_are_answered(self) -> None:
        """Calls that the client began before it knew are answered too."""
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        late = [world.stub.Echo(Note(number=n)) for n in range(5)]
        drained = world.server.drain(60)
        world.settle()
        self.assertEqual([self.successResultOf(call).number for call in late], list(range(5)))
        self.successResultOf(drained)

    def test_time_is_limited(self) -> None:
        """What still runs when the time is over is cancelled; its caller sees UNAVAILABLE."""
        world = self.world()
        call = world.stub.Wait(Note())
        world.settle()
        drained = world.server.drain(10)
        world.wait(9)
        self.assertNoResult(drained)
        world.wait(2)
        self.assertEqual(self.code_of(call), Code.UNAVAILABLE)
        self.assertEqual(world.demo.ended, ["Wait cancelled"])
        self.successResultOf(drained)

    def test_silent_client(self) -> None:
        """A client that answers nothing does not hold up the end."""
        world = self.world()
        world.stub.Wait(Note()).addErrback(lambda _: None)
        world.settle()
        drained = world.server.drain(10)
        world.wire.stalled.update((world.wire.client, world.wire.server))
        world.wait(16)
        self.successResultOf(drained)

    def test_idle_connections_close(self) -> None:
        """Without calls, draining is done at once; nothing left: at once, too."""
        world = self.world()
        world.stub.Echo(Note())
        world.settle()
        drained = world.server.drain(10)
        world.settle()
        self.successResultOf(drained)
        self.successResultOf(world.server.drain(10))
        self.assertEqual([call for call in world.clock.getDelayedCalls() if call.active()], [])

    def test_new_connection_for_new_calls(self) -> None:
        """After a GOAWAY the channel's next call has a new connection; the old one closes with its last."""
        world = self.world()
        old_call = world.stub.Wait(Note(number=5000))
        world.settle()
        first = world.wire
        for connection in world.server.connections:
            connection.drain()
        world.settle()
        new = world.stub.Echo(Note(text="new"))
        world.settle()
        self.assertEqual(self.successResultOf(new).text, "new")
        self.assertIsNot(world.wire, first)
        world.wait(6)
        self.assertEqual(self.successResultOf(old_call).number, 5000)
        self.assertFalse(first.up)
        self.assertTrue(world.wire.up)

    def test_unseen_calls_go_elsewhere(self) -> None:
        """A unary call that GOAWAY says was never looked at is made again on a new connection."""
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        first = world.wire
        first.stalled.add(first.client)
        call = world.stub.Echo(Note(text="again"))
        stream = world.stub.Chat()
        heard = start(drain_iterator(stream))
        first.client.protocol.dataReceived(goaway(1, ErrorCodes.NO_ERROR, b"moving house"))
        world.settle()
        self.assertEqual(self.successResultOf(call).text, "again")
        failure = self.failureResultOf(heard, GrpcError)
        self.assertEqual(failure.value.code, Code.UNAVAILABLE)
        self.assertIn("moving house", failure.value.message)

    def test_refused_streams_go_again(self) -> None:
        """A unary call whose stream was refused is made once more; refused again, it is UNAVAILABLE."""
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        server = next(iter(world.server.connections))
        accept = server.request_received
        refused: list[int] = []

        def refuse(stream_id: int, headers: Any) -> None:
            if len(refused) in (0, 1, 2):
                refused.append(stream_id)
                server.send_reset(stream_id, ErrorCodes.REFUSED_STREAM)
            else:
                accept(stream_id, headers)

        server.request_received = refuse  # type: ignore[method-assign]
        first = world.stub.Echo(Note())
        world.settle()
        self.assertEqual(self.code_of(first), Code.UNAVAILABLE)
        second = world.stub.Echo(Note(text="again"))
        world.settle()
        self.assertEqual(self.successResultOf(second).text, "again")
        self.assertEqual(len(refused), 3)


class ChannelTests(MemoryTests):
    """Connecting, losing, backing off."""

    def test_refused(self) -> None:
        """No one there: UNAVAILABLE with the reason; the next call within the backoff fails at once."""
        world = self.world(channel={"backoff": NO_JITTER})
        world.endpoint.refuse = True
        call = world.stub.Echo(Note())
        world.settle()
        failure = self.failureResultOf(call, GrpcError)
        self.assertEqual(failure.value.code, Code.UNAVAILABLE)
        self.assertIn("no one there", failure.value.message)
        self.assertEqual(self.code_of(world.stub.Echo(Note())), Code.UNAVAILABLE)
        self.assertEqual(world.endpoint.attempts, 1)

    def test_backoff_grows_and_ends(self) -> None:
        """Attempts come at growing intervals; one that succeeds begins anew."""
        world = self.world(channel={"backoff": NO_JITTER})
        world.endpoint.refuse = True
        at = []
        for _ in range(400):
            before = world.endpoint.attempts
            world.stub.Echo(Note()).addErrback(lambda _: None)
            if world.endpoint.attempts > before:
                at.append(round(world.clock.seconds()))
            world.wait(0.1, 0.1)
        self.assertEqual(at, [0, 1, 3, 7, 15, 23, 31, 39])
        world.endpoint.refuse = False
        world.wait(8)
        call = world.stub.Echo(Note(text="back"))
        world.settle()
        self.assertEqual(self.successResultOf(call).text, "back")
        self.assertEqual(world.channel._failures, 0)

    def test_wait_for_ready(self) -> None:
        """A call that wants to waits through failed attempts, within its time."""
        world = self.world(channel={"backoff": NO_JITTER})
        world.endpoint.refuse = True
        call = world.stub.Echo(Note(text="patient"), wait_for_ready=True)
        short = world.stub.Echo(Note(), wait_for_ready=True, timeout=3)
        world.wait(6)
        self.assertNoResult(call)
        self.assertEqual(self.code_of(short), Code.DEADLINE_EXCEEDED)
        world.endpoint.refuse = False
        world.wait(2)
        self.assertEqual(self.successResultOf(call).text, "patient")

    def test_connecting_takes_too_long(self) -> None:
        """An endpoint that never connects is given up."""
        world = self.world(channel={"connect_timeout": 5.0})
        world.endpoint.hang = True
        call = world.stub.Echo(Note())
        world.wait(6)
        failure = self.failureResultOf(call, GrpcError)
        self.assertIn("within 5 s", failure.value.message)
        self.assertEqual(world.endpoint.cancelled, 1)

    def test_not_http2(self) -> None:
        """A server that does not speak HTTP/2: UNAVAILABLE, connection closed."""
        world = self.world()
        call = world.stub.Echo(Note())
        world.clock.advance(0)
        world.wire.client.protocol.dataReceived(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        world.settle()
        self.assertEqual(self.code_of(call), Code.UNAVAILABLE)
        self.assertFalse(world.wire.up)

    def test_loss_fails_every_call(self) -> None:
        """All calls on a lost connection are UNAVAILABLE; the server's methods are cancelled; the next
        call connects anew."""
        world = self.world()
        calls = [world.stub.Wait(Note()) for _ in range(3)]
        stream = start(drain_iterator(world.stub.Chat()))
        world.settle()
        world.wire.cut(ConnectionLost())
        self.assertEqual([self.code_of(call) for call in (*calls, stream)], [Code.UNAVAILABLE] * 4)
        self.assertEqual(world.demo.ended, ["Wait cancelled"] * 3 + ["Chat cancelled"])
        again = world.stub.Echo(Note(text="again"))
        world.settle()
        self.assertEqual(self.successResultOf(again).text, "again")
        self.assertEqual(len(world.wires), 2)

    def test_server_s_stream_limit(self) -> None:
        """Calls over the server's limit wait their turn."""
        world = self.world(server={"limits": Limits(max_concurrent_streams=2)})
        calls = [world.stub.Wait(Note(number=1000)) for _ in range(5)]
        world.settle()
        self.assertEqual(len(world.demo.calls), 2)
        world.wait(3)
        self.assertEqual([self.successResultOf(call).number for call in calls], [1000] * 5)

    def test_stream_ids_run_out(self) -> None:
        """A connection that has used up its stream ids is replaced; its last call ends as any other."""
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        next(iter(world.channel._live)).h2.highest_outbound_stream_id = 2**31 - 5
        calls = [world.stub.Echo(Note(number=n)) for n in range(4)]
        world.settle()
        self.assertEqual([self.successResultOf(call).number for call in calls], list(range(4)))
        self.assertEqual(len(world.wires), 2)
        self.assertFalse(world.wires[0].up)

    def test_ended_calls_are_no_garbage(self) -> None:
        """What a unary call used is freed with its last reference, on both sides, not by the collector."""
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note(), timeout=5)))
        world.demo.calls.clear()
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(10):
                self.successResultOf(self.settled(world, world.stub.Echo(Note(), timeout=5)))
                world.demo.calls.clear()
            gc.collect()
            garbage = [thing for thing in gc.garbage if type(thing).__module__.startswith("txgrpc")]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        self.assertEqual(garbage, [])

    def test_close(self) -> None:
        """Closing cancels what runs, waits, and is asked for later."""
        world = self.world(server={"limits": Limits(max_concurrent_streams=1)})
        running, waiting = world.stub.Wait(Note()), world.stub.Wait(Note())
        world.settle()
        closed = world.channel.close()
        self.assertEqual([self.code_of(call) for call in (running, waiting)], [Code.CANCELLED] * 2)
        world.settle()
        self.successResultOf(closed)
        self.assertEqual(world.demo.ended, ["Wait cancelled"])
        self.assertEqual(self.code_of(world.stub.Echo(Note())), Code.CANCELLED)
        self.successResultOf(world.channel.close())

    def test_close_while_connecting(self) -> None:
        """Closing gives up the attempt."""
        world = self.world()
        world.endpoint.hang = True
        call = world.stub.Echo(Note())
        self.successResultOf(world.channel.close())
        self.assertEqual(self.code_of(call), Code.CANCELLED)
        self.assertEqual(world.endpoint.cancelled, 1)
        self.assertEqual(world.clock.getDelayedCalls(), [])

    def test_wrong_message(self) -> None:
        """What is not the method's request is the caller's mistake, told at once."""
        world = self.world()
        self.assertRaises(TypeError, world.stub.Echo, "text")
        self.assertRaises(ValueError, world.stub.Echo, Note(), metadata=[("Bad Name", "x")])
        self.assertRaises(AttributeError, lambda: world.stub.Nothing)
        self.assertEqual(world.clock.getDelayedCalls(), [])

    def test_iterable_that_fails(self) -> None:
        """The caller's own exception comes back; the server's method is cancelled."""
        world = self.world()

        def requests() -> Any:
            yield Note(number=1)
            raise LookupError("lost")

        call = world.stub.Sum(requests())
        world.settle()
        self.failureResultOf(call, LookupError)
        self.assertEqual(world.demo.ended, ["Sum cancelled"])
