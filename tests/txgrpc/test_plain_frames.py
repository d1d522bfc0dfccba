# SPDX-License-Identifier: Apache-2.0
"""The short way of plain frames does what h2's own does, and takes fewer steps."""

from __future__ import annotations

import gc
from collections import deque
from typing import Any
from unittest.mock import patch

from h2.connection import H2Connection
from h2.exceptions import ProtocolError
from hpack import Encoder
from hyperframe.frame import Frame, RstStreamFrame, SettingsFrame
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tests.txgrpc.demo import Note
from tests.txgrpc.memory_case import MemoryCase, start
from txgrpc.http2 import make_connection
from txgrpc.limits import Limits
from txgrpc.plain_frames import PlainFrames

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LIMITS = Limits(max_concurrent_streams=3, stream_window=65535, max_header_list=1024)
REQUEST = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a/b"),
    (b":authority", b"x"),
    (b"te", b"trailers"),
]
RESPONSE = [(b":status", b"200"), (b"content-type", b"application/grpc")]
TRAILERS = [(b"grpc-status", b"0")]
LISTS = [
    REQUEST,
    [*REQUEST, (b"grpc-timeout", b"1S")],
    [*REQUEST, (b"content-length", b"3")],
    [*REQUEST, (b"cookie", b"a"), (b"cookie", b"b")],
    [*REQUEST, (b"x", b"y" * 3000)],
    [*REQUEST, (b"x", b"y" * 6000)],
    [(b":method", b"POST"), (b"Upper", b"case")],
    RESPONSE,
    [(b":status", b"100")],
    TRAILERS,
    [],
]
BLOCKS = [Encoder().encode(each) for each in LISTS]
BAD_BLOCKS = [b"\x80", b"\xff\xff\xff", b"\x3f\xe1\xff\x03", b"\x40", b"\x88\x20"]
INDEXED = [b"\x82", b"\x88", b"\xbe", b"\xc0\xbf\xbe"]


