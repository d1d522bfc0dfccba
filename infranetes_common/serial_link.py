# SPDX-License-Identifier: Apache-2.0
"""Sessions on a virtio-serial port, as records: the protocol without I/O.

The port is a stream of bytes that knows no connections. Either end may leave at any time, in the midst of a
record too, and the other may not notice. So the node opens a *session*, with an id that has never been, and
each record says to which one it belongs, at its beginning and at its end:

    open    MAGIC SESSION END             from the node; the agent answers with the same
    reset   MAGIC NONE END                the sender's session is over
    data    SESSION LENGTH PAYLOAD SESSION
    filler  zeros, between records

An end that waits for the rest of a record whose sender has left gets as many zeros as a record can be long:
the record is then longer than it was, has the wrong end, and is dropped whole. From there on only an `open`
or a `reset` means anything. No payload can pass for either: `records` cuts it wherever it has MAGIC.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import attrs

# As every payload is searched for it, and a search goes on by its length.
MAGIC = bytes.fromhex("b5e62d6e66c8a91f3b7052d9048e61fac77e15d03a99b24c")
_END = bytes.fromhex("9a03f4bb71de5c68")
_NONE = bytes(8)  # a reset's, in place of a session

_ID = 8  # bytes of a session's id, and of _END
_CONTROL = len(MAGIC) + 2 * _ID  # bytes of an open or a reset
_LENGTH = 4  # bytes of a payload's length
MAX_PAYLOAD = 256 * 1024  # as much as is written at once, where there is much
OVERHEAD = 2 * _ID + _LENGTH  # bytes of a record beside its payload

RESET = MAGIC + _NONE + _END
FILLER = bytes(OVERHEAD + MAX_PAYLOAD)  # completes whatever record was begun


@attrs.frozen
class Opened:
    """A session is open, or is said once more to be."""

    session: bytes


@attrs.frozen
class Data:
    """Bytes of the session that was opened last."""

    payload: bytes


@attrs.frozen
class Reset:
    """The session that was opened last is over: the other end has ended it."""


@attrs.frozen
class Broken:
    """The session that was opened last is over: what came is none of its records."""


Event = Opened | Data | Reset | Broken


def new_session() -> bytes:
    """Return the id of a session that has never been."""
    return b"\x01" + os.urandom(_ID - 1)  # neither filler nor MAGIC begins so


def opening(session: bytes) -> bytes:
    """Return the record that opens a session."""
    return MAGIC + session + _END


def records(session: bytes, data: bytes) -> Sequence[bytes]:
    """Return the records that carry `data`, in pieces to be joined."""
    pieces: list[bytes] = []
    at, size = 0, len(data)
    while at < size:
        end = min(at + MAX_PAYLOAD, size)
        magic = data.find(MAGIC, at, end)
        if magic >= 0:
            end = magic + _ID
        whole = at == 0 and end == size
        pieces += (session + (end - at).to_bytes(_LENGTH, "big"), data if whole else data[at:end], session)
        at = end
    return pieces


class Decoder:
    """Bytes in, events out. Keeps no more than a record; whatever arrives, it raises nothing."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._session = b""  # the one that is open; b"": none, and what is no open or reset is skipped

    def events(self, data: bytes) -> list[Event]:
        """Return what `data` completes, in order."""
        self._buffer += data
        found: list[Event] = []
        at = 0
        while (step := self._step(at)) is not None:
            size, event = step
            at += size
            if event is not None:
                found.append(event)
        del self._buffer[:at]
        return found

    def _step(self, at: int) -> tuple[int, Event | None] | None:
        """Return how many bytes the next thing at `at` takes, and what it is; None: more bytes are needed."""
        if not self._session:
            skipped = self._skip_to_magic(at)
            if skipped:
                return skipped, None
        elif self._buffer[at : at + 1] == b"\0":
            return self._zeros(at), None
        head = bytes(self._buffer[at : at + _ID])
        if len(head) < _ID:
            return None
        if head == self._session:
            return self._data(at)
        if head == MAGIC[:_ID]:
            return self._control(at)
        return self._broken(_ID)

    def _skip_to_magic(self, at: int) -> int:
        """Return the number of bytes to skip until MAGIC, or what may be its beginning."""
        found = self._buffer.find(MAGIC, at)
        if found >= 0:
            return found - at
        size = len(self._buffer)
        for kept in range(min(len(MAGIC) - 1, size - at), 0, -1):
            if MAGIC.startswith(self._buffer[size - kept :]):
                return size - kept - at
        return size - at

    def _zeros(self, at: int) -> int:
        size = len(self._buffer)
        rest = self._buffer[at : at + len(FILLER)].lstrip(b"\0")
        return min(len(FILLER), size - at) - len(rest)

    def _control(self, at: int) -> tuple[int, Event | None] | None:
        if len(self._buffer) - at < _CONTROL:
            return None
        end = at + len(MAGIC) + _ID
        session = bytes(self._buffer[end - _ID : end])
        if self._buffer[at : end - _ID] != MAGIC or self._buffer[end : end + _ID] != _END:
            return self._broken(_ID)
        if session == _NONE:
            event: Event | None = Reset() if self._session else None
            self._session = b""
            return _CONTROL, event
        if session[0] != 1:
            return self._broken(_CONTROL)
        self._session = session
        return _CONTROL, Opened(session)

    def _data(self, at: int) -> tuple[int, Event | None] | None:
        begin = at + _ID + _LENGTH
        if len(self._buffer) < begin:
            return None
        length = int.from_bytes(self._buffer[at + _ID : begin], "big")
        if not 0 < length <= MAX_PAYLOAD:
            return self._broken(_ID + _LENGTH)
        end = begin + length + _ID
        if len(self._buffer) < end:
            return None
        if self._buffer[begin + length : end] != self._session:
            return self._broken(end - at)
        with memoryview(self._buffer) as whole:
            return end - at, Data(bytes(whole[begin : begin + length]))

    def _broken(self, size: int) -> tuple[int, Event | None]:
        event = Broken() if self._session else None
        self._session = b""
        return size, event
