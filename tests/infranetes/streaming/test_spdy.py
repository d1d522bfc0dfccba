# SPDX-License-Identifier: Apache-2.0
"""SPDY/3.1 without I/O: a conversation between two ends, and the effects of garbage."""

from __future__ import annotations

import struct
import zlib

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.streaming.headerblock import DICTIONARY, MAX_BLOCK, HeaderReader, HeaderWriter
from infranetes.streaming.spdy import (
    MAX_STREAMS,
    DataReceived,
    Event,
    GoneAway,
    Kind,
    PingAnswered,
    Reset,
    Spdy,
    StreamAccepted,
    StreamFinished,
    StreamOpened,
    StreamReset,
)
from infranetes_common.errors import InvalidArgument
from tests.harness.needs import repetitions


def frame(kind: int, payload: bytes, flags: int = 0, version: int = 3) -> bytes:
    return struct.pack(">HHI", 0x8000 | version, kind, flags << 24 | len(payload)) + payload


class HeaderBlocks(SynchronousTestCase):
    def test_the_dictionary_is_the_one_of_the_specification(self) -> None:
        self.assertEqual((len(DICTIONARY), zlib.adler32(DICTIONARY)), (1423, 0xE3C6A7C2))

    @settings(max_examples=repetitions(20, 50))
    @given(
        st.lists(
            st.dictionaries(
                st.text("abcxyz-0189", max_size=20),
                st.text("aZ09 /:=\u00e9\u6f22\U0001f600", max_size=200),
                max_size=8,
            ),
            max_size=5,
        )
    )
    def test_blocks_are_read_as_they_were_written(self, blocks: list[dict[str, str]]) -> None:
        writer, reader = HeaderWriter(), HeaderReader()
        self.assertEqual([reader.read(writer.write(block)) for block in blocks], blocks)

    def test_a_bomb_is_refused_before_it_is_inflated(self) -> None:
        deflate = zlib.compressobj(zdict=DICTIONARY)
        bomb = deflate.compress(bytes(64 * 1024 * 1024)) + deflate.flush(zlib.Z_SYNC_FLUSH)
        with self.assertRaises(InvalidArgument) as caught:
            HeaderReader().read(bomb)
        self.assertIn(str(MAX_BLOCK), str(caught.exception))

    def test_too_many_pairs_are_refused(self) -> None:
        with self.assertRaises(InvalidArgument):
            HeaderReader().read(HeaderWriter().write({f"name{n}": "" for n in range(300)}))


