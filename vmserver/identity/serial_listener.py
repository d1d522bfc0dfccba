# SPDX-License-Identifier: Apache-2.0
"""The agent's end of its own virtio-serial port, by which only its node can call it.

One session at a time: who opens another is the node again, whose daemon was replaced. A daemon of a release
that knows nothing of the port never comes, so it is told when nobody does.
"""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IDelayedCall, IProtocolFactory
from twisted.python.failure import Failure

from infranetes_common import serial_link
from infranetes_common.reactors import IReactor
from infranetes_common.serial_link import Broken, Data, Decoder, Opened
from infranetes_common.serial_session import SerialAddress, SessionTransport
from vmserver.identity.serial_device import HostConnection, SerialDevice

NODE = SerialAddress("the node, by the agent's port")
LONELY_SECONDS = 60.0  # without a session


class SerialListener:
    """Serves protocols of `factory` to who opens sessions at a port.

    :param opened: as in `SerialDevice`.
    :param lonely: called each time that there has been no session for LONELY_SECONDS.
    """

    def __init__(
        self,
        reactor: IReactor,
        opened: Callable[[], int],
        factory: IProtocolFactory,
        lonely: Callable[[], None] = lambda: None,
    ) -> None:
        self._reactor = reactor
        self._factory = factory
        self._device = SerialDevice(reactor, opened, self._made, self._received, self._gone)
        self._connection: HostConnection | None = None
        self._decoder = Decoder()
        self._session: SessionTransport | None = None
        self._accepts = True
        self._lonely = lonely
        self._waiting: IDelayedCall | None = None  # for a session

    def start(self) -> None:
        """Begin to serve. :raise OSError: the device can't be opened."""
        self._device.start()
        self._wait()

    def stop_accepting(self) -> None:
        """Open no further sessions. Idempotent."""
        self._accepts = False
        self._stop_waiting()

    def stop(self) -> None:
        """End the session, and close the device. Idempotent."""
        self.stop_accepting()
        if self._session is not None:
            self._session.abortConnection()
        self._device.stop()

    def _made(self, connection: HostConnection, before: bool) -> None:
        self._connection, self._decoder = connection, Decoder()
        if before:  # there may be a session with an earlier agent, which has left in the midst of a record
            connection.write(serial_link.FILLER + serial_link.RESET)

    def _gone(self, reason: Failure) -> None:
        self._connection = None
        self._end_session(reason)

    def _received(self, data: bytes) -> None:
        for event in self._decoder.events(data):
            if isinstance(event, Data):
                if self._session is not None:
                    self._session.received(event.payload)
            elif isinstance(event, Opened):
                self._open(event.session)
            else:
                broken = isinstance(event, Broken)
                if broken and self._session is not None:
                    self._write(serial_link.RESET)
                self._end_session(Failure(ConnectionLost() if broken else ConnectionDone()))

    def _open(self, session: bytes) -> None:
        if self._session is not None and self._session.session == session:
            return  # the node was not answered soon enough, and asks again
        self._end_session(Failure(ConnectionLost("the node has opened another session")))
        connection = self._connection
        protocol = self._factory.buildProtocol(NODE) if self._accepts else None
        if protocol is None or connection is None:
            self._write(serial_link.opening(session) + serial_link.RESET)
            return
        self._write(serial_link.opening(session))
        made = SessionTransport(connection, session, NODE, lambda abort: self._close(made, abort))
        self._session = made
        self._stop_waiting()
        made.serve(protocol)

    def _close(self, session: SessionTransport, abort: bool) -> None:
        """End a session at its protocol's wish."""
        if self._session is not session:
            return
        self._session = None
        self._wait()
        if abort:
            self._write(serial_link.RESET)
        self._reactor.callLater(0, session.lost, Failure(ConnectionDone()))

    def _end_session(self, reason: Failure) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._wait()
            session.lost(reason)

    def _wait(self) -> None:
        self._stop_waiting()
        if self._accepts:
            self._waiting = self._reactor.callLater(LONELY_SECONDS, self._nobody_came)

    def _stop_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.active():
            waiting.cancel()

    def _nobody_came(self) -> None:
        self._waiting = None
        self._lonely()

    def _write(self, data: bytes) -> None:
        if self._connection is not None:
            self._connection.write(data)
