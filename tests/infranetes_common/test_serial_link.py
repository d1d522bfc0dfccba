# SPDX-License-Identifier: Apache-2.0
"""Sessions on a stream of bytes that knows none: records, and whatever else may come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common import serial_link
from infranetes_common.serial_link import (
    FILLER,
    MAGIC,
    MAX_PAYLOAD,
    OVERHEAD,
    RESET,
    Broken,
    Data,
    Decoder,
    Event,
    Opened,
    Reset,
    new_session,
    opening,
    records,
)

ONE, OTHER = b"\x01one----", b"\x01other--"
FORGED = opening(OTHER) + b"".join(records(OTHER, b"by nobody"))
PAYLOADS = st.binary(max_size=40) | st.sampled_from([FORGED, RESET, MAGIC[:15], bytes(1000)])


def carried(session: bytes, data: bytes) -> bytes:
    """Return what goes over the port for `data`."""
    return b"".join(records(session, data))


def payload(events: Sequence[Event]) -> bytes:
    """Return the bytes in these events, which have to be data alone."""
    assert all(isinstance(each, Data) for each in events), events
    return b"".join(each.payload for each in events if isinstance(each, Data))


def cut(decoder: Decoder, stream: bytes, data: Any) -> list[Event]:
    """Feed the decoder in pieces, as Hypothesis cuts them."""
    found: list[Event] = []
    while stream:
        size = data.draw(st.integers(1, len(stream)) | st.integers(1, min(9, len(stream))))
        found += decoder.events(stream[:size])
        stream = stream[size:]
    return found


class RecordTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(serial_link, "MAX_PAYLOAD", 300)  # so that there are several records

    def test_large_payloads_are_cut(self) -> None:
        sent = bytes(1000)
        self.assertEqual(len(records(ONE, sent)), 3 * 4)
        self.assertEqual(payload(Decoder().events(opening(ONE) + carried(ONE, sent))[1:]), sent)

    @given(st.lists(PAYLOADS, max_size=4), st.data())
    def test_bytes_come_out_as_they_went_in_however_they_are_cut(self, sent: list[bytes], data: Any) -> None:
        stream = opening(ONE) + b"".join(carried(ONE, each) for each in sent) + RESET
        first, *middle, last = cut(Decoder(), stream, data)
        self.assertEqual((first, last), (Opened(ONE), Reset()))
        self.assertEqual(payload(middle), b"".join(sent))

    def test_no_payload_has_the_magic_in_it(self) -> None:
        for sent in (FORGED, MAGIC * 3, bytes(300 - 4) + FORGED):
            self.assertNotIn(MAGIC, carried(ONE, sent))
            self.assertEqual(payload(Decoder().events(opening(ONE) + carried(ONE, sent))[1:]), sent)

    def test_an_open_that_is_said_twice_ends_nothing(self) -> None:
        stream = opening(ONE) + FILLER + opening(ONE) + carried(ONE, b"x")
        self.assertEqual(Decoder().events(stream), [Opened(ONE), Opened(ONE), Data(b"x")])

    def test_sessions_are_never_the_same(self) -> None:
        self.assertEqual(len({new_session() for _ in range(100)}), 100)

    def test_a_session_begins_neither_as_filler_nor_as_the_magic(self) -> None:
        self.assertNotIn(new_session()[0], (0, MAGIC[0]))
        self.assertEqual(Decoder().events(opening(bytes(7) + b"x") + opening(MAGIC[:8])), [])


class ResynchronisationTests(SynchronousTestCase):
    @given(PAYLOADS, st.data())
    @example(sent=FORGED, data=None)
    def test_what_is_cut_anywhere_never_passes_for_an_open(self, sent: bytes, data: Any) -> None:
        """The sender is killed in the midst of a record; the next one opens a session with filler."""
        stream = opening(ONE) + carried(ONE, sent or b"x")
        sizes = range(len(stream)) if data is None else [data.draw(st.integers(0, len(stream)))]
        for size in sizes:
            decoder = Decoder()
            events = decoder.events(stream[:size])
            again = decoder.events(opening(OTHER) + FILLER + opening(OTHER) + carried(OTHER, b"new"))
            self.assertEqual(
                [each for each in events if isinstance(each, Opened)], [Opened(ONE)][: len(events)]
            )
            self.assertTrue({type(each) for each in again[:-2]} <= {Broken, Opened}, again)
            self.assertEqual(again[-2:], [Opened(OTHER), Data(b"new")])
            self.assertTrue((sent or b"x").startswith(payload(events[1:])))

    def test_a_receiver_that_has_just_started_opens_nothing_that_a_payload_says(self) -> None:
        """It hears the middle of what somebody sends to its predecessor."""
        stream = opening(ONE) + carried(ONE, b"abc" + FORGED) + carried(ONE, FORGED)
        for size in range(1, len(stream)):
            self.assertEqual(Decoder().events(stream[size:]), [])

    @given(st.binary(max_size=100).filter(lambda noise: MAGIC not in noise), st.data())
    def test_noise_before_an_open_is_skipped(self, noise: bytes, data: Any) -> None:
        self.assertEqual(cut(Decoder(), noise + opening(ONE), data), [Opened(ONE)])

    def test_what_is_no_record_ends_the_session_and_is_told_once(self) -> None:
        long = ONE + (MAX_PAYLOAD + 1).to_bytes(4, "big")
        wrong_end = carried(ONE, b"x")[:-1] + b"?"
        for wrong in (b"x" * 50, long, ONE + bytes(4), wrong_end, MAGIC + ONE + ONE, carried(OTHER, b"x")):
            decoder = Decoder()
            self.assertEqual(decoder.events(opening(ONE) + wrong), [Opened(ONE), Broken()])
            self.assertEqual(decoder.events(carried(ONE, b"late") + RESET), [])
            self.assertEqual(decoder.events(opening(OTHER)), [Opened(OTHER)])

    @given(
        st.lists(st.binary(max_size=3000) | st.sampled_from([MAGIC, opening(ONE), ONE, FILLER]), max_size=30)
    )
    def test_whatever_comes_it_raises_nothing_and_keeps_no_more_than_a_record(
        self, noise: list[bytes]
    ) -> None:
        decoder = Decoder()
        for each in noise:
            decoder.events(each)
            self.assertLessEqual(len(decoder._buffer), MAX_PAYLOAD + OVERHEAD)

    def test_filler_is_long_enough_for_every_record(self) -> None:
        decoder = Decoder()
        decoder.events(opening(ONE) + ONE + MAX_PAYLOAD.to_bytes(4, "big"))
        self.assertEqual(decoder.events(serial_link.FILLER + opening(OTHER)), [Broken(), Opened(OTHER)])

    def test_after_a_reset_nothing_is_of_the_session_that_it_ended(self) -> None:
        decoder = Decoder()
        self.assertEqual(decoder.events(opening(ONE) + RESET + RESET), [Opened(ONE), Reset()])
        self.assertEqual(decoder.events(carried(ONE, b"late")), [])
