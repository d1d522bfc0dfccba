# SPDX-License-Identifier: Apache-2.0
"""The guest agent's protocol: what is sent, and what is made of any bytes that come."""

from __future__ import annotations

import base64
import json
import os

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.agentless.guest_agent.protocol import (
    MAX_DROPPED,
    MAX_TEXT,
    Answer,
    Conversation,
    Nonsense,
    Refusal,
    Request,
)
from tests.support.peak import peak

MIB = 1 << 20
STATUS = Request("guest-exec-status", {"pid": 7}, most=48 * MIB, keep=16 * MIB)

# As qemu-ga 7.2 answers.
PING = b'{"return": {}}\n'
MISSING = b'{"error": {"class": "CommandNotFound", "desc": "The command guest-bogus has not been found"}}\n'
STRAY = b'{"error": {"class": "GenericError", "desc": "JSON parse error, stray \'\\uFFFD\'"}}\n'
NO_PROGRAM = (
    b'{"error": {"class": "GenericError", "desc": "Guest agent command failed, error was '
    b"'Failed to execute child process \\u201Cnope\\u201D (No such file or directory)'\"}}\n"
)


def conversation(*numbers: int) -> Conversation:
    left = list(numbers or (42,))
    return Conversation(lambda: left.pop(0))


def ready() -> Conversation:
    found = conversation()
    found.synchronise()
    found.receive(b'\xff{"return": 42}\n')
    return found


def asked(request: Request = STATUS) -> Conversation:
    found = ready()
    found.ask(request)
    return found


def answer_to(data: bytes, request: Request = STATUS, piece: int = 65536) -> Answer:
    talk = asked(request)
    for at in range(0, len(data), piece):
        found = talk.receive(data[at : at + piece])
        if found is not None:
            return found
    raise AssertionError("no answer")


class RequestTests(SynchronousTestCase):
    def test_a_request_is_a_line_of_json(self) -> None:
        line = Request("guest-exec", {"path": "ünï\n", "arg": ["a"]}, b"in\0put").encoded()
        self.assertEqual((line.count(b"\n"), line[-1:]), (1, b"\n"))
        self.assertEqual(
            json.loads(line),
            {
                "execute": "guest-exec",
                "arguments": {
                    "path": "ünï\n",
                    "arg": ["a"],
                    "input-data": base64.b64encode(b"in\0put").decode(),
                },
            },
        )

    def test_data_alone_and_no_arguments_are_json_too(self) -> None:
        self.assertEqual(json.loads(Request("x").encoded()), {"execute": "x", "arguments": {}})
        self.assertEqual(json.loads(Request("x", data=b"a").encoded())["arguments"], {"input-data": "YQ=="})


