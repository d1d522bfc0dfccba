# SPDX-License-Identifier: Apache-2.0
"""The parts without I/O: framing, metadata, timeouts, states, inbox, budgets."""

from __future__ import annotations

import struct
from collections import deque

from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.trial import unittest

from txgrpc import Code, Limits
from txgrpc.framing import PREFIX_SIZE, FramingError, MessageReader, frame
from txgrpc.http2 import FrameGuard, OversizedFrame
from txgrpc.inbox import Inbox
from txgrpc.limits import Allowance, Budget
from txgrpc.metadata import (
    MAX_MESSAGE_BYTES,
    decode_binary,
    decode_message,
    decode_metadata,
    encode_message,
    encode_metadata,
)
from txgrpc.states import State, Step, WrongStep, advance
from txgrpc.status import code_for_http_status, code_for_reset
from txgrpc.timeout import decode_timeout, encode_timeout


class FramingTests(unittest.SynchronousTestCase):
    """Messages in a stream of bytes."""

    @given(st.lists(st.binary(max_size=50), max_size=20), st.lists(st.integers(1, 30), max_size=40))
    def test_any_cut(self, payloads: list[bytes], cuts: list[int]) -> None:
        """However the bytes are cut, the same messages come out, each as soon as it is complete."""
        data = b"".join(frame(payload) for payload in payloads)
        reader, found = MessageReader(50), []
        for cut in cuts:
            found += reader.feed(data[:cut])
            data = data[cut:]
        found += reader.feed(data)
        self.assertEqual(found, payloads)
        self.assertEqual(reader.partial, 0)

    def test_limit_is_the_prefix_s(self) -> None:
        """A message over the limit is refused by its first five bytes."""
        reader = MessageReader(10)
        self.assertEqual(reader.feed(frame(b"x" * 10)), [b"x" * 10])
        self.assertEqual(reader.feed(b"\0\0\0\0"), [])
        with self.assertRaises(FramingError) as caught:
            reader.feed(b"\x0b")
        self.assertEqual(caught.exception.code, Code.RESOURCE_EXHAUSTED)
        self.assertIn("11 bytes", caught.exception.message)

    def test_no_prefix(self) -> None:
        """A compressed message without an encoding, and a prefix that is none, are INTERNAL."""
        for flag in (1, 2, 255):
            with self.assertRaises(FramingError) as caught:
                MessageReader(10).feed(bytes([flag]) + struct.pack(">I", 1) + b"x")
            self.assertEqual(caught.exception.code, Code.INTERNAL)


class FrameGuardTests(unittest.SynchronousTestCase):
    """HTTP/2's frames, before h2 has them."""

    @given(
        st.lists(st.integers(0, 40), max_size=20), st.lists(st.integers(1, 30), max_size=40), st.booleans()
    )
    def test_any_cut(self, sizes: list[int], cuts: list[int], client_side: bool) -> None:
        """However the bytes are cut, the one oversized frame is noticed with its header, and none before."""
        data = b"" if client_side else b"p" * 24
        data += b"".join(size.to_bytes(3, "big") + b"\xff" * 6 + b"\xff" * size for size in sizes)
        guard = FrameGuard(client_side, 16384)
        for cut in [*cuts, len(data)]:
            at = 0
            while at < len(data[:cut]):
                at = guard.check(data[:cut], at)
            data = data[cut:]
        guard.check((16384).to_bytes(3, "big") + bytes(6) + bytes(16384))
        guard.check((16385).to_bytes(3, "big") + bytes(5))
        self.assertRaises(OversizedFrame, guard.check, b"\0")

    def test_few_at_once(self) -> None:
        """What arrived is cut between frames, so that a turn of the reactor can end there."""
        small = b"\0\0\1" + b"\xff" * 6 + b"x"
        guard = FrameGuard(client_side=True, largest=16384)
        data = small * 20 + small[:5]
        ends = [0]
        while ends[-1] < len(data):
            ends.append(guard.check(data, ends[-1]))
        self.assertEqual(ends, [0, 80, 160, 200, 205])
        self.assertEqual(guard.check(small[5:] + small * 9), 5 + 7 * 10)


