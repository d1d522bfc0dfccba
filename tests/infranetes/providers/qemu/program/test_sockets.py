# SPDX-License-Identifier: Apache-2.0
"""The sockets that a daemon reaches a VM's QEMU by, and the files that QEMU is handed."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.qemu.program.command_line import Fd
from infranetes.providers.qemu.program.open_files import OpenFiles
from infranetes.providers.qemu.program.qmp import QmpEvent
from infranetes.providers.qemu.program.sockets import IDENTITY, QMP, connect, connect_monitor
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import installed

reactor = installed()


class Monitor(Protocol):
    """The side of QEMU. :ivar gone: fires when the daemon has closed the connection."""

    def __init__(self) -> None:
        self.gone: Deferred[None] = Deferred()

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(b'{"QMP": {"version": {}, "capabilities": []}}\r\n')
        self.transport.write(b'{"event": "STOP", "data": {}, "timestamp": {}}\r\n')

    def connectionLost(self, reason: object = None) -> None:
        self.gone.callback(None)


class SocketTests(TestCase):
    """Over real sockets."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.monitor = Monitor()

    def listen(self, name: str, protocol: Protocol) -> None:
        class One(Factory):
            def buildProtocol(self, addr: object) -> Protocol:
                return protocol

        accepting: Any = One()
        port: Any = reactor.listenUNIX(str(self.directory / name), accepting)
        self.addCleanup(port.stopListening)

    async def refused(self, name: str) -> None:
        with self.assertRaises(Unavailable) as caught:
            await connect(reactor, self.directory)
        self.assertIn(f"QEMU's socket {self.directory / name} can't be reached", str(caught.exception))

    async def test_where_nobody_listens_that_is_told(self) -> None:
        await self.refused(QMP)

    async def test_where_the_agents_is_missing_the_monitors_is_closed_again(self) -> None:
        """QEMU serves one connection at a time: otherwise the next attempt would wait for ever."""
        self.listen(QMP, self.monitor)
        await self.refused(IDENTITY)
        await self.monitor.gone

    async def test_events_are_told_from_the_beginning_and_so_is_the_end(self) -> None:
        self.listen(QMP, self.monitor)
        self.listen(IDENTITY, Protocol())
        event: Deferred[QmpEvent] = Deferred()
        lost: Deferred[None] = Deferred()
        qmp, port = await connect(reactor, self.directory, event.callback, lambda: lost.callback(None))
        self.assertEqual((await event).name, "STOP")
        port.close()
        qmp.close()
        await self.monitor.gone
        await lost

    async def test_the_monitor_alone(self) -> None:
        self.listen(QMP, self.monitor)
        qmp = await connect_monitor(reactor, self.directory)
        self.assertFalse(qmp.closed)
        qmp.close()
        await self.monitor.gone
        self.assertTrue(qmp.closed)


class HandedTests(SynchronousTestCase):
    """What QEMU is handed."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.directory)

    def test_a_socket_is_listened_on_at_once_whatever_was_there_before(self) -> None:
        path = self.directory / QMP
        for _ in range(2):
            with contextlib.closing(OpenFiles()) as files:
                files.listen(Fd.QMP, path)
                client = socket.socket(socket.AF_UNIX)
                self.addCleanup(client.close)
                client.connect(str(path))
                with socket.socket(fileno=os.dup(files.by_number()[Fd.QMP])) as listener:
                    accepted, _ = listener.accept()
                    accepted.close()

    def test_its_output_goes_on_in_a_file_that_is_its_daemons_alone(self) -> None:
        output = self.directory / "qemu.log"
        for words in (b"one\n", b"two\n"):
            with contextlib.closing(OpenFiles()) as files:
                files.set_standard_streams(output)
                numbers = files.by_number()
                self.assertEqual(sorted(numbers), [0, 1, 2])
                self.assertEqual(os.read(numbers[0], 1), b"")
                os.write(numbers[1], b"said ")
                os.write(numbers[2], words)
                for each in numbers.values():
                    self.assertFalse(os.get_inheritable(each))
        self.assertEqual(output.read_bytes(), b"said one\nsaid two\n")
        self.assertEqual(stat.S_IMODE(output.stat().st_mode), 0o600)