class SynchronisationTests(SynchronousTestCase):
    """Nothing of an earlier conversation is taken for an answer."""

    def test_the_delimiter_goes_first_and_the_number_behind_it_comes_back(self) -> None:
        talk = conversation()
        sent = talk.synchronise()
        self.assertEqual(sent[:1], b"\xff")
        self.assertEqual(json.loads(sent[1:]), {"execute": "guest-sync-delimited", "arguments": {"id": 42}})
        self.assertFalse(talk.ready)
        self.assertEqual(talk.receive(STRAY + b'\xff{"return": 42}\n'), Answer())
        self.assertTrue(talk.ready)

    def test_what_an_earlier_conversation_has_left_is_dropped(self) -> None:
        for stale in (
            PING,
            b'{"return": 42}\n',
            b'half of an "answer',
            b'\xff{"return": 41}\n',
            b"\xff\xff\xff",
            b"\xff" + b"x" * 1000,
            b"\xff\n",
            b"\xff{}\n",
            b'\xff{"return": "42"}\n',
            b'\xff{"return": true}\n',
            b'\xff{"return": 42.0}\n',
            b"\xff[[[[",
            os.urandom(5000),
        ):
            with self.subTest(stale=stale[:20]):
                talk = conversation()
                talk.synchronise()
                self.assertIsNone(talk.receive(stale))
                self.assertFalse(talk.ready)
                self.assertEqual(talk.receive(b'\xff{"return": 42}\n'), Answer())

    def test_a_number_without_a_delimiter_is_none_after_a_wrong_one(self) -> None:
        for wrong in (b'\xff{"return": 41}\n', b"\xff" + b"x" * 1000):
            talk = conversation()
            talk.synchronise()
            talk.receive(wrong)
            self.assertIsNone(talk.receive(b'{"return": 42}\n'))
            self.assertFalse(talk.ready)

    def test_it_is_the_last_number_that_counts(self) -> None:
        talk = conversation(1, 2)
        talk.synchronise()
        talk.synchronise()
        self.assertIsNone(talk.receive(b'\xff{"return": 1}\n'))
        self.assertEqual(talk.receive(b'\xff{"return": 2}\n'), Answer())

    def test_something_behind_the_number_is_no_synchronisation(self) -> None:
        talk = conversation()
        talk.synchronise()
        self.assertIsNone(talk.receive(b'\xff{"return": 42}\n' + PING))
        self.assertFalse(talk.ready)

    def test_bytes_may_come_one_by_one(self) -> None:
        talk = conversation()
        talk.synchronise()
        found = [talk.receive(bytes([each])) for each in STRAY + b'\xff{"return": 42}\n']
        self.assertEqual([each for each in found if each is not None], [Answer()])

    def test_numbers_are_not_those_of_another_conversation(self) -> None:
        self.assertNotEqual(Conversation().synchronise(), Conversation().synchronise())

    def test_an_endless_flood_is_cut_off(self) -> None:
        for flood in (b"x" * MIB, b"\xff" * MIB, (b'\xff{"return": 1}\n' * 70000)[:MIB]):
            talk = conversation()
            talk.synchronise()
            for _ in range(MAX_DROPPED // MIB):
                self.assertIsNone(talk.receive(flood))
            self.assertRaises(Nonsense, talk.receive, flood)


class AnswerTests(SynchronousTestCase):
    """What an agent of today answers."""

    def test_a_value_and_a_refusal(self) -> None:
        self.assertEqual(answer_to(PING), Answer({}))
        refused = answer_to(MISSING).refusal
        self.assertEqual(refused, Refusal("CommandNotFound", "The command guest-bogus has not been found"))
        refused = answer_to(NO_PROGRAM).refusal
        assert refused is not None
        self.assertIn("“nope” (No such file", refused.text)

    def test_one_is_asked_after_the_other(self) -> None:
        talk = ready()
        for number in range(3):
            self.assertTrue(talk.ready)
            talk.ask(Request("guest-file-open"))
            self.assertFalse(talk.ready)
            self.assertEqual(talk.receive(b'{"return": %d}\n' % number), Answer(number))

    def test_short_and_long_data_are_decoded(self) -> None:
        for size in (0, 1, 2, 3, 1000, 49151, 49152, 49153, 49154, 200_000, 3 * MIB + 1):
            for piece in (1 << 16, 1000):
                out, err = os.urandom(size), os.urandom(size // 2)
                line = json.dumps({"return": {
                    "out-data": base64.b64encode(out).decode(), "err-data": base64.b64encode(err).decode(),
                    "exited": True}}).encode() + b"\n"  # fmt: skip
                found = answer_to(line, piece=piece)
                assert isinstance(found.value, dict)
                self.assertEqual(found.bytes_of(found.value["out-data"]), out)
                self.assertEqual(found.bytes_of(found.value["err-data"]), err)
                self.assertIs(found.value["exited"], True)

    def test_no_more_is_kept_than_is_wanted(self) -> None:
        line = b'{"return": {"out-data": "' + base64.b64encode(b"\x01\x02\x03" * (4 * MIB)) + b'"}}\n'
        request = Request("guest-exec-status", most=48 * MIB, keep=1000)

        def read() -> None:
            found = answer_to(line, request)
            assert isinstance(found.value, dict)
            self.assertEqual(found.bytes_of(found.value["out-data"]), (b"\x01\x02\x03" * 400)[:1000])

        self.assertLess(peak(read), MIB)

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=20,
        ),
        st.booleans(),
        st.integers(1, 40),
    )
    def test_any_value_comes_as_it_was_sent_in_pieces_of_any_length(
        self, value: object, ascii: bool, piece: int
    ) -> None:
        line = json.dumps({"return": value}, ensure_ascii=ascii).encode("utf-8", "replace") + b"\n"
        self.assertEqual(answer_to(line, piece=piece).value, json.loads(line)["return"])


