# SPDX-License-Identifier: Apache-2.0
"""The node's side of the guest agent's protocol, without a transport: bytes in, answers out.

Requests and answers are JSON, one a line. Answers have no numbers, so what is left of an earlier conversation
(a request whose answer nobody waited for) is told from what is due by `guest-sync-delimited`: the agent
writes 0xFF, which JSON never has, then the number that it was sent.

    state          event                                    next
    SYNCHRONISING  0xFF and the last number, and no more    READY
    SYNCHRONISING  anything else                            is dropped
    READY          `ask`                                    ASKED
    ASKED          a line                                   READY: it is the answer

The guest is not trusted. Long strings, which are base64 in every answer that has them, never exist as a
whole: they are decoded as they come, up to what is wanted, and only the rest of the answer is parsed.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
from collections.abc import Callable, Mapping

import attrs

from infranetes_common import bounded_json

MAX_DROPPED = 64 << 20  # bytes of an earlier conversation, whose last answer may have two outputs of 16 MiB
MAX_ANSWER = 1 << 20  # bytes of an answer, unless its request says otherwise
MAX_TEXT = 512 * 1024  # bytes of an answer without its long strings
MAX_VALUES = 10_000  # in an answer: 300 network cards have fewer
LONG = 64 * 1024  # bytes of text from which on a string is decoded as it comes
_MAX_SYNC = 256  # bytes of the answer to guest-sync-delimited

_DELIMITER = b"\xff"
_WITHIN_STRING = re.compile(rb'[^"\\\n]*+(?:\\.[^"\\\n]*+)*+', re.DOTALL)
_LONG_STRING = '"\\u0000%d"'  # what is parsed in its place


class Nonsense(Exception):
    """What the guest sent is no answer. The message says what it is instead, for people."""


@attrs.frozen
class Request:
    """Something that is asked of the agent.

    :ivar keep: bytes kept of each long string of the answer, decoded.
    """

    command: str
    arguments: Mapping[str, object] = attrs.field(factory=dict)
    data: bytes = attrs.field(default=b"", repr=False)  # of the argument `input-data`; b"": there is none
    most: int = MAX_ANSWER  # bytes of the answer
    keep: int = MAX_ANSWER
    silence: float = 30.0  # seconds without a byte of the answer
    total: float = 60.0  # seconds until the answer is complete

    def encoded(self) -> bytes:
        """Return what is sent."""
        message = {"execute": self.command, "arguments": dict(self.arguments)}
        text = json.dumps(message, separators=(",", ":")).encode()
        if self.data:
            comma = b"," if self.arguments else b""
            text = text[:-2] + comma + b'"input-data":"' + base64.b64encode(self.data) + b'"}}'
        return text + b"\n"


@attrs.frozen
class Refusal:
    """An error that the agent answered."""

    kind: str  # such as CommandNotFound
    text: str


@attrs.frozen
class Answer:
    """An answer: what the command returns, which is not checked yet, or a refusal."""

    value: object = None
    refusal: Refusal | None = None
    _long: tuple[bytes, ...] = ()

    def bytes_of(self, value: object) -> bytes:
        """Return the bytes of a string in base64. :raise Nonsense: it is none."""
        if not isinstance(value, str):
            raise Nonsense("something else in place of data")
        if value.startswith("\0"):
            number = value[1:]
            if not (number.isdecimal() and len(number) < 6 and int(number) < len(self._long)):
                raise Nonsense("a string that is no base64")
            return self._long[int(number)]
        return _decoded(value.encode())


def _decoded(text: bytes | bytearray) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError):
        raise Nonsense("a string that is no base64") from None


class _Long:
    """A long string, decoded as it comes."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._rest = b""  # less than four characters
        self._padded = False
        self._pieces: list[bytes] = []

    def feed(self, text: bytes) -> None:
        text = self._rest + text
        whole = len(text) & ~3
        self._rest = text[whole:]
        if whole:
            if self._padded:
                raise Nonsense("a string that is no base64")
            piece = _decoded(text[:whole])
            self._padded = text[whole - 1 : whole] == b"="
            if self._keep > 0:
                self._pieces.append(piece[: self._keep])
                self._keep -= len(piece)

    def end(self) -> bytes:
        if self._rest:
            raise Nonsense("a string that is no base64")
        return b"".join(self._pieces)


