# SPDX-License-Identifier: Apache-2.0
"""Flow control, and that no peer has the reactor for itself; server and client in memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

from h2.errors import ErrorCodes
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost

from tests.txgrpc.demo import Note
from tests.txgrpc.memory import HIGH_WATER, SMALL, InMemoryPair
from tests.txgrpc.memory_case import MemoryCase, start
from tests.txgrpc.support import drain_iterator
from txgrpc import Call, Code, GrpcError, Limits
from txgrpc.framing import MessageReader
from txgrpc.sender import Sender
from txgrpc.states import WrongStep
from txgrpc.stream import Stream


class FlowControlTests(MemoryCase):
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

    def test_a_message_larger_than_the_window_waits_until_it_is_read(self) -> None:
        """The first one is read to its end; of the next, no more comes than the window takes."""
        world = self.world(channel={"limits": SMALL})
        call = world.stub.Count(Note(number=10, blob=b"x" * 200_000))
        self.successResultOf(self.settled(world, start(call.__anext__())))
        world.settle()
        self.assertEqual(world.demo.sent, 2)
        call.cancel()

    def test_of_a_call_with_one_request_the_end_is_sent_already(self) -> None:
        world = self.world()
        call = world.stub.Count(Note(number=3))
        for _ in range(2):
            self.successResultOf(self.settled(world, start(call.done_sending())))
        self.assertEqual(len(self.successResultOf(self.settled(world, start(drain_iterator(call))))), 3)

    def test_the_end_of_the_requests_waits_for_its_turn_as_they_do(self) -> None:
        world = self.world()
        chat = world.stub.Chat()
        world.settle()
        client = world.wire.client.protocol
        client.pauseProducing()
        sending, ending = start(chat.send(Note(text="x"))), start(chat.done_sending())
        self.assertNoResult(sending)
        client.resumeProducing()
        self.successResultOf(sending)
        self.successResultOf(ending)
        self.assertEqual(
            self.successResultOf(self.settled(world, start(drain_iterator(chat)))), [Note(text="X")]
        )

    def test_a_call_that_another_ends_when_its_turn_comes_sends_nothing(self) -> None:
        world = self.world()
        first, second = world.stub.Chat(), world.stub.Chat()
        world.settle()
        client = world.wire.client.protocol
        client.pauseProducing()
        sending, waiting = start(first.send(Note(text="x"))), start(second.send(Note(text="y")))
        sending.addCallback(lambda _: second.cancel())
        client.resumeProducing()
        self.successResultOf(sending)
        self.assertEqual(self.code_of(waiting), Code.CANCELLED)
        heard = start(first.__anext__())
        self.assertEqual(self.successResultOf(self.settled(world, heard)).text, "X")
        first.cancel()
        world.settle()
        self.assertEqual(world.demo.ended, ["Chat cancelled"] * 2)

    def test_a_reader_may_let_the_server_get_further_ahead(self) -> None:
        """From the call's begin on, or later; never less than the window."""
        for early in (True, False):
            world = self.world(channel={"limits": SMALL})
            call = world.stub.Count(Note(number=1000, blob=b"x" * 10_000))
            if not early:
                world.settle()
            call.receive_ahead(1000)
            call.receive_ahead(200_000)
            world.settle()
            self.assertTrue(20 <= world.demo.sent <= 22, world.demo.sent)
            call.cancel()

    def test_a_list_of_responses_is_one_frame_of_as_many_messages(self) -> None:
        """Of a method that may have several responses; none of any other."""
        pieces: list[int] = []
        feed = MessageReader.feed

        def noting(reader: MessageReader, data: bytes) -> list[bytes]:
            found = feed(reader, data)
            pieces.append(len(found))
            return found

        world = self.world()
        count, _ = world.server._methods[b"/txgrpc.demo.Demo/Count"]
        echo, _ = world.server._methods[b"/txgrpc.demo.Demo/Echo"]
        notes: list[Any] = [Note(number=1), Note(), Note(text="x" * 100).SerializeToString()]

        async def counted(request: Any, call: Any) -> Any:
            yield notes

        async def echoed(request: Any, call: Any) -> Any:
            return notes

        world.server._methods[b"/txgrpc.demo.Demo/Count"] = count, counted
        world.server._methods[b"/txgrpc.demo.Demo/Echo"] = echo, echoed
        self.patch(MessageReader, "feed", noting)
        expected = [Note(number=1), Note(), Note(text="x" * 100)]
        for number in (3, 2, 1):
            del notes[number:], pieces[:]
            heard = start(drain_iterator(world.stub.Count(Note())))
            world.settle()
            self.assertEqual(self.successResultOf(heard), expected[:number])
            self.assertEqual(pieces, [1, number])
        refused = self.settled(world, world.stub.Echo(Note()))
        self.assertEqual(self.code_of(refused), Code.INTERNAL)
        self.flushLoggedErrors(TypeError)

    def test_frames_are_as_large_as_the_receiver_takes(self) -> None:
        """A message is one frame where both sides take large ones, and several where they do not."""
        pieces: list[int] = []
        feed = MessageReader.feed

        def noting(reader: MessageReader, data: bytes) -> list[bytes]:
            pieces.append(len(data))
            return feed(reader, data)

        self.patch(MessageReader, "feed", noting)
        for limits, largest in ((Limits(max_frame=192 * 1024), 100_000), (Limits(), 16_384)):
            pieces.clear()
            world = self.world(channel={"limits": limits}, server={"limits": limits})
            self.settled(world, world.stub.Echo(Note()))
            echoed = self.settled(world, world.stub.Echo(Note(blob=b"x" * 100_000)))
            self.assertEqual(len(self.successResultOf(echoed).blob), 100_000)
            self.assertTrue(largest <= max(pieces) < largest + 100, pieces)

    def test_client_waits_for_a_slow_server(self) -> None:
        """An upload's iterable is asked no further than the window while the method does not read.

        A method that wants more ahead gets it.
        """
        world = self.world(server={"limits": SMALL})
        asked = 0
        gate: Deferred[None] = Deferred()
        calls: list[Call] = []

        async def slow_sum(requests: Any, call: Any) -> Any:
            calls.append(call)
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
        [calling] = calls
        calling.receive_ahead(1000)
        world.settle()
        self.assertLessEqual(asked, 8)
        calling.receive_ahead(200_000)
        world.settle()
        self.assertTrue(20 <= asked <= 22, asked)
        gate.callback(None)
        world.settle()
        self.assertEqual(self.successResultOf(call).number, 1000)

    def test_an_upload_that_waits_for_its_turn_is_told_of_the_loss_of_its_connection(self) -> None:
        """Its error is the connection's, not the cancellation of what waited to be sent."""
        world = self.world(server={"limits": SMALL})
        method, _ = world.server._methods[b"/txgrpc.demo.Demo/Sum"]

        async def never_reads(requests: Any, call: Any) -> Any:
            await Deferred()

        world.server._methods[b"/txgrpc.demo.Demo/Sum"] = method, never_reads
        call = world.stub.Sum(Note(blob=b"x" * 10_000) for _ in range(1000))
        world.settle()
        world.wire.cut(ConnectionLost())
        self.assertEqual(self.code_of(call), Code.UNAVAILABLE)

    def test_a_call_that_ends_while_a_request_waits_for_its_turn_tells_who_sends(self) -> None:
        world = self.world(channel={"limits": SMALL}, server={"limits": SMALL})
        method, _ = world.server._methods[b"/txgrpc.demo.Demo/Chat"]

        async def never_reads(requests: Any, call: Any) -> Any:
            await Deferred()
            yield Note()

        world.server._methods[b"/txgrpc.demo.Demo/Chat"] = method, never_reads
        chat = world.stub.Chat()
        sending = start(chat.send(Note(blob=b"x" * 1_000_000)))
        ending = start(chat.done_sending())
        world.settle()
        self.assertNoResult(sending)
        self.assertNoResult(ending)
        self.assertIsInstance(self.failureResultOf(start(chat.send(Note()))).value, WrongStep)
        chat.cancel()
        self.assertEqual(self.code_of(sending), Code.CANCELLED)
        self.failureResultOf(ending)

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

    def test_however_many_they_are_each_has_its_turn_before_any_has_the_next(self) -> None:
        """And together they hand the transport no more than it takes."""
        wide = Limits(stream_window=2**24, connection_window=2**24)
        world = self.world(channel={"limits": wide}, server={"limits": wide})
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        world.wire.stalled.add(world.wire.server)
        calls = [world.stub.Echo(Note(blob=b"x" * 100_000)) for _ in range(100)]
        world.settle()
        world.wire.stalled.clear()
        turns: list[int] = []
        send = Sender._send_frame

        def noting(sender: Sender, stream: Stream) -> bool:
            sent = send(sender, stream)
            if sent and not sender._connection.client_side:
                turns.append(stream.id)
            return sent

        self.patch(Sender, "_send_frame", noting)
        world.settle()
        self.assertEqual([len(self.successResultOf(call).blob) for call in calls], [100_000] * 100)
        for number in range(100, 400, 50):
            had = Counter({id: 0 for id in turns})
            had.update(turns[:number])
            self.assertLess(max(had.values()) - min(had.values()), 2, number)
        self.assertLess(world.wire.server.most, HIGH_WATER + 100_000)

    def test_all_answers_of_a_turn_are_handed_over_at_once(self) -> None:
        """Each time that the transport is handed something costs a call of the system's."""
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        written: list[int] = []
        write = world.wire.server.write

        def noting(data: bytes) -> None:
            written.append(len(data))
            write(data)

        self.patch(world.wire.server, "write", noting)
        calls = [world.stub.Echo(Note(number=n)) for n in range(20)]
        world.settle()
        for call in calls:
            self.successResultOf(call)
        self.assertLessEqual(len(written), 2)

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


