# SPDX-License-Identifier: Apache-2.0
"""HPACK with a memory, and the validation of headers."""

from __future__ import annotations

from typing import Any

from h2.events import RequestReceived, ResponseReceived, TrailersReceived
from h2.exceptions import ProtocolError
from hpack import Decoder, Encoder, HeaderTuple, HPACKError
from hpack.table import HeaderTable
from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import TestCase

from txgrpc.header_blocks import HeaderValidator, ReceivedHeaders, RememberingDecoder, RepeatingEncoder
from txgrpc.metadata import Headers, decode_metadata

REQUEST: Headers = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b":authority", b"localhost"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]
VALUES = (b"1", b"x", b"1S", b"00000001n", b"123456789S", b" 1S", b"1S ", b"1\0S", b"1\nS", b"\xff", b"")
PAIRS = st.tuples(
    st.sampled_from((b"grpc-timeout", b"te", b":path", b"Upper", b"connection", b"x", b"a:b", b"")),
    st.one_of(st.sampled_from(VALUES), st.binary(max_size=3)),
)


def valid(validator: HeaderValidator, headers: Headers) -> bool:
    try:
        validator.check(headers, RequestReceived)
    except ProtocolError:
        return False
    return True


class HeaderValidatorTests(TestCase):
    """It decides as h2 does, whatever it was asked before."""

    def test_what_is_malformed_is_refused_each_time(self) -> None:
        validator = HeaderValidator(client_side=False)
        validator.check(REQUEST, RequestReceived)
        for wrong in (
            [*REQUEST, (b"Upper", b"x")],
            [*REQUEST, (b"connection", b"close")],
            [*REQUEST, (b":path", b"/again")],
            REQUEST[1:],
        ):
            for _ in range(2):
                self.assertRaises(ProtocolError, validator.check, wrong, RequestReceived)

    def test_what_is_valid_in_a_request_need_not_be_in_trailers(self) -> None:
        validator = HeaderValidator(client_side=True)
        response: Headers = [(b":status", b"200"), (b"content-type", b"application/grpc")]
        validator.check(response, ResponseReceived)
        self.assertRaises(ProtocolError, validator.check, response, TrailersReceived)

    def test_a_list_that_comes_again_is_checked_again_for_another_place(self) -> None:
        validator = HeaderValidator(client_side=True)
        response = ReceivedHeaders([(b":status", b"200"), (b"content-type", b"application/grpc")])
        for _ in range(2):
            validator.check(response, ResponseReceived)
        self.assertRaises(ProtocolError, validator.check, response, TrailersReceived)

    @given(st.lists(st.lists(PAIRS, max_size=3), max_size=8))
    def test_it_decides_the_same_for_a_peer_that_it_remembers_and_for_a_new_one(
        self, requests: list[Headers]
    ) -> None:
        remembering = HeaderValidator(client_side=False)
        for more in requests:
            headers = [*REQUEST, *more]
            new = HeaderValidator(client_side=False)
            self.assertEqual(valid(remembering, headers), valid(new, headers))

    def test_how_much_it_remembers_of_a_peer_is_bounded(self) -> None:
        validator = HeaderValidator(client_side=False)
        for number in range(1000):
            validator.check([*REQUEST, (b"n", b"%d" % number)], RequestReceived)
            validator.check([*REQUEST, (b"n", b"%d" % number + b"x" * 2000)], RequestReceived)
        remembered = [key for key in validator._valid if isinstance(key, tuple)]
        self.assertLessEqual(len(remembered), 64)
        self.assertLess(max(len(repr(key)) for key in remembered), 2000)


ANY_FIELDS = st.lists(
    st.tuples(st.sampled_from([b"a", b"grpc-status", b":status"]), st.binary(max_size=40)), max_size=5
)
SAME_FIELDS = st.sampled_from(
    [[(b":status", b"200"), (b"content-type", b"application/grpc")], [(b"grpc-status", b"0")]]
)


STATUS = [(b"grpc-status", b"0")]


