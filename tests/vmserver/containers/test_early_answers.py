# SPDX-License-Identifier: Apache-2.0
"""Answers that come before the request has been written."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import cast

from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.error import ConnectionLost
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.tcp import Connection
from twisted.trial.unittest import TestCase

from infranetes_common.reactors import installed
from vmserver.containers.docker.early_answers import ReadingEndpoint

reactor = installed()


class _Hearing(Protocol):
    """Keeps what it hears."""

    heard = b""

    def dataReceived(self, data: bytes) -> None:
        self.heard += data


class ClosedConnectionTests(TestCase):
    """An engine that answers and closes the connection while a request is written."""

    async def test_its_answer_is_read_before_the_write_that_finds_the_connection_closed_ends_it(self) -> None:
        """As in a turn of the reactor that asked the kernel before the engine answered: it writes only."""
        path = Path("/tmp") / f"early-{os.getpid()}.sock"
        self.addCleanup(path.unlink, missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen()
            endpoint = ReadingEndpoint(UNIXClientEndpoint(reactor, str(path)))
            hearing = cast(_Hearing, await endpoint.connect(Factory.forProtocol(_Hearing)))
            engine, _ = listening.accept()
        engine.sendall(b"no room")
        engine.close()
        transport = cast(Connection, hearing.transport.transport)  # type: ignore[union-attr]
        transport.write(b"an image")
        failed = transport.doWrite()
        self.assertIsInstance(failed, ConnectionLost)
        self.assertEqual(hearing.heard, b"no room")
        transport.abortConnection()
