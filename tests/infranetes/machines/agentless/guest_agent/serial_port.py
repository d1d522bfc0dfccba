# SPDX-License-Identifier: Apache-2.0
"""A serial port as QEMU has it: a terminal on one side, a socket on the other."""

from __future__ import annotations

import os
import pty
import tty
from pathlib import Path

from twisted.internet import fdesc
from twisted.internet.abstract import FileDescriptor
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure

from infranetes_common.reactors import IReactor


class SerialPort(Factory):
    """The port. What the agent writes while nobody is connected is lost, as it is in QEMU.

    :param socket: where clients connect. :ivar path: the terminal's.
    """

    noisy = False

    def __init__(self, reactor: IReactor, socket: Path) -> None:
        self.client: _Client | None = None
        master, self._slave = pty.openpty()
        tty.setraw(self._slave)
        self.path = os.ttyname(self._slave)
        self.terminal = _Terminal(reactor, master, self)
        self.terminal.startReading()
        self._listening = reactor.listenUNIX(str(socket), self)

    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        return _Client(self)

    def close(self) -> Deferred[object]:
        """Close it, when no agent uses it any more."""
        self.terminal.stopReading()
        self.terminal.stopWriting()
        os.close(self.terminal.fileno())
        os.close(self._slave)
        return maybeDeferred(self._listening.stopListening)


class _Terminal(FileDescriptor):
    """The agent's side."""

    def __init__(self, reactor: IReactor, descriptor: int, port: SerialPort) -> None:
        super().__init__(reactor)
        fdesc.setNonBlocking(descriptor)
        self._descriptor = descriptor
        self._port = port
        self.connected = True

    def fileno(self) -> int:
        return self._descriptor

    def doRead(self) -> Exception | None:
        result = fdesc.readFromFD(self._descriptor, self._received)
        return result if isinstance(result, Exception) else None

    def _received(self, data: bytes) -> None:
        client = self._port.client
        if client is not None and client.transport is not None:
            client.transport.write(data)

    def writeSomeData(self, data: bytes) -> int:
        written: int = fdesc.writeToFD(self._descriptor, data)
        return written


class _Client(Protocol):
    def __init__(self, port: SerialPort) -> None:
        self._port = port

    def connectionMade(self) -> None:
        self._port.client = self

    def dataReceived(self, data: bytes) -> None:
        self._port.terminal.write(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._port.client is self:
            self._port.client = None