class MetadataTests(unittest.SynchronousTestCase):
    """Metadata and status messages in header fields."""

    @given(
        st.lists(
            st.one_of(
                st.tuples(st.just("x-text"), st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E))),
                st.tuples(st.just("x-raw-bin"), st.binary()),
            )
        )
    )
    def test_round_trip(self, pairs: list[tuple[str, str | bytes]]) -> None:
        """What is encoded decodes to itself."""
        self.assertEqual(decode_metadata(encode_metadata(pairs)), tuple(pairs))

    def test_tolerates_padding_and_joined_values(self) -> None:
        """Base64 with or without padding; values of one name joined by commas."""
        found = decode_metadata([(b"a-bin", b"AAE=,AAE"), (b"a-bin", b"AAE")])
        self.assertEqual(found, (("a-bin", b"\0\1"),) * 3)
        self.assertRaises(ValueError, decode_binary, b"?")
        self.assertRaises(ValueError, decode_binary, b"AAAAA")

    def test_protocol_fields_are_not_metadata(self) -> None:
        """HTTP/2's and gRPC's own fields are left out."""
        headers = [(b":path", b"/"), (b"grpc-timeout", b"1S"), (b"te", b"trailers"), (b"content-type", b"x")]
        self.assertEqual(decode_metadata([*headers, (b"user-agent", b"me")]), (("user-agent", "me"),))

    def test_refuses(self) -> None:
        """Names and values that would break the protocol are refused before they are sent."""
        error = self.assertRaises(ValueError, decode_metadata, [(b"a-bin", b"?")])
        self.assertEqual(str(error), "a binary metadata value is not base64")
        for name, value in (
            ("Upper", "x"),
            ("grpc-status", "0"),
            (":path", "/"),
            ("content-type", "x"),
            ("", "x"),
            ("a b", "x"),
            ("a", "line\nbreak"),
            ("a", "grün"),
        ):
            self.assertRaises(ValueError, encode_metadata, [(name, value)])
        self.assertRaises(TypeError, encode_metadata, [("a", b"x")])
        self.assertRaises(TypeError, encode_metadata, [("a-bin", "x")])

    def test_spaces_at_the_ends_of_a_value_are_left_out(self) -> None:
        """HTTP/2 forbids them, and a peer that checks it hangs up."""
        self.assertEqual(encode_metadata([("a", "  b c ")]), [(b"a", b"b c")])

    @example("\udc80")
    @given(st.text())
    def test_message_round_trip(self, text: str) -> None:
        """Any text survives as a grpc-message, in printable ASCII."""
        encoded = encode_message(text)
        self.assertEqual(encoded, encoded.strip())  # as HTTP/2 has it
        self.assertTrue(all(0x20 <= byte < 0x7F for byte in encoded))
        if len(encoded) < MAX_MESSAGE_BYTES - 3:
            self.assertEqual(decode_message(encoded), text.encode("utf-8", "replace").decode())

    @given(st.integers(0, 12))
    def test_long_message_is_cut(self, shift: int) -> None:
        """A long text is cut at a character, and what needs no escape has none."""
        self.assertNotIn(b"%", encode_message("a b, c: d/e; " * 4000))
        encoded = encode_message("x" * shift + "ü" * 4000)
        self.assertLessEqual(len(encoded), MAX_MESSAGE_BYTES)
        self.assertEqual(decode_message(encoded).strip("x").strip("ü"), "...")

    def test_message_of_the_longest_size_is_whole(self) -> None:
        """Only what is longer is cut."""
        longest = "x" * MAX_MESSAGE_BYTES
        self.assertEqual(encode_message(longest), longest.encode())
        self.assertEqual(encode_message("  why: "), b"%20%20why:%20")
        self.assertEqual(decode_message(encode_message("   ")), "   ")
        self.assertTrue(encode_message(longest + "x").endswith(b"..."))

    def test_of_a_message_as_long_as_the_headers_may_be_the_end_is_dropped(self) -> None:
        for sent in (b"x" * 65536, b"%3A" * 20000):
            text = decode_message(sent)
            self.assertLessEqual(len(text), 2 * MAX_MESSAGE_BYTES + 3)
            self.assertTrue(text.endswith("..."), text[-10:])

    @given(st.binary())
    def test_any_message_decodes(self, data: bytes) -> None:
        """What peers send as grpc-message never fails to decode."""
        decode_message(data)


class TimeoutTests(unittest.SynchronousTestCase):
    """grpc-timeout."""

    @given(st.floats(1e-9, 1e9))
    def test_round_trip(self, seconds: float) -> None:
        """The header gives the time again, never less, and nearly no more."""
        value = encode_timeout(seconds)
        self.assertLessEqual(len(value), 9)
        self.assertTrue(seconds * 0.999999 <= decode_timeout(value) <= seconds * 1.01 + 1e-9, value)

    def test_ends_of_the_range(self) -> None:
        """Nothing left is still a positive time; for ever is 11 thousand years."""
        self.assertEqual(encode_timeout(-1), b"1n")
        self.assertEqual(encode_timeout(1e30), b"99999999H")
        self.assertEqual(
            [encode_timeout(each) for each in (99_999_999, 100_000_000)], [b"99999999S", b"1666667M"]
        )

    def test_refuses(self) -> None:
        """Other forms are refused."""
        for value in (b"", b"1", b"S", b"-1S", b"1s", b"123456789S", b"1.5S", b" 1S", b"\xd9\xa1S"):
            self.assertRaises(ValueError, decode_timeout, value)


