# SPDX-License-Identifier: Apache-2.0
"""A virtio-serial port without a hypervisor: what the guest opens, and the host's side of it."""

from __future__ import annotations

import os
import socket

from infranetes_common.serial_link import Data, Decoder, Event, Opened
from tests.support.waiting import until

ROOM = 64 * 1024  # bytes that are on their way, at most: about as many as in the kernel's buffers


class SerialPort:
    """A port whose host's side comes and goes, and is not there at first.

    A pair of sockets stands in for it. A new pair takes the descriptor's place when the host comes again: the
    guest's program keeps the device open, and may not notice that the host was away.
    """

    def __init__(self) -> None:
        self._host: socket.socket | None = None
        self._guest = -1
        self.events: list[Event] = []
        self._decoder = Decoder()

    def open(self) -> int:
        """Open the device, as the guest does. The descriptor is the guest's to close."""
        if self._guest < 0:
            self.come()
            self.leave()
        return self._guest

    def come(self) -> None:
        """Connect on the host's side."""
        self.leave()
        host, guest = socket.socketpair()
        for each in (host, guest):
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)
        self._host, self._decoder, self.events = host, Decoder(), []
        if self._guest < 0:
            self._guest = guest.detach()
        else:
            with guest:
                os.dup2(guest.fileno(), self._guest, inheritable=False)

    def leave(self) -> None:
        """Close the host's side; what the guest has not read yet stays. Idempotent."""
        if self._host is not None:
            self._host.close()
            self._host = None

    async def send(self, data: bytes) -> None:
        """Write on the host's side, as the guest makes room."""
        left = memoryview(data)

        def some() -> bool:
            nonlocal left
            left = left[self.send_some(bytes(left)) :]
            return not left

        await until(some, "the guest reads what the host writes")

    def send_some(self, data: bytes) -> int:
        """Write what there is room for; return how much that was."""
        assert self._host is not None
        try:
            return self._host.send(data)
        except BlockingIOError:
            return 0

    def read(self) -> bytes:
        """Read on the host's side what has come."""
        assert self._host is not None
        data = b""
        try:
            while len(data) < 1 << 20 and (more := self._host.recv(1 << 16)):
                data += more
        except BlockingIOError:
            pass
        self.events += self._decoder.events(data)
        return data

    def payload(self) -> bytes:
        """Return what has been said in the session that was opened last."""
        self.read()
        said = b""
        for each in self.events:
            if isinstance(each, Opened):
                said = b""
            elif isinstance(each, Data):
                said += each.payload
        return said
