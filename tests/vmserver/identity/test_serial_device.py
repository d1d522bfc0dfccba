# SPDX-License-Identifier: Apache-2.0
"""A virtio-serial port is a transport for as long as the host's side is there."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IPushProducer
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface import implementer
from zope.interface.verify import verifyObject

from infranetes_common.reactors import installed
from infranetes_common.transports import ByteTransport
from tests.support.serial_port import SerialPort
from tests.support.waiting import until
from vmserver.identity import serial_device
from vmserver.identity.serial_device import HostConnection, SerialDevice, open_port

reactor = installed()


@implementer(IPushProducer)
class Producer:
    """Writes as long as it may."""

    def __init__(self, connection: HostConnection) -> None:
        self._connection = connection
        self.paused = self.stopped = False
        self.written = 0

    def go_on(self) -> None:
        while not self.paused and not self.stopped:
            self._connection.write(bytes(100_000))
            self.written += 100_000

    def pauseProducing(self) -> None:
        self.paused = True

    def resumeProducing(self) -> None:
        self.paused = False

    def stopProducing(self) -> None:
        self.stopped = True


class SerialDeviceTests(TestCase):
    def setUp(self) -> None:
        self.port = SerialPort()
        self.addCleanup(self.port.leave)
        self.made: list[tuple[HostConnection, bool]] = []
        self.received: list[bytes] = []
        self.gone: list[Failure] = []
        self.device = SerialDevice(
            reactor,
            self.port.open,
            lambda connection, before: self.made.append((connection, before)),
            self.received.append,
            self.gone.append,
        )
        self.addCleanup(self.device.stop)
        self.patch(serial_device, "SLOW_SECONDS", 0.05)

    async def connection(self) -> HostConnection:
        """Return the next connection."""
        count = len(self.made)
        await until(lambda: len(self.made) > count, "a connection")
        return self.made[-1][0]

    async def hears(self, words: bytes) -> None:
        heard = b""

        def whole() -> bool:
            nonlocal heard
            heard += self.port.read()
            return heard == words

        await until(whole, f"{words!r} from the guest")

    async def test_there_is_one_each_time_that_the_host_comes(self) -> None:
        self.device.start()
        for number in range(3):
            self.assertEqual(len(self.made), number)
            self.port.come()
            await self.port.send(b"hello %d" % number)
            connection = await self.connection()
            verifyObject(ByteTransport, connection)
            await until(lambda: b"".join(self.received) == b"hello %d" % number, "the host's words")  # noqa: B023
            connection.write(b"hi")
            await self.hears(b"hi")
            self.received.clear()
            self.port.leave()
            await until(lambda: len(self.gone) > number, "the end")  # noqa: B023
            connection.write(b"to nobody")
        self.assertEqual([before for _, before in self.made], [False] * 3)

    async def test_a_host_that_was_there_before_may_have_talked_to_somebody_else(self) -> None:
        self.port.come()
        self.device.start()
        ((_, before),) = self.made
        self.assertTrue(before)
        self.port.leave()
        await until(lambda: self.gone, "the end")
        self.port.come()
        await self.connection()
        self.assertFalse(self.made[-1][1])

    async def test_a_producer_waits_for_a_host_that_does_not_read_and_stops_with_it(self) -> None:
        self.port.come()
        self.device.start()
        ((connection, _),) = self.made
        producer = Producer(connection)
        connection.registerProducer(producer, True)
        producer.go_on()
        self.assertLess(producer.written, 1 << 20)
        heard = 0

        def whole() -> bool:
            nonlocal heard
            heard += len(self.port.read())
            return heard == producer.written

        await until(whole, "all that was written")
        await until(lambda: not producer.paused, "that it may go on")
        producer.go_on()
        self.port.leave()
        await until(lambda: self.gone, "the end")
        self.assertTrue(producer.stopped)

    async def test_nothing_is_read_while_it_is_paused(self) -> None:
        self.port.come()
        self.device.start()
        ((connection, _),) = self.made
        connection.pauseProducing()
        sent = 0
        for _ in range(50):
            sent += self.port.send_some(bytes(100_000))
            await until(lambda: True, "a turn")
        self.assertLess(sent, 1 << 20, "what a host may send ahead is bounded")
        self.assertEqual(self.received, [])
        connection.resumeProducing()
        await until(lambda: sum(map(len, self.received)) == sent, "all of it")

    async def test_an_aborted_connection_lets_the_host_come_again(self) -> None:
        self.port.come()
        self.device.start()
        ((connection, _),) = self.made
        connection.abortConnection()
        connection.abortConnection()
        (reason,) = self.gone
        self.assertTrue(reason.check(ConnectionLost))
        await self.connection()

    async def test_it_writes_what_goes_and_closes_the_device_at_the_end(self) -> None:
        self.port.come()
        self.device.start()
        ((connection, _),) = self.made
        connection.write(b"the last words")
        fd = connection.fileno()
        self.device.stop()
        self.device.stop()
        (reason,) = self.gone
        self.assertTrue(reason.check(ConnectionDone))
        self.assertEqual(self.port.read(), b"the last words")
        self.assertRaises(OSError, os.fstat, fd)
        self.assertEqual(reactor.getReaders().count(connection), 0)  # type: ignore[attr-defined]

    def test_a_device_that_is_not_there_is_told(self) -> None:
        device = SerialDevice(
            reactor,
            lambda: open_port(self.mktemp()),
            lambda connection, before: None,
            self.received.append,
            self.gone.append,
        )
        self.assertRaises(FileNotFoundError, device.start)
        device.stop()


class OpenPortTests(SynchronousTestCase):
    def test_neither_it_nor_a_child_process_waits_for_the_host(self) -> None:
        path = Path(self.mktemp())
        os.mkfifo(path)
        fd = open_port(str(path))
        self.addCleanup(os.close, fd)
        self.assertFalse(os.get_blocking(fd))
        self.assertFalse(os.get_inheritable(fd))