class StateTests(unittest.SynchronousTestCase):
    """The table of a half's states."""

    def test_table(self) -> None:
        """Exactly the transitions of the module's table are possible."""
        allowed = {
            (State.IDLE, Step.HEADERS): State.OPEN,
            (State.IDLE, Step.END): State.ENDED,
            (State.IDLE, Step.RESET): State.RESET,
            (State.OPEN, Step.MESSAGE): State.OPEN,
            (State.OPEN, Step.END): State.ENDED,
            (State.OPEN, Step.RESET): State.RESET,
            (State.ENDED, Step.RESET): State.ENDED,
            (State.RESET, Step.RESET): State.RESET,
        }
        for state in State:
            for step in Step:
                if (state, step) in allowed:
                    self.assertIs(advance(state, step), allowed[state, step])
                else:
                    self.assertRaises(WrongStep, advance, state, step)


class StatusTests(unittest.SynchronousTestCase):
    """Codes of what is not a gRPC status."""

    def test_http(self) -> None:
        """HTTP statuses, as gRPC maps them."""
        self.assertEqual(code_for_http_status(404), Code.UNIMPLEMENTED)
        self.assertEqual(code_for_http_status(503), Code.UNAVAILABLE)
        self.assertEqual(code_for_http_status(418), Code.UNKNOWN)

    def test_reset(self) -> None:
        """RST_STREAM's error codes, as gRPC maps them."""
        found = [code_for_reset(code) for code in (0, 7, 8, 11, 12, 99)]
        self.assertEqual(
            found,
            [
                Code.INTERNAL,
                Code.UNAVAILABLE,
                Code.CANCELLED,
                Code.RESOURCE_EXHAUSTED,
                Code.PERMISSION_DENIED,
                Code.INTERNAL,
            ],
        )


WINDOW = 100