class TurnTests(MemoryCase):
    """No peer has the reactor for itself: what arrived is handled in more turns than one."""

    def hurried(self, seconds_per_look: float = 0.011) -> InMemoryPair:
        """Both ends connected. From now on time passes as they look at the clock, by default a whole turn."""
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        clock = world.clock
        seconds = clock.seconds

        def later() -> float:
            clock.rightNow += seconds_per_look
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
        texts = start(self._texts(chat, 50))
        self.assertNoResult(texts)  # they are here, and are taken in more turns than one
        world.settle()
        self.assertEqual(self.successResultOf(texts), [str(n) for n in range(50)])

    def test_small_pieces_share_the_time_of_a_turn(self) -> None:
        """TLS hands over each of its records by itself, however many one turn of the reactor brings."""
        world = self.hurried(0.0005)
        calls = [world.stub.Wait(Note()) for _ in range(50)]
        data, server = world.wire.client.take(), world.wire.server
        for at in range(0, len(data), 20):
            server.protocol.dataReceived(data[at : at + 20])
        self.assertFalse(server.reading)
        begun = len(world.demo.calls) - 1
        self.assertTrue(0 < begun < 20, begun)
        self.turn(world)
        more = len(world.demo.calls) - 1
        self.assertTrue(begun < more < 50, more)
        world.settle()
        self.assertEqual(len(world.demo.calls) - 1, 50)
        self.assertTrue(server.reading)
        for call in calls:
            call.cancel()
            self.failureResultOf(call)

    def test_a_turn_that_handled_the_backlog_takes_no_more(self) -> None:
        world, _ = self.answered_and_behind()
        client = world.wire.client
        while client.protocol.receiver._backlog:
            self.assertFalse(client.reading)
            self.turn(world)
        self.assertFalse(client.reading)
        self.turn(world)
        self.assertTrue(client.reading)

    def turn(self, world: InMemoryPair) -> None:
        """One turn of the reactor: calls that are due, without those that they add."""
        clock = world.clock
        for call in [each for each in clock.calls if each.getTime() <= clock.rightNow]:
            clock.calls.remove(call)
            call.called = 1
            call.func(*call.args, **call.kw)

    async def _texts(self, stream: Any, count: int) -> list[str]:
        return [(await anext(stream)).text for _ in range(count)]

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

    def answered_and_behind(self) -> tuple[InMemoryPair, list[Deferred[Any]]]:
        """A client that has all answers, but not looked at most of them."""
        world = self.hurried()
        calls = [world.stub.Echo(Note(number=n)) for n in range(50)]
        while not world.wire.client.protocol.receiver._backlog:
            world.clock.advance(0)
            world.wire.step()
        while world.wire.server.protocol.receiver._backlog:
            world.clock.advance(0)
        world.wire.client.protocol.dataReceived(world.wire.server.take())
        return world, calls

    def answered_and_lost(self) -> tuple[InMemoryPair, list[Deferred[Any]]]:
        """As `answered_and_behind`, and its connection is lost."""
        world, calls = self.answered_and_behind()
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
            self.assertTrue(server.receiver._backlog)
            server.close(ErrorCodes.NO_ERROR, "over") if end == "close" else server.abort("over")
            self.assertFalse(server.receiver._backlog)
            self.assertIsNone(server.receiver._turn)
            self.assertEqual(world.wire.server.reading, end == "close")
            seen = len(world.demo.calls) - 1
            self.assertLess(seen, 50)
            world.settle()
            self.assertEqual(world.demo.ended[:seen], ["Wait cancelled"] * seen)
            self.assertEqual(self.code_of(calls[0]), Code.UNAVAILABLE)
            for call in calls[1:]:  # those that the server has not looked at may be sent again
                call.addErrback(lambda failure: failure.trap(GrpcError))
