# SPDX-License-Identifier: Apache-2.0
"""An identity reaches the agent over a channel that connects and disconnects."""

from __future__ import annotations

import os
import tty
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common.errors import FailedPrecondition
from infranetes_common.identity import MAX_DOCUMENT_BYTES
from infranetes_common.reactors import installed
from tests.support.waiting import until
from vmserver.identity import virtio_serial
from vmserver.identity.virtio_serial import LineBuffer, VirtioSerial

reactor = installed()


class LineBufferTests(SynchronousTestCase):
    @given(st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")), max_size=8), st.data())
    def test_lines_come_out_as_they_went_in_however_they_are_cut(self, lines: list[bytes], data: Any) -> None:
        stream = b"".join(line + b"\n" for line in lines)
        buffer = LineBuffer()
        found = []
        while stream:
            size = data.draw(st.integers(1, len(stream)))
            found += buffer.feed(stream[:size])
            stream = stream[size:]
        self.assertEqual(found, lines)

    def test_a_line_over_the_limit_is_dropped_and_told(self) -> None:
        buffer = LineBuffer(limit=10)
        self.assertEqual(buffer.feed(b"x" * 50), [])
        self.assertEqual(buffer.feed(b"x" * 50 + b"\nshort\n"), [None, b"short"])
        self.assertEqual(buffer.feed(b"y" * 11 + b"\n"), [None])

    def test_memory_is_bounded(self) -> None:
        buffer = LineBuffer(limit=10)
        for _ in range(100):
            buffer.feed(b"x" * 1000)
        self.assertLessEqual(len(buffer._buffer), 10)

    def test_a_beginning_is_forgotten(self) -> None:
        buffer = LineBuffer()
        buffer.feed(b"half a li")
        buffer.clear()
        self.assertEqual(buffer.feed(b"whole\n"), [b"whole"])


class Channel(VirtioSerial):
    """One that counts the moments at which it greets, if it has reason to."""

    def __init__(self, test: VirtioSerialTests) -> None:
        super().__init__(reactor, test.device, test.offer, lambda: not test.offered)
        self._test = test

    def _greet(self) -> None:
        super()._greet()
        self._test.greetings += 1


class VirtioSerialTests(TestCase):
    """A pty stands in for the device: both hang up when the other side is closed."""

    def setUp(self) -> None:
        self.offered: list[bytes] = []
        self.refuse: Exception | None = None
        self.device = Path(self.mktemp())
        self.host = -1
        self.patch(virtio_serial, "POLL_SECONDS", 0.05)
        self.greetings = 0
        self.channel = Channel(self)
        self.addCleanup(self.disconnect)
        self.addCleanup(self.channel.stop)

    async def offer(self, document: bytes) -> int:
        await deferLater(reactor, 0.01, lambda: None)
        if self.refuse is not None:
            raise self.refuse
        self.offered.append(document)
        return 4711

    def connect(self) -> None:
        """Create a device, with the node on its other side."""
        self.host, guest = os.openpty()
        tty.setraw(guest)
        os.set_blocking(self.host, False)
        self.device.unlink(missing_ok=True)
        self.device.symlink_to(os.ttyname(guest))
        self.guest = guest  # without it, the pty would hang up

    def disconnect(self) -> None:
        if self.host >= 0:
            os.close(self.host)
            os.close(self.guest)
            self.host = -1

    async def said(self, expected: bytes, seconds: float = 5.0) -> bytes:
        """Return what the agent has written, once `expected` is in it."""
        found = b""
        deadline = reactor.seconds() + seconds
        while expected not in found:
            self.assertLess(reactor.seconds(), deadline, f"{expected!r} not in {found!r}")
            try:
                found += os.read(self.host, 65536)
            except BlockingIOError:
                await deferLater(reactor, 0.01, lambda: None)
        return found

    async def test_it_waits_aloud_and_answers(self) -> None:
        self.connect()
        self.channel.start()
        await self.said(b"waiting\nwaiting\n")
        os.write(self.host, b'{"the":')
        await deferLater(reactor, 0.05, lambda: None)
        os.write(self.host, b'"identity"}\n')
        await self.said(b"ready 4711\n")
        self.assertEqual(self.offered, [b'{"the":"identity"}'])

    async def test_once_it_has_an_identity_it_is_silent_but_serves_renewals(self) -> None:
        self.connect()
        self.channel.start()
        os.write(self.host, b"one\n")
        await self.said(b"ready 4711\n")
        after = self.greetings + 3
        await until(lambda: self.greetings > after, "it could have greeted")
        self.assertRaises(BlockingIOError, os.read, self.host, 100)
        os.write(self.host, b"two\n")
        await self.said(b"ready 4711\n")
        self.assertEqual(self.offered, [b"one", b"two"])

    async def test_a_refused_identity_is_followed_by_waiting(self) -> None:
        self.refuse = FailedPrecondition("not now")
        self.connect()
        self.channel.start()
        os.write(self.host, b"one\n")
        await self.said(b"failed not now\n")
        await self.said(b"waiting\n")
        self.refuse = None
        os.write(self.host, b"one\n")
        await self.said(b"ready 4711\n")

    async def test_a_device_that_comes_late_is_found(self) -> None:
        self.channel.start()
        await until(lambda: self.greetings > 2, "it has looked for the device")
        self.connect()
        await self.said(b"waiting\n")

    async def test_a_document_that_is_too_long_is_refused_and_the_next_one_taken(self) -> None:
        self.connect()
        self.channel.start()
        left = b"x" * (MAX_DOCUMENT_BYTES + 10) + b"\n"
        while left:
            try:
                left = left[os.write(self.host, left) :]
            except BlockingIOError:
                await deferLater(reactor, 0.01, lambda: None)
        await self.said(b"failed the identity document is over")
        os.write(self.host, b"one\n")
        await self.said(b"ready 4711\n")


class HangUpTests(TestCase):
    """The device while the host's side is closed: reads return nothing, and poll always says readable."""

    async def test_a_channel_without_a_node_costs_next_to_nothing_and_is_picked_up_again(self) -> None:
        path = Path(self.mktemp())
        os.mkfifo(path)  # without a writer, reads return nothing and it is always readable, like the device
        reads: list[int] = []

        class Counting(VirtioSerial):
            def doRead(self) -> None:
                reads.append(1)
                super().doRead()

        offered: list[bytes] = []

        async def offer(document: bytes) -> int:
            offered.append(document)
            return 1

        channel = Counting(reactor, path, offer, lambda: not offered)
        original = os.open
        self.patch(os, "open", lambda p, flags, *rest: original(p, _readable(p, path, flags), *rest))
        channel.start()
        self.addCleanup(channel.stop)
        await deferLater(reactor, 0.5, lambda: None)
        self.assertLess(len(reads), 5)
        for _ in range(2):  # a node connects and disconnects, as for each clone
            writer = original(path, os.O_WRONLY | os.O_NONBLOCK)
            await deferLater(reactor, 0.1, lambda: None)
            os.write(writer, b"half")
            await deferLater(reactor, 0.05, lambda: None)
            os.close(writer)
            await deferLater(reactor, 0.1, lambda: None)
        self.assertLess(len(reads), 20)
        writer = original(path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(writer, b"whole\n")
        await until(lambda: offered, "the document is offered")
        os.close(writer)
        self.assertEqual(offered, [b"whole"])


def _readable(opened: Any, fifo: Path, flags: int) -> int:
    # A FIFO that is opened for both reading and writing would be its own other side.
    return (flags & ~os.O_RDWR) | os.O_RDONLY if str(opened) == str(fifo) else flags
