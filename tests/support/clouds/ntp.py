# SPDX-License-Identifier: Apache-2.0
"""A time server like those of clouds. Source: RFC 5905, 7.3 and 9."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

from twisted.internet.protocol import DatagramProtocol

PORT = 123
_SINCE_1900 = 2_208_988_800
_CLIENT, _SERVER = 3, 4
# Leap, version and mode; stratum, poll, precision; root delay and root dispersion; reference id.
_HEAD = struct.Struct(">BBbbII4s")
_BYTES = _HEAD.size + 4 * 8
_SENT = slice(40, 48)  # the transmit timestamp of a request


class NtpServer(DatagramProtocol):
    """A server of stratum 1, whose clock is `now`: seconds since 1970.

    :ivar asked: how many requests there were.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self.asked = 0

    def datagramReceived(self, datagram: bytes, addr: tuple[str, int]) -> None:
        if len(datagram) < _BYTES or datagram[0] & 7 != _CLIENT:
            return
        self.asked += 1
        now = self._stamp()
        head = _HEAD.pack(datagram[0] & 0b00111000 | _SERVER, 1, datagram[2], -20, 0, 0, b"TEST")
        assert self.transport is not None
        self.transport.write(head + now + datagram[_SENT] + now + self._stamp(), addr)

    def _stamp(self) -> bytes:
        seconds, fraction = divmod(self._now() + _SINCE_1900, 1)
        return struct.pack(">II", int(seconds), int(fraction * 2**32))