def written(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Return a frame, be it right or wrong."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream_id.to_bytes(4, "big") + payload


STREAM_1_IS_CLOSED = written(3, 0, 1, b"\0\0\0\x05")
# Frames that make sense after one another, so that not nearly every sequence ends at its second frame.
SENSIBLE = [
    *(
        written(1, flags, stream_id, BLOCKS[LISTS.index(each)])
        for stream_id in (1, 3, 2**31 + 1)
        for flags in (4, 5)
        for each in (REQUEST, LISTS[1], LISTS[2], LISTS[3], RESPONSE, TRAILERS)
    ),
    *(written(1, 4, stream_id, BLOCKS[0]) for stream_id in (2, 5, 7)),
    *(
        written(0, flags, stream_id, data)
        for stream_id in (1, 3)
        for flags in (0, 1)
        for data in (b"", b"abc", b"z" * 16384)
    ),
    written(0, 0, 1, b"z" * 16384) * 4,
    *(written(1, flags, 1, BLOCKS[LISTS.index([(b":status", b"100")])]) for flags in (4, 5)),
    written(1, 0, 1, BLOCKS[0]),
    written(9, 4, 1, b""),
    written(3, 0, 1, b"\0\0\0\1"),
    *(
        written(8, flags, stream_id, credit)
        for stream_id in (0, 1, 3, 9)
        for flags, credit in (
            (0, b"\0\0\0\5"),
            (0xFF, b"\x80\0\0\5"),
            (0, b"\0\0\0\0"),
            (0, b"\x7f\xff\xff\xff"),
            (0, b"\0\0\5"),
            (0, b"\0\0\0\0\5"),
        )
    ),
]
ANY = st.builds(
    written,
    st.sampled_from([0, 1, 3, 8, 9, 2, 250]),
    st.sampled_from([0, 1, 4, 5, 8, 9, 0x20, 0x25, 0xF4]),
    st.sampled_from([1, 3, 5, 7, 2, 0, 2**31 + 1, 2**31 - 1]),
    st.sampled_from([*BLOCKS, *BAD_BLOCKS, *INDEXED, b"", b"abc", b"\0\0\0\5", b"\0\0\0\0"]),
)
FRAMES = st.one_of(st.sampled_from(SENSIBLE), st.sampled_from(SENSIBLE), st.sampled_from(SENSIBLE), ANY)


def made(client_side: bool, plain: bool) -> Any:
    """Return a connection whose peer has sent its SETTINGS. :param plain: whether it has the short way."""
    connection: Any = make_connection(client_side, LIMITS)
    if not plain:
        connection._receive_plain = lambda *_: False
    connection.receive_data((b"" if client_side else PREFACE) + SettingsFrame(0).serialize())
    if client_side:
        for stream_id in (1, 3, 5):
            connection.send_headers(stream_id, REQUEST, False)
        connection.send_data(3, b"", True)
        connection.reset_stream(5, 8)
    return connection


def received(connection: Any, frames: list[bytes]) -> list[object]:
    """Return what the connection says to each frame, its own output included."""
    said: list[object] = []
    for frame in frames:
        try:
            events = connection.receive_data(frame)
        except ProtocolError as error:
            said.append((type(error), int(error.error_code), connection.data_to_send()))
            break
        said += [shown(event) for event in events]
        window = connection.inbound_flow_control_window
        windows = {id: stream.outbound_flow_control_window for id, stream in connection.streams.items()}
        windows[0] = connection.outbound_flow_control_window
        said.append((connection.data_to_send(), windows, window))
    return said


def queues() -> int:
    """Return how many deques there are."""
    return sum(type(each) is deque for each in gc.get_objects())


def shown(event: Any) -> tuple[object, ...]:
    """Return what an event says."""
    names = ("stream_id", "data", "flow_controlled_length", "headers", "error_code", "delta")
    found = [getattr(event, name, None) for name in names]
    return (
        type(event),
        *([tuple(pair) for pair in each] if isinstance(each, list) else each for each in found),
        getattr(event, "stream_ended", None) is not None,
    )


class ReceivedFrameTests(SynchronousTestCase):
    """What a peer sends, right or wrong."""

    @settings(deadline=None, max_examples=500)
    @given(st.booleans(), st.lists(FRAMES, max_size=8))
    def test_it_is_taken_as_h2_takes_it(self, client_side: bool, frames: list[bytes]) -> None:
        self.assertEqual(
            received(made(client_side, plain=True), frames), received(made(client_side, plain=False), frames)
        )

    def test_each_two_frames_are_taken_as_h2_takes_them(self) -> None:
        for client_side in (False, True):
            for first in SENSIBLE:
                for second in SENSIBLE:
                    frames = [first, second]
                    ours = received(made(client_side, plain=True), frames)
                    self.assertEqual(ours, received(made(client_side, plain=False), frames), frames)

    def test_more_than_the_window_is_refused(self) -> None:
        connection = made(False, plain=True)
        connection.receive_data(written(1, 4, 1, BLOCKS[0]))
        data = written(0, 0, 1, b"z" * 16384)
        for _ in range(3):
            connection.receive_data(data)
        self.assertRaises(ProtocolError, connection.receive_data, data)

    def test_a_stream_over_the_limit_is_refused(self) -> None:
        connection = made(False, plain=True)
        for stream_id in (1, 3, 5):
            connection.receive_data(written(1, 5, stream_id, BLOCKS[0]))
        self.assertRaises(ProtocolError, connection.receive_data, written(1, 5, 7, BLOCKS[0]))

    def test_what_is_sent_on_a_stream_that_has_ended_meanwhile_is_dropped(self) -> None:
        """h2 reads a few frames ahead, so our half may be at work on a stream that is gone."""
        connection = made(False, plain=True)
        connection.receive_data(
            written(1, 4, 1, BLOCKS[0])
            + written(0, 0, 1, b"abc")
            + RstStreamFrame(1).serialize()
            + written(1, 4, 3, BLOCKS[0])
        )
        connection.data_to_send()
        for call in (
            lambda: connection.send_headers(1, RESPONSE, False),
            lambda: connection.send_data(1, b"", True),
            lambda: connection.increment_flow_control_window(1, 1),
            lambda: connection.reset_stream(1),
        ):
            error = self.assertRaises(ProtocolError, call)
            self.assertEqual(type(error).__name__, "StreamClosedError")
        self.assertEqual(connection.data_to_send(), b"")


class EndedStreamTests(SynchronousTestCase):
    """What a connection knows of streams that are over: only which of the last ones were reset."""

    def test_what_was_in_flight_for_a_stream_that_was_reset_is_no_error_of_the_connection(self) -> None:
        for plain in (True, False):
            for late in (written(1, 4, 1, BLOCKS[0]), written(0, 0, 1, b"abc"), written(1, 5, 1, BLOCKS[1])):
                connection = made(False, plain)
                connection.receive_data(written(1, 4, 1, BLOCKS[0]))
                connection.reset_stream(1, 8)
                connection.data_to_send()
                connection.receive_data(late)
                self.assertEqual(connection.data_to_send(), STREAM_1_IS_CLOSED)

    def test_headers_after_the_end_of_a_stream_are_an_error_of_the_connection(self) -> None:
        for plain in (True, False):
            connection = self._with_two_ended(plain)
            self.assertRaises(ProtocolError, connection.receive_data, written(1, 5, 1, BLOCKS[0]))

    def test_data_after_the_end_of_a_stream_is_refused(self) -> None:
        for plain in (True, False):
            for late in (written(0, 0, 1, b"abc"), written(0, 1, 1, b"")):
                connection = self._with_two_ended(plain)
                connection.receive_data(late)
                self.assertEqual(connection.data_to_send(), STREAM_1_IS_CLOSED)

    def _with_two_ended(self, plain: bool) -> Any:
        connection = made(False, plain)
        for stream_id in (1, 3):
            connection.receive_data(written(1, 5, stream_id, BLOCKS[0]))
            connection.send_headers(stream_id, RESPONSE, True)
        connection.data_to_send()
        return connection

    def test_they_take_no_memory(self) -> None:
        connection = made(False, plain=True)
        for stream_id in range(1, 2001, 2):
            connection.receive_data(written(1, 5, stream_id, BLOCKS[0]))
            connection.send_headers(stream_id, RESPONSE, True)
        self.assertEqual((len(connection.streams), len(connection._closed_streams)), (0, 0))

    def test_a_peer_that_resets_all_its_streams_is_remembered_for_the_last_ones(self) -> None:
        connection = made(False, plain=True)
        last = 2 * 5000 - 1
        for stream_id in range(1, last + 1, 2):
            connection.receive_data(
                written(1, 4, stream_id, BLOCKS[0]) + written(3, 0, stream_id, b"\0\0\0\x08")
            )
        self.assertLess(len(connection._closed_streams), 4000)
        connection.data_to_send()
        connection.receive_data(written(1, 4, last, BLOCKS[0]))
        self.assertEqual(connection.data_to_send(), written(3, 0, last, b"\0\0\0\x05"))


HEADERS = st.lists(
    st.tuples(st.sampled_from([b"a", b"b", b"grpc-status"]), st.binary(max_size=60)), min_size=1, max_size=4
)


class SentFrameTests(SynchronousTestCase):
    """What we send."""

    @settings(deadline=None)
    @given(
        st.lists(st.one_of(st.tuples(HEADERS, st.booleans()), st.tuples(st.binary(), st.booleans()))),
        st.sampled_from([1, 7, 16384]),
    )
    def test_it_is_what_h2_sends(self, moves: list[tuple[Any, bool]], most: int) -> None:
        """Byte for byte, however small the peer wants its frames, until a move that is not allowed."""
        sent = []
        for send_headers, send_data in (
            (PlainFrames.send_headers, PlainFrames.send_data),
            (H2Connection.send_headers, H2Connection.send_data),
        ):
            connection = made(False, plain=True)
            connection.receive_data(written(1, 5, 1, BLOCKS[0]))
            connection.max_outbound_frame_size = connection.streams[1].max_outbound_frame_size = most
            send_headers(connection, 1, RESPONSE, False)
            refused = False
            for what, end in moves:
                try:
                    send = send_headers if isinstance(what, list) else send_data
                    send(connection, 1, what, end or isinstance(what, list))
                except (ProtocolError, KeyError):  # h2 raises KeyError for a stream that is forgotten
                    refused = True
                    break
            sent.append((connection.data_to_send(), refused))
        self.assertEqual(*sent)


class CallTests(MemoryCase):
    """A call's frames."""

    def test_a_call_like_the_one_before_makes_no_object_of_a_frame(self) -> None:
        world = self.world()
        for _ in range(2):
            self.successResultOf(self.settled(world, world.stub.Echo(Note(text="a"), timeout=None)))
        count = 0
        before = Frame.__init__

        def counted(frame: Frame, *arguments: Any, **keywords: Any) -> None:
            nonlocal count
            count += 1
            before(frame, *arguments, **keywords)

        with patch.object(Frame, "__init__", counted):
            self.successResultOf(self.settled(world, world.stub.Echo(Note(text="b"), timeout=None)))
        self.assertEqual(count, 0)

    def test_a_call_that_has_ended_leaves_nothing_in_h2(self) -> None:
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note(text="a"), timeout=None)))
        [server] = world.server.connections
        self.assertEqual((server.h2.streams, world.channel._connection.h2.streams), ({}, {}))

    def test_a_call_that_waits_has_no_queues(self) -> None:
        """A node has a connection for each pod and a call for each log, and a deque takes 760 bytes."""
        world = self.world()
        chats: list[Any] = []

        async def chat() -> None:
            call = world.stub.Chat(timeout=None)
            await call.send(Note(text="a"))
            await anext(call)
            chats.append(call)

        counts = []
        for number in (1, 10):
            for _ in range(number):
                start(chat())
            world.settle()
            gc.collect()
            counts.append(queues())
        self.assertEqual(len(chats), 11)
        self.assertEqual(*counts)

    def test_a_connection_has_no_queues(self) -> None:
        counts = []
        kept = []
        for number in (1, 10):
            kept += [made(client_side, plain=True) for client_side in (True, False) for _ in range(number)]
            gc.collect()
            counts.append(queues())
        self.assertEqual(*counts)
