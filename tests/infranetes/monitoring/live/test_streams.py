# SPDX-License-Identifier: Apache-2.0
"""The streams of pages: who is sent what, and what becomes of readers that are too many, slow or gone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource
from twisted.web.server import Request

from infranetes.monitoring.access import Token
from infranetes.monitoring.live import streams
from infranetes.monitoring.live.feed import MAX_FRAME, Part
from infranetes.monitoring.live.streams import (
    BEAT_SECONDS,
    LOOK_SECONDS,
    PERIOD,
    STALL_SECONDS,
    Look,
    Stream,
    Streams,
)
from infranetes.monitoring.site import QuietSite
from infranetes_common.concurrency import start, until_ended
from tests.support.inline_threads import InlineThreads

SECRET = b"0123456789abcdef"


@attrs.frozen
class Word:
    text: str

    def html(self, id: str) -> str:
        return f"<{id}>{self.text}"


class Transport(StringTransport):
    """A connection that is full once it has more than `room` bytes, until they are read."""

    room = 1 << 30
    channel: Any = None
    full = aborted = False
    lingers = False  # whether it takes a while until an aborted one is lost

    def writeSequence(self, data: Any) -> None:
        self.write(b"".join(data))

    def write(self, data: bytes) -> None:
        StringTransport.write(self, data)
        if len(self.value()) > self.room and not self.full:
            self.full = True
            self.producer.pauseProducing()

    def read(self) -> bytes:
        """Take what was written, which makes room."""
        data: bytes = self.value()
        self.clear()
        if self.full:
            self.full = False
            self.producer.resumeProducing()
        return data

    def abortConnection(self) -> None:
        self.aborted = True
        if not self.lingers:
            self.hang_up()

    def hang_up(self) -> None:
        if not self.disconnected:
            self.disconnected = True
            self.channel.connectionLost(Failure(ConnectionResetError()))


class StreamsCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = InlineThreads()
        self.streams = Streams(self.clock.reactor)
        self.parts: dict[str, Word] = {"one": Word("a")}
        self.looks = 0
        self.site = self.make_site(None)

    def make_site(self, token: Token | None) -> QuietSite:
        root = Resource()
        root.putChild(b"live", Stream(self.streams, self.page_of, token))
        site = QuietSite(root, lambda request: None)
        site.reactor = self.clock  # type: ignore[assignment]
        return site

    def page_of(self, request: Request) -> tuple[str, Look]:
        return b"/".join(request.postpath or ()).decode(), self.look

    async def look(self) -> Mapping[str, Part]:
        self.looks += 1
        return dict(self.parts)

    def connect(self, page: str = "", method: str = "GET", more: bytes = b"") -> Transport:
        transport = Transport()
        channel = cast(Any, self.site.buildProtocol(None))
        transport.channel = channel
        channel.makeConnection(transport)
        channel.dataReceived(f"{method} /live/{page} HTTP/1.1\r\nHost: a\r\n".encode() + more + b"\r\n")
        return transport

    def documents(self, data: bytes, name: str = "parts") -> list[dict[str, Any]]:
        """Return the documents of the events of this name among what a client has read."""
        lines = data.split(b"\n")
        return [
            json.loads(lines[number + 1].removeprefix(b"data: "))
            for number, line in enumerate(lines)
            if line == b"event: " + name.encode()
        ]

    def pass_time(self, seconds: float) -> None:
        self.clock.pump([0.5] * int(seconds * 2))


class ReadersTests(StreamsCase):
    def test_a_reader_is_sent_what_is_there_and_then_what_changes(self) -> None:
        reader = self.connect()
        data = reader.read()
        self.assertIn(b"Content-Type: text/event-stream", data)
        self.assertIn(b"Cache-Control: no-store", data)
        [document] = self.documents(data)
        self.assertEqual((document["parts"], document["all"]), ({"one": "<one>a"}, ["one"]))
        self.pass_time(PERIOD)
        self.assertEqual(reader.read(), b"")
        self.parts = {"two": Word("b")}
        self.pass_time(PERIOD)
        [document] = self.documents(reader.read())
        self.assertEqual((document["parts"], document["gone"]), ({"two": "<two>b"}, ["one"]))

    def test_a_page_is_looked_at_once_for_all_its_readers_and_not_without(self) -> None:
        self.pass_time(5 * PERIOD)
        self.assertEqual(self.looks, 0)
        first, second = self.connect(), self.connect()
        self.assertEqual([each["parts"] for each in self.documents(second.read())], [{"one": "<one>a"}])
        before = self.looks
        self.pass_time(4 * PERIOD)
        self.assertEqual(self.looks - before, 4)
        first.hang_up()
        self.pass_time(PERIOD)
        self.assertEqual(self.looks - before, 5)
        second.hang_up()
        self.pass_time(5 * PERIOD)
        self.assertEqual(self.looks - before, 5)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_page_that_nobody_has_read_for_a_while_is_read_again(self) -> None:
        self.connect().hang_up()
        self.pass_time(PERIOD)
        self.parts = {"one": Word("z")}
        self.assertEqual(self.documents(self.connect().read())[0]["parts"], {"one": "<one>z"})

    def test_pages_are_told_apart(self) -> None:
        self.connect("web")
        self.connect("database")
        self.assertEqual(self.looks, 2)
        self.assertEqual(self.streams.readers, 2)

    def test_where_nothing_changes_the_time_is_told(self) -> None:
        reader = self.connect()
        reader.read()
        self.pass_time(BEAT_SECONDS + 1)
        [beat] = self.documents(reader.read(), "beat")
        self.assertEqual(beat, {"now": BEAT_SECONDS})

    def test_a_head_request_ends(self) -> None:
        self.assertIn(b"Content-Length: 0", self.connect(method="HEAD").read())
        self.assertEqual(self.streams.readers, 0)


class BoundsTests(StreamsCase):
    def test_one_too_many_is_refused_and_has_its_turn_when_another_leaves(self) -> None:
        self.patch(streams, "MAX_READERS", 2)
        first, _ = self.connect("a"), self.connect("b")
        refused = self.connect("c").read()
        self.assertIn(b" 503 ", refused)
        self.assertIn(b"close one of them", refused)
        first.hang_up()
        self.assertIn(b" 200 ", self.connect("c").read())

    def test_without_the_token_nobody_reads(self) -> None:
        self.site = self.make_site(Token(SECRET))
        self.assertIn(b" 401 ", self.connect().read())
        self.assertEqual((self.streams.readers, self.looks), (0, 0))
        self.assertIn(b" 200 ", self.connect(more=b"Authorization: Bearer " + SECRET + b"\r\n").read())

    def test_a_full_connection_holds_a_frame_however_much_changes(self) -> None:
        reader = self.connect()
        reader.room = 1000
        for number in range(20):
            self.parts = {f"p{each}": Word(f"{number}" * 1000) for each in range(200)}
            self.pass_time(PERIOD)
        self.assertTrue(reader.full)
        self.assertLess(len(reader.value()), reader.room + 2 * MAX_FRAME)

    def test_it_goes_on_with_the_newest_once_there_is_room(self) -> None:
        reader = self.connect()
        reader.room = 100
        self.parts = {"one": Word("b" * 200)}
        self.pass_time(PERIOD)
        self.parts = {"one": Word("c"), "two": Word("d")}
        self.pass_time(3 * PERIOD)
        self.assertIn("b" * 200, str(self.documents(reader.read())))
        self.assertEqual(
            [each["parts"] for each in self.documents(reader.read())], [{"one": "<one>c", "two": "<two>d"}]
        )

    def test_who_reads_nothing_is_let_go_and_the_others_are_not(self) -> None:
        slow, other = self.connect(), self.connect()
        slow.room = 100
        self.parts = {"one": Word("b" * 200)}
        self.pass_time(PERIOD + STALL_SECONDS - 1)
        self.assertFalse(slow.aborted)
        self.pass_time(2)
        self.assertEqual((slow.aborted, other.aborted, self.streams.readers), (True, False, 1))

    def test_who_reads_late_but_reads_stays(self) -> None:
        slow = self.connect()
        slow.room = 100
        for number in range(6):
            self.parts = {"one": Word(f"{number}" * 200)}
            self.pass_time(STALL_SECONDS - 2)
            slow.read()
        self.assertFalse(slow.aborted)


class TroubleTests(StreamsCase):
    def test_a_look_that_takes_too_long_leaves_what_was_there(self) -> None:
        reader = self.connect()
        reader.read()
        waiting: Deferred[None] = Deferred()

        async def hangs() -> Mapping[str, Part]:
            await waiting
            return {}

        self.patch(self, "look", hangs)
        slow = self.connect("slow")
        self.pass_time(LOOK_SECONDS + 2 * PERIOD)
        self.assertFalse(slow.aborted)
        self.assertEqual(self.documents(slow.read()), [])
        self.assertEqual(self.documents(reader.read()), [])

    def test_after_a_failure_readers_are_let_go_and_may_come_back(self) -> None:
        reader = self.connect()

        async def fails() -> Mapping[str, Part]:
            raise RuntimeError("a bug")

        self.patch(self, "look", fails)
        other = self.connect("other")
        self.assertEqual((reader.aborted, other.aborted), (False, True))
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.assertEqual(self.streams.readers, 1)
        self.patch(self, "look", lambda: StreamsCase.look(self))
        self.assertEqual(len(self.documents(self.connect("other").read())), 1)

    def test_its_stop_waits_until_the_connections_are_lost_and_nothing_is_looked_at(self) -> None:
        reader = self.connect()
        reader.lingers = True
        looking: Deferred[None] = Deferred(lambda _: None)  # ends when it likes, as threads do

        async def look() -> Mapping[str, Part]:
            await until_ended(looking)
            return {}

        self.patch(self, "look", look)
        other = self.connect("other")
        stopping = start(self.streams.stop())
        self.assertTrue(reader.aborted)
        self.assertNoResult(stopping)
        reader.hang_up()
        self.assertNoResult(stopping)
        looking.callback(None)
        self.pass_time(PERIOD)
        self.successResultOf(stopping)
        self.assertTrue(other.aborted)

    def test_it_stops_with_all_its_readers(self) -> None:
        first, second = self.connect(), self.connect("web")
        stopping = start(self.streams.stop())
        self.assertEqual((first.aborted, second.aborted), (True, True))
        self.successResultOf(stopping)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.successResultOf(start(self.streams.stop()))