class LiteralTests(TestCase):
    """Names and values that a peer spells out, as Go's does with short ones: nothing else is in a list."""

    def test_they_are_bytes_also_by_an_hpack_that_leaves_views(self) -> None:
        """As 4.0 does, which Debian 12 and 13 have."""
        literal, add = Decoder._decode_literal, HeaderTable.add

        def of_views(decoder: Decoder, data: memoryview, should_index: bool) -> tuple[HeaderTuple, int]:
            field, consumed = literal(decoder, data, should_index)
            return type(field)(memoryview(field[0]), memoryview(field[1])), consumed

        def add_views(table: HeaderTable, name: Any, value: Any) -> None:  # Any: declared as bytes
            views: list[Any] = [memoryview(name), memoryview(value)]
            add(table, *views)

        self.patch(Decoder, "_decode_literal", of_views)
        self.patch(HeaderTable, "add", add_views)
        encoder, decoder = Encoder(), RememberingDecoder()
        for _ in range(3):  # of which the last two are by the table
            found = decoder.decode(encoder.encode(REQUEST, huffman=False), raw=True)
            self.assertEqual(
                [(type(name), type(value)) for name, value in found], [(bytes, bytes)] * len(REQUEST)
            )
            self.assertEqual([tuple(each) for each in found], REQUEST)
            self.assertEqual(decode_metadata(found), ())


class RepeatingEncoderTests(TestCase):
    """HPACK with a memory."""

    @settings(deadline=None)
    @example([STATUS, STATUS, STATUS, 0, STATUS])
    @given(st.lists(st.one_of(ANY_FIELDS, SAME_FIELDS, st.sampled_from([0, 50, 100, 4096])), max_size=40))
    def test_decodes_to_what_was_said(self, moves: list[list[tuple[bytes, bytes]] | int]) -> None:
        """Whatever lists are sent, with the table resized in between, the other side reads just them."""
        encoder, decoder = RepeatingEncoder(), Decoder()
        for move in moves:
            if isinstance(move, int):
                encoder.header_table_size = move
                decoder.max_allowed_table_size = 4096
            else:
                self.assertEqual([tuple(f) for f in decoder.decode(encoder.encode(move), raw=True)], move)

    def test_the_same_table_size_set_twice_is_announced(self) -> None:
        """A peer may send the same SETTINGS again before the next headers."""
        encoder, decoder = RepeatingEncoder(), Decoder()
        encoder.header_table_size = 0
        decoder.decode(encoder.encode([]))
        encoder.header_table_size = 50
        encoder.header_table_size = 50
        twice = [(b"a", b""), (b"a", b"")]
        self.assertEqual([tuple(f) for f in decoder.decode(encoder.encode(twice), raw=True)], twice)

    def test_remembers(self) -> None:
        """A list that was sent twice is not encoded again, until the table changes."""
        encoder = RepeatingEncoder()
        for _ in range(3):
            encoder.encode([(b"x", b"y")])
        self.assertEqual(len(encoder._blocks), 1)
        encoder.encode([(b"x", b"z")])
        self.assertEqual(encoder._blocks, {})

    def test_a_timeout_leaves_the_table_as_it_is(self) -> None:
        """Each call's is another one. In the table it would push out what is always the same."""
        encoder, decoder = RepeatingEncoder(), Decoder()
        encoder.encode(REQUEST)
        encoder.encode(REQUEST)
        entries = list(encoder.header_table.dynamic_entries)
        decoder.decode(Encoder().encode(REQUEST))
        for value in (b"1S", b"99999999n"):
            block = encoder.encode([*REQUEST, (b"grpc-timeout", value)])
            self.assertEqual(block[: len(REQUEST)], encoder.encode(REQUEST))
            found = [tuple(field) for field in decoder.decode(block, raw=True)]
            self.assertEqual(found, [*REQUEST, (b"grpc-timeout", value)])
        self.assertEqual(list(encoder.header_table.dynamic_entries), entries)