class _Reader:
    """Reads one answer."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._size = 0
        self._text = bytearray()  # without long strings
        self._string: bytearray | _Long | None = None  # within one
        self._held = b""  # a backslash, whose second half comes next
        self._long: list[bytes] = []
        self._strings = 0

    def feed(self, data: bytes) -> tuple[Answer | None, bytes]:
        """Take in `data`. Return the answer, if that completes it, and what follows it."""
        self._size += len(data)
        data, self._held = self._held + data, b""
        at, end = 0, len(data)
        newline = -1
        while at < end:
            if self._string is not None:
                at = self._within(data, at)
                continue
            quote = data.find(b'"', at)
            if newline < at:
                newline = data.find(b"\n", at)
                newline = end if newline < 0 else newline
            if quote < 0 or newline < quote:
                self._add(data[at:newline])
                if newline < end:
                    return self._answer(), data[newline + 1 :]
                break
            self._add(data[at : quote + 1])
            self._strings += 1
            if self._strings > MAX_VALUES:
                raise Nonsense(f"more than {MAX_VALUES} strings in an answer")
            self._string = bytearray()
            at = quote + 1
        if self._size > self._request.most:
            raise Nonsense(f"more than {self._request.most} bytes in answer to {self._request.command}")
        return None, b""

    def _within(self, data: bytes, at: int) -> int:
        """Take in the string's part from `at` on; return where that ends."""
        string = self._string
        if isinstance(string, bytearray):
            match = _WITHIN_STRING.match(data, at)
            assert match is not None
            stop = match.end()
            string += data[at:stop]
            if len(string) > LONG:
                self._string = _Long(self._request.keep)
                self._string.feed(bytes(string))
        else:
            assert string is not None
            quote = data.find(b'"', at)
            stop = len(data) if quote < 0 else quote
            string.feed(data[at:stop])  # no backslash and no newline is in base64
        if stop == len(data):
            return stop
        if data[stop : stop + 1] == b"\\":
            self._held = data[stop:]
            return len(data)
        if data[stop : stop + 1] == b"\n":
            raise Nonsense("a line that ends within a string")
        self._end_string()
        return stop + 1

    def _end_string(self) -> None:
        if isinstance(self._string, bytearray):
            self._add(self._string + b'"')
        elif self._string is not None:
            del self._text[-1:]  # the quote
            self._add((_LONG_STRING % len(self._long)).encode())
            self._long.append(self._string.end())
        self._string = None

    def _add(self, text: bytes | bytearray) -> None:
        self._text += text
        if len(self._text) > MAX_TEXT:
            raise Nonsense(f"more than {MAX_TEXT} bytes beside data in answer to {self._request.command}")

    def _answer(self) -> Answer:
        fields = _parsed(bytes(self._text), MAX_VALUES)
        if "error" in fields:
            error = fields["error"]
            if not isinstance(error, dict):
                raise Nonsense("an error that is no object")
            return Answer(
                refusal=Refusal(str(error.get("class", ""))[:100], str(error.get("desc", ""))[:1000])
            )
        if "return" not in fields:
            raise Nonsense("an object that is no answer")
        return Answer(fields["return"], None, tuple(self._long))


def _parsed(text: bytes, most: int) -> dict[str, object]:
    try:
        fields = bounded_json.loads(text, most)
    except ValueError as error:  # also of what is no UTF-8, and of numbers of thousands of digits
        raise Nonsense(f"a line that is no JSON ({str(error)[:100]})") from None
    if not isinstance(fields, dict):
        raise Nonsense("a line that is no object")
    return fields


class Conversation:
    """The conversation over one connection.

    :ivar ready: whether something may be asked.
    """

    def __init__(self, number: Callable[[], int] = lambda: secrets.randbits(53)) -> None:
        self.ready = False
        self._choose = number
        self._number = -1
        self._tail = b""  # since the last delimiter, which is none yet
        self._delimited = False
        self._dropped = 0
        self._reader: _Reader | None = None

    def synchronise(self) -> bytes:
        """Begin, or begin again while `ready` is false. Return what is to be sent."""
        self._number = self._choose()
        # The delimiter ends what the agent has of a request that was cut off; it answers that with an error.
        return _DELIMITER + Request("guest-sync-delimited", {"id": self._number}).encoded()

    def ask(self, request: Request) -> bytes:
        """Return what is to be sent. Only when `ready`, which it is again once the answer is there."""
        assert self.ready
        self.ready = False
        self._reader = _Reader(request)
        return request.encoded()

    def receive(self, data: bytes) -> Answer | None:
        """Take in `data`. Return what it completes, of which there is at most one: an answer.

        The end of the synchronisation is an answer without a value.

        :raise Nonsense: it is none. The conversation is over.
        """
        if self._reader is not None:
            answer, rest = self._reader.feed(data)
            if answer is not None:
                self._reader, self.ready = None, True
                self._unasked(rest)
            return answer
        if self.ready:
            self._unasked(data)
            return None
        return self._synchronised(data)

    def _unasked(self, data: bytes) -> None:
        if data.strip():
            raise Nonsense("something that was not asked for")

    def _synchronised(self, data: bytes) -> Answer | None:
        self._dropped += len(data)
        if self._dropped > MAX_DROPPED:
            raise Nonsense(f"more than {MAX_DROPPED} bytes, and no answer among them")
        _, delimiter, behind = data.rpartition(_DELIMITER)
        if delimiter:
            self._delimited, self._tail = True, behind[: _MAX_SYNC + 1]
        elif self._delimited:
            self._tail += behind[: _MAX_SYNC + 1]
        if len(self._tail) > _MAX_SYNC:
            self._delimited, self._tail = False, b""
        line, newline, rest = self._tail.partition(b"\n")
        if not newline:
            return None
        self._delimited, self._tail = False, b""
        try:
            number = _parsed(line, 10).get("return")
        except Nonsense:
            return None
        if type(number) is not int or number != self._number or rest.strip():
            return None
        self.ready, self._dropped = True, 0
        return Answer()
