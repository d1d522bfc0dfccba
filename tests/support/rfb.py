# SPDX-License-Identifier: Apache-2.0
"""A server of RFB 3.8 (RFC 6143) for tests: a screen of one colour, and the keys that are typed at it."""

from __future__ import annotations

import struct

from twisted.internet.protocol import Factory, Protocol

WIDTH, HEIGHT = 64, 48
_PIXEL_FORMAT = struct.pack(">BBBBHHHBBBxxx", 32, 24, 0, 1, 255, 255, 255, 0, 8, 16)
_SIZES = {0: 20, 3: 10, 4: 8, 5: 6}  # of the client's messages by their types, where they are fixed
_ENCODINGS, _UPDATE, _KEY = 2, 3, 4


class RfbServer(Factory):
    """The screen. :ivar colour: red, green and blue. :ivar keys: the symbols of keys that were pressed."""

    noisy = False

    def __init__(self, colour: tuple[int, int, int]) -> None:
        self.colour = colour
        self.keys: list[int] = []

    def buildProtocol(self, addr: object) -> Protocol:
        return _Viewer(self)


class _Viewer(Protocol):
    def __init__(self, screen: RfbServer) -> None:
        self._screen = screen
        self._received = b""
        self._shaking = [(12, b"\1\1"), (1, bytes(4)), (1, self._begin())]  # bytes that come, and the answer

    def _begin(self) -> bytes:
        name = b"a test"
        return struct.pack(">HH", WIDTH, HEIGHT) + _PIXEL_FORMAT + struct.pack(">I", len(name)) + name

    def connectionMade(self) -> None:
        self.transport.write(b"RFB 003.008\n")

    def dataReceived(self, data: bytes) -> None:
        self._received += data
        while self._shaking:
            size, answer = self._shaking[0]
            if len(self._received) < size:
                return
            self._received = self._received[size:]
            self.transport.write(answer)
            del self._shaking[0]
        while self._received and (size := self._size()) <= len(self._received):
            message, self._received = self._received[:size], self._received[size:]
            self._said(message)

    def _size(self) -> int:
        kind = self._received[0]
        if kind == _ENCODINGS:
            if len(self._received) < 4:
                return 4
            return 4 + 4 * int(struct.unpack(">H", self._received[2:4])[0])
        return _SIZES[kind]

    def _said(self, message: bytes) -> None:
        if message[0] == _KEY and message[1]:
            self._screen.keys.append(struct.unpack(">I", message[4:8])[0])
        if message[0] == _UPDATE and not message[1]:
            pixel = bytes((*self._screen.colour, 0))
            rectangle = struct.pack(">HHHHi", 0, 0, WIDTH, HEIGHT, 0)
            self.transport.write(struct.pack(">BxH", 0, 1) + rectangle + pixel * WIDTH * HEIGHT)