MANY_FIELDS = st.lists(
    st.tuples(st.sampled_from([b"a", b"grpc-timeout", b":status", b":method"]), st.sampled_from(VALUES)),
    max_size=5,
)
BYTES = st.one_of(st.binary(max_size=6), st.lists(st.sampled_from([0x82, 0xBE, 0xBF, 0xC0])).map(bytes))


class RememberingDecoderTests(TestCase):
    """HPACK with a memory, the other way."""

    @settings(deadline=None, max_examples=300)
    @given(st.lists(st.one_of(MANY_FIELDS, BYTES, st.sampled_from([0, 100, 4096])), max_size=30))
    def test_a_block_stands_for_what_hpack_says(self, moves: list[Headers | bytes | int]) -> None:
        """Whatever was decoded before: valid blocks, resized tables, and bytes that are no block."""
        encoder, ours, theirs = Encoder(), RememberingDecoder(), Decoder()
        for move in moves:
            if isinstance(move, int):
                encoder.header_table_size = move
                continue
            block = move if isinstance(move, bytes) else encoder.encode(move)
            try:
                expected = [tuple(field) for field in theirs.decode(block, raw=True)]
            except (HPACKError, IndexError):
                self.assertRaises((HPACKError, IndexError), ours.decode, block, raw=True)
                return
            self.assertEqual([tuple(field) for field in ours.decode(block, raw=True)], expected)

    def test_a_block_that_came_before_is_not_decoded_again(self) -> None:
        encoder, decoder = RepeatingEncoder(), RememberingDecoder()
        blocks = [encoder.encode(REQUEST) for _ in range(3)]
        first, second, third = [decoder.decode(block, raw=True) for block in blocks]
        self.assertEqual(first, second)
        self.assertIs(second, third)

    def test_the_same_bytes_mean_something_else_once_the_table_has_changed(self) -> None:
        encoder, decoder = Encoder(), RememberingDecoder()
        for value in (b"1", b"2", b"3"):
            decoder.decode(encoder.encode([(b"a", value)]), raw=True)
            self.assertEqual([tuple(field) for field in decoder.decode(b"\xbe", raw=True)], [(b"a", value)])
        decoder.decode(b"\x20", raw=True)  # a table of no size
        self.assertRaises(HPACKError, decoder.decode, b"\xbe", raw=True)

    def test_an_older_entry_is_gone_once_the_table_has_shrunk(self) -> None:
        encoder, decoder = Encoder(), RememberingDecoder()
        decoder.decode(encoder.encode([(b"a", b"1"), (b"a", b"2")]), raw=True)
        self.assertEqual([tuple(field) for field in decoder.decode(b"\xbf", raw=True)], [(b"a", b"1")])
        decoder.decode(b"\x3f\x09", raw=True)  # 40 bytes: one entry
        self.assertRaises(HPACKError, decoder.decode, b"\xbf", raw=True)

    def test_a_size_comes_first_or_not_at_all(self) -> None:
        self.assertRaises(HPACKError, RememberingDecoder().decode, b"\x82\x20", raw=True)

    def test_a_list_that_is_too_large_is_refused_however_it_is_written(self) -> None:
        encoder, decoder = Encoder(), RememberingDecoder()
        decoder.max_header_list_size = 2000
        decoder.decode(encoder.encode([(b"a", b"x" * 900)]), raw=True)
        self.assertEqual(len(decoder.decode(b"\xbe\xbe", raw=True)), 2)
        self.assertRaises(HPACKError, decoder.decode, b"\xbe\xbe\xbe", raw=True)
        self.assertRaises(HPACKError, decoder.decode, b"\xbe\xbe\x00\x01a\x01b" + b"\xbe", raw=True)

    def test_how_much_it_remembers_of_a_peer_is_bounded(self) -> None:
        decoder = RememberingDecoder()
        for number in range(1000):
            value = b"%d" % number
            decoder.decode(b"\0\1n%c%b" % (len(value), value), raw=True)
            decoder.decode(b"\0\1n\x7f\xf1\x0e%b" % (b"x" * 2032), raw=True)
        self.assertLessEqual(len(decoder._lists), 64)
        self.assertLess(max(map(len, decoder._lists)), 1025)
