# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' channels over WebSocket without I/O: what is transmitted, and the effects of garbage."""

from __future__ import annotations

import base64
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage

from infranetes.streaming.channels import Flow
from infranetes.streaming.websocketwire import MAX_TEXT, WebSocketWire
from infranetes_common.errors import InvalidArgument
from tests.harness.needs import repetitions
from tests.infranetes.streaming.client import take

NAMES = ("stdin", "stdout", "stderr", "error", "resize")


class Ends:
    """The server's wire, and a client by wsproto."""

    def __init__(self, *, base64_form: bool = False, close_signal: bool = False) -> None:
        self.transport = cast(Any, StringTransport())
        self.closed = 0
        self.wire = WebSocketWire(
            Flow(self.transport),
            self.transport.write,
            NAMES,
            base64_form=base64_form,
            close_signal=close_signal,
            closed=self._closed,
        )
        self.client = Connection(ConnectionType.CLIENT)

    def _closed(self) -> None:
        self.closed += 1

    def say(self, *events: Event) -> None:
        for event in events:
            take(self.wire, self.client.send(event))

    def heard(self) -> list[Event]:
        """Return how the client understands our answers."""
        data = self.transport.value()
        self.transport.clear()
        self.client.receive_data(data)
        return list(self.client.events())

    def unread(self, channel: int) -> bytes:
        return b"".join(self.wire.channels[channel]._unread)


class WebSocketWireTests(SynchronousTestCase):
    @settings(max_examples=repetitions(25, 100))
    @given(st.lists(st.tuples(st.integers(0, 4), st.binary(max_size=100)), max_size=10), st.booleans())
    def test_messages_come_in_as_they_were_sent(self, said: list[tuple[int, bytes]], form: bool) -> None:
        ends = Ends(base64_form=form)
        for channel, data in said:
            if form:
                ends.say(TextMessage(data=f"{channel}{base64.b64encode(data).decode()}"))
            else:
                ends.say(BytesMessage(data=bytes([channel]) + data))
        for channel in range(len(NAMES)):
            self.assertEqual(ends.unread(channel), b"".join(data for to, data in said if to == channel))

    @settings(max_examples=repetitions(20, 50))
    @given(st.binary(min_size=1, max_size=200), st.integers(1, 50))
    def test_a_binary_message_may_come_in_any_pieces(self, data: bytes, size: int) -> None:
        ends = Ends()
        whole = ends.client.send(BytesMessage(data=b"\0" + data))
        for at in range(0, len(whole), size):
            take(ends.wire, whole[at : at + size])
        self.assertEqual(ends.unread(0), data)

    @settings(max_examples=repetitions(40, 300))
    @given(st.lists(st.binary(max_size=200), max_size=5), st.booleans())
    def test_any_bytes_are_understood_or_refused(self, pieces: list[bytes], form: bool) -> None:
        ends = Ends(base64_form=form, close_signal=not form)
        try:
            for piece in pieces:
                take(ends.wire, piece)
        except InvalidArgument:
            pass

    @settings(max_examples=repetitions(25, 100))
    @given(st.lists(st.one_of(st.binary(max_size=20), st.text(max_size=20)), max_size=8))
    def test_any_messages_are_understood_or_refused(self, messages: list[Any]) -> None:
        for form in (False, True):
            ends = Ends(base64_form=form, close_signal=not form)
            try:
                for one in messages:
                    ends.say(TextMessage(data=one) if isinstance(one, str) else BytesMessage(data=one))
            except InvalidArgument:
                pass

    def test_what_is_refused_is_named(self) -> None:
        for said, form, words in (
            (BytesMessage(data=b"\x09hello"), False, "channel 9"),
            (TextMessage(data="7aGVsbG8="), True, "channel 7"),
            (TextMessage(data="0not base64"), True, "base64"),
            (TextMessage(data="0" + "A" * (MAX_TEXT + 4)), True, str(MAX_TEXT)),
        ):
            with self.assertRaises(InvalidArgument) as caught:
                Ends(base64_form=form).say(said)
            self.assertIn(words, str(caught.exception))

    def test_the_end_of_a_channel_is_a_word_of_v5_alone(self) -> None:
        ends = Ends(close_signal=True)
        ends.say(BytesMessage(data=b"\0last"), BytesMessage(data=b"\xff\0"))
        self.assertEqual(ends.unread(0), b"last")
        self.assertTrue(ends.wire.channels[0]._ended)
        with self.assertRaises(InvalidArgument):
            Ends().say(BytesMessage(data=b"\xff\0"))

    def test_pings_and_closes_are_answered(self) -> None:
        ends = Ends()
        ends.say(Ping(payload=b"there?"), CloseConnection(code=1000))
        pong, close = ends.heard()
        assert isinstance(pong, Pong)
        self.assertEqual(pong.payload, b"there?")
        self.assertIsInstance(close, CloseConnection)
        self.assertEqual(ends.closed, 1)