class NonsenseTests(SynchronousTestCase):
    """A hostile guest's answers are cut off, soon, and in little memory."""

    def cut(self, data: bytes, request: Request = STATUS) -> str:
        talk = asked(request)

        def feed() -> None:
            for at in range(0, len(data), 65536):
                talk.receive(data[at : at + 65536])

        error = self.assertRaises(Nonsense, feed)
        return str(error)

    def test_what_is_no_answer(self) -> None:
        for data in (b"\n", b"hello\n", b"[]\n", b"null\n", b"{}\n", b'{"retrun": 1}\n', b'{"error": 1}\n',
                     b'{"error": []}\n', b'{"return": 1', b'"a\nb"\n', b'{"return": "\xff"}\n', b"\xff\n",
                     b'{"return": ' + b"9" * 5000 + b"}\n", b'{"return": 1}{"return": 2}\n',
                     b'{"return": 1}\n{"return": 2}\n', b'{"return": 1}\nx'):  # fmt: skip
            with self.subTest(data=data[:30]):
                if data == b'{"return": 1':
                    self.assertIsNone(asked().receive(data))
                else:
                    self.assertLess(len(self.cut(data)), 300)

    def test_deep_nesting(self) -> None:
        for data in (
            b"[" * 400_000 + b"\n",
            b'{"return":' * 9_000 + b"1" + b"}" * 9_000 + b"\n",
            b'{"a":' * MIB,
        ):
            self.cut(data)

    def test_many_values_strings_or_digits(self) -> None:
        for data in (
            b'{"return": [' + b"1," * 15_000 + b"1]}\n",
            b'{"return": [' + b'"",' * MIB,
            b"1" * MIB,
            b'{"return": "' + b"\\a" * MIB,
            b'{"return": "' + b"\\\\" * MIB,
        ):
            self.cut(data)

    def test_more_than_an_answer_may_have(self) -> None:
        self.assertIn("more than", self.cut(b'{"return": "' + b"AAAA" * MIB, Request("x", most=2 * MIB)))
        self.cut(b" " * (MAX_TEXT + 65536), STATUS)

    def test_long_strings_that_are_no_base64(self) -> None:
        good = b"AAAA" * 20_000
        for bad in (b"A", b"!" * 4, b"AA==AAAA", b"\\u0041" * 4, b"\n", "ü".encode()):
            with self.subTest(bad=bad):
                self.cut(b'{"return": {"out-data": "' + good + bad + b'"}}\n' + b" " * 8)

    def test_short_strings_that_are_no_base64(self) -> None:
        bads: list[object] = ["A", "!!!!", "AA==AAAA", "\0" + "1", "\0x", "\0" + "9" * 5000, 7, None, [], {}]
        for bad in bads:
            found = answer_to(json.dumps({"return": bad}).encode() + b"\n")
            self.assertRaises(Nonsense, found.bytes_of, found.value)

    def test_something_unasked(self) -> None:
        self.assertRaises(Nonsense, ready().receive, PING)
        self.assertIsNone(ready().receive(b"\n"))