class InboxTests(unittest.SynchronousTestCase):
    """Credit for the sender, and what is held."""

    @settings(deadline=None)
    @given(
        st.lists(st.integers(0, 300), max_size=30),
        st.lists(st.tuples(st.booleans(), st.integers(1, 150)), max_size=200),
        st.tuples(st.integers(0, 200), st.integers(1, 500)),
    )
    def test_bounded_and_never_stuck(
        self, sizes: list[int], moves: list[tuple[bool, int]], widened: tuple[int, int]
    ) -> None:
        """Whoever sends and takes when: what is held stays bounded, and all messages arrive in order.

        Also when the window is widened in the middle.
        """
        inbox = Inbox(300, WINDOW, Budget(300))
        most = WINDOW
        data = b"".join(frame(bytes([n]) * size) for n, size in enumerate(sizes))
        window, taken = WINDOW, []

        def send(size: int) -> bool:
            nonlocal data, window
            part = data[: min(size, window)]
            if not part:
                return False
            inbox.receive(part, len(part))
            data = data[len(part) :]
            window += inbox.credit(self.fail) - len(part)
            return True

        def take() -> bool:
            nonlocal window
            message = inbox.take()
            if message is None:
                inbox.awaited = True
            else:
                inbox.awaited = False
                taken.append(message)
            window += inbox.credit(self.fail)
            return message is not None

        for number, (sending, size) in enumerate(moves):
            if number == widened[0]:
                window += inbox.widen(widened[1])
                most = max(WINDOW, widened[1])
            if sending:
                send(size)
            else:
                take()
            self.assertLessEqual(window, most)
            held = inbox._queued + inbox._reader.partial
            self.assertLessEqual(held, most + 305)
        while take() or send(50):
            pass
        self.assertEqual(taken, [bytes([n]) * size for n, size in enumerate(sizes)])

    def test_reader_away(self) -> None:
        """While nobody takes anything, the sender gets no more than its window."""
        inbox = Inbox(1000, WINDOW, Budget(1000))
        for _ in range(WINDOW // 10):
            inbox.receive(frame(b"12345"), 10)
            self.assertEqual(inbox.credit(self.fail), 0)

    def test_large_message_needs_a_reader(self) -> None:
        """A message over the window is credited as it comes once it is wanted, not before."""
        inbox = Inbox(1000, WINDOW, Budget(1000))
        inbox.receive(frame(b"x" * 500)[:WINDOW], WINDOW)
        self.assertEqual(inbox.credit(self.fail), 0)
        inbox.awaited = True
        self.assertEqual(inbox.credit(self.fail), WINDOW)

    def test_budget_is_shared(self) -> None:
        """A second large message waits for the first to be taken, and is told to go on then."""
        budget, resumed = Budget(600), deque[str]()
        first, second = Inbox(1000, WINDOW, budget), Inbox(1000, WINDOW, budget)
        data = frame(b"x" * 500)
        for inbox in (first, second):
            inbox.awaited = True
            inbox.receive(data[:WINDOW], WINDOW)
        self.assertEqual(first.credit(self.fail), WINDOW)
        self.assertEqual(second.credit(lambda: resumed.append("second")), 0)
        first.receive(data[WINDOW:], len(data) - WINDOW)
        self.assertEqual(list(resumed), [])
        first.take()
        self.assertEqual(list(resumed), ["second"])
        self.assertEqual(second.credit(self.fail), WINDOW)
        second.discard()
        self.assertTrue(budget.reserve(600, lambda: None))

    def test_discard_leaves_the_line(self) -> None:
        """A call that ends while it waits for the budget takes nothing from it."""
        budget = Budget(10)
        budget.reserve(10, lambda: None)
        inbox = Inbox(1000, WINDOW, budget)
        inbox.awaited = True
        inbox.receive(frame(b"x" * 500)[:WINDOW], WINDOW)
        inbox.credit(self.fail)
        inbox.discard()
        budget.release(10)
        self.assertTrue(budget.reserve(10, lambda: None))

    def test_what_is_dropped_unread_is_credited(self) -> None:
        inbox = Inbox(1000, WINDOW, Budget(1000))
        inbox.receive(frame(b"x" * (WINDOW - PREFIX_SIZE)), WINDOW)
        self.assertEqual(inbox.credit(self.fail), 0)
        inbox.discard()
        self.assertEqual((inbox.credit(self.fail), inbox.take()), (WINDOW, None))

    def test_what_was_taken_is_credited_once_it_is_half_a_window(self) -> None:
        for taken, credit in ((WINDOW // 2 - 1, 0), (WINDOW // 2, WINDOW // 2)):
            inbox = Inbox(1000, WINDOW, Budget(1000))
            inbox.receive(frame(b"x" * (taken - PREFIX_SIZE)), taken)
            inbox.take()
            self.assertEqual(inbox.credit(self.fail), credit)

    def test_a_wider_window_is_given_once_and_credited_by_its_halves(self) -> None:
        inbox = Inbox(1000, WINDOW, Budget(1000))
        self.assertEqual([inbox.widen(each * WINDOW) for each in (3, 3, 2, 4)], [2 * WINDOW, 0, 0, WINDOW])
        for taken, credit in ((2 * WINDOW - 1, 0), (1, 2 * WINDOW)):
            inbox.receive(frame(b"x" * (taken - PREFIX_SIZE)) if taken > 1 else b"", taken)
            inbox.take()
            self.assertEqual(inbox.credit(self.fail), credit)


class LimitTests(unittest.SynchronousTestCase):
    """Meters."""

    def test_allowance(self) -> None:
        """A burst, then a rate; honest work earns more."""
        allowance = Allowance(3, 1, 0)
        self.assertEqual([allowance.spend(0) for _ in range(4)], [True, True, True, False])
        self.assertFalse(allowance.spend(0.5))
        self.assertTrue(allowance.spend(4))
        allowance.earn(100)
        self.assertEqual([allowance.spend(4) for _ in range(4)], [True, True, True, False])

    def test_oversized_reservation(self) -> None:
        """More than the whole budget is given when nothing else is reserved."""
        budget, granted = Budget(10), []
        self.assertTrue(budget.reserve(5, lambda: granted.append(5)))
        self.assertFalse(budget.reserve(50, lambda: granted.append(50)))
        self.assertFalse(budget.reserve(1, lambda: granted.append(1)))
        budget.release(5)
        self.assertEqual(granted, [5, 50])
        budget.release(50)
        self.assertEqual(granted, [5, 50, 1])

    def test_limits_are_checked(self) -> None:
        """Limits that HTTP/2 can't keep are refused."""
        self.assertRaises(ValueError, Limits, stream_window=1000)
        self.assertRaises(ValueError, Limits, max_concurrent_streams=0)