class Conversation(SynchronousTestCase):
    def setUp(self) -> None:
        self.client = Spdy(client=True)
        self.server = Spdy()

    def to_server(self) -> list[Event]:
        return self.server.receive(self.client.take_output())

    def to_client(self) -> list[Event]:
        return self.client.receive(self.server.take_output())

    def opened(self, headers: dict[str, str] | None = None) -> int:
        stream = self.client.open_stream(headers or {"streamtype": "stdin"})
        self.assertEqual(self.to_server(), [StreamOpened(stream, headers or {"streamtype": "stdin"})])
        self.server.reply(stream)
        self.assertEqual(self.to_client(), [StreamAccepted(stream)])
        return stream

    def test_data_goes_both_ways_until_both_have_finished(self) -> None:
        stream = self.opened()
        self.client.send_data(stream, b"question")
        self.client.finish(stream)
        self.assertEqual(self.to_server(), [DataReceived(stream, b"question"), StreamFinished(stream)])
        self.server.send_data(stream, b"answer")
        self.server.finish(stream)
        self.assertEqual(self.to_client(), [DataReceived(stream, b"answer"), StreamFinished(stream)])
        self.assertFalse(self.server.send_data(stream, b"late"))
        self.assertFalse(self.client.send_data(stream, b"late"))

    def test_a_large_write_goes_in_frames_and_arrives_whole(self) -> None:
        stream = self.opened()
        data = bytes(range(256)) * 2000
        self.client.send_data(stream, data)
        pieces = [event.data for event in self.to_server() if isinstance(event, DataReceived)]
        self.assertEqual(b"".join(pieces), data)

    def test_a_reset_ends_one_stream_and_no_other(self) -> None:
        first, second = self.opened(), self.opened()
        self.server.reset(first, Reset.REFUSED_STREAM)
        self.assertEqual(self.to_client(), [StreamReset(first, Reset.REFUSED_STREAM)])
        self.client.send_data(second, b"still here")
        self.assertEqual(self.to_server(), [DataReceived(second, b"still here")])

    def test_data_on_a_stream_that_is_unknown_is_answered_with_a_reset_alone(self) -> None:
        stream = self.opened()
        self.assertEqual(self.server.receive(struct.pack(">II", 77, 3) + b"abc"), [])
        self.assertEqual(self.server.take_output(), frame(Kind.RST_STREAM, struct.pack(">II", 77, 2)))
        self.client.send_data(stream, b"fine")
        self.assertEqual(self.to_server(), [DataReceived(stream, b"fine")])

    def test_pings_are_answered_by_the_side_that_did_not_send_them(self) -> None:
        ping = self.client.ping()
        self.assertEqual(self.to_server(), [])
        self.assertEqual(self.to_client(), [PingAnswered(ping)])

    def test_after_a_goaway_new_streams_are_refused_and_old_ones_go_on(self) -> None:
        old = self.opened()
        self.server.go_away()
        self.assertEqual(self.to_client(), [GoneAway()])
        new = self.client.open_stream({"streamtype": "data"})
        self.client.send_data(old, b"x")
        self.assertEqual(self.to_server(), [DataReceived(old, b"x")])
        self.assertEqual(self.to_client(), [StreamReset(new, Reset.REFUSED_STREAM)])

    def test_streams_are_bounded(self) -> None:
        for _ in range(MAX_STREAMS):
            self.client.open_stream({})
        self.assertEqual(len(self.to_server()), MAX_STREAMS)
        self.client.open_stream({})
        self.assertEqual(self.to_server(), [])

    def test_unknown_frames_and_settings_ask_nothing(self) -> None:
        for kind in (Kind.SETTINGS, Kind.WINDOW_UPDATE, 99):
            self.assertEqual(self.server.receive(frame(kind, bytes(8))), [])
        self.assertEqual(self.server.take_output(), b"")

    @settings(max_examples=repetitions(20, 50))
    @given(st.lists(st.integers(1, 40), min_size=1, max_size=50))
    def test_where_the_bytes_are_cut_makes_no_difference(self, cuts: list[int]) -> None:
        client, server = Spdy(client=True), Spdy()
        stream = client.open_stream({"streamtype": "stdout", "port": "80"})
        client.send_data(stream, b"0123456789" * 20)
        client.finish(stream)
        wire = client.take_output()
        events: list[Event] = []
        for cut in cuts:
            events += server.receive(wire[:cut])
            wire = wire[cut:]
        events += server.receive(wire)
        data = b"".join(event.data for event in events if isinstance(event, DataReceived))
        self.assertEqual(data, b"0123456789" * 20)
        self.assertEqual(
            [event for event in events if not isinstance(event, DataReceived)],
            [StreamOpened(stream, {"streamtype": "stdout", "port": "80"}), StreamFinished(stream)],
        )


class Nonsense(SynchronousTestCase):
    def refused(self, data: bytes) -> None:
        server = Spdy()
        with self.assertRaises(InvalidArgument):
            server.receive(data)
        self.assertEqual(server.take_output()[:4], struct.pack(">HH", 0x8003, Kind.GOAWAY))

    def test_another_version_is_refused(self) -> None:
        self.refused(frame(Kind.PING, bytes(4), version=2))

    def test_an_oversized_control_frame_is_refused_before_it_is_buffered(self) -> None:
        self.refused(struct.pack(">HHI", 0x8003, Kind.SYN_STREAM, 0xFFFFFF))

    def test_a_short_control_frame_is_refused(self) -> None:
        for kind in (Kind.SYN_STREAM, Kind.SYN_REPLY, Kind.RST_STREAM, Kind.PING, Kind.GOAWAY):
            self.refused(frame(kind, b"\0"))

    def test_a_stream_id_of_ours_or_used_before_is_refused(self) -> None:
        block = HeaderWriter().write({})
        self.refused(frame(Kind.SYN_STREAM, struct.pack(">IIH", 2, 0, 0) + block))
        self.refused(frame(Kind.SYN_STREAM, struct.pack(">IIH", 0, 0, 0) + block))

    def test_headers_that_are_not_zlib_are_refused(self) -> None:
        self.refused(frame(Kind.SYN_STREAM, struct.pack(">IIH", 1, 0, 0) + b"not zlib"))

    @settings(max_examples=repetitions(40, 300))
    @given(st.lists(st.binary(max_size=200), max_size=5))
    def test_any_bytes_are_understood_or_refused(self, pieces: list[bytes]) -> None:
        server = Spdy()
        try:
            for piece in pieces:
                server.receive(piece)
        except InvalidArgument:
            pass

    @settings(max_examples=repetitions(40, 300))
    @given(
        st.lists(
            st.tuples(st.integers(0, 12), st.integers(0, 255), st.binary(max_size=60)).map(
                lambda f: frame(f[0], f[2], f[1])
            ),
            max_size=8,
        )
    )
    def test_any_frames_are_understood_or_refused(self, frames: list[bytes]) -> None:
        server = Spdy()
        try:
            for each in frames:
                server.receive(each)
        except InvalidArgument:
            pass
