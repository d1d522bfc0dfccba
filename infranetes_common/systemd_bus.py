# SPDX-License-Identifier: Apache-2.0
"""D-Bus calls to systemd over its private socket, without a D-Bus daemon.

On this socket systemd sends every signal without a subscription. Sources: D-Bus Specification 0.41;
org.freedesktop.systemd1(5).
"""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from typing import Any

from jeepney import DBusAddress, HeaderFields, Message, MessageType, Parser, new_method_call
from jeepney.auth import BEGIN, AuthenticationError, Authenticator
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.endpoints import connectProtocol
from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.unix import Client
from twisted.python.failure import Failure

from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import InfranetesError, Unavailable

SERVICE = "org.freedesktop.systemd1"
MANAGER = DBusAddress("/org/freedesktop/systemd1", SERVICE, f"{SERVICE}.Manager")
_PEER = DBusAddress("/org/freedesktop/systemd1", SERVICE, "org.freedesktop.DBus.Peer")
CALL_SECONDS = 30.0
CONNECT_SECONDS = 10.0
SETTLE_SECONDS = 0.002
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

Body = tuple[Any, ...]  # Any: a message's signature describes its content, not Python's types
"""The values of a D-Bus message."""

Properties = dict[str, Any]  # Any: like `Body`
"""An object's properties by name."""

Signalled = Callable[[str, str, Body], None]
"""`signalled(path, member, body)`, called with each signal."""


class BusError(Exception):
    """systemd refused a call."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message or name)
        self.name = name
        self.message = message or name


class Bus(Protocol):
    """A connection to systemd.

    :param signalled: called with each signal. :param lost: called once the connection is lost.
    """

    transport: Client

    def __init__(self, reactor: IReactorTime, signalled: Signalled, lost: Callable[[], None]) -> None:
        self._reactor = reactor
        self._signalled, self._lost = signalled, lost
        self._auth: Authenticator | None = Authenticator(enable_fds=True)
        self._parser = Parser()
        self._serial = 0
        self._calls: dict[int, Deferred[Body]] = {}
        self._ready: Deferred[None] = Deferred()
        self._over = False

    @classmethod
    async def connect(
        cls,
        reactor: IReactorTime,
        endpoint: IStreamClientEndpoint,
        signalled: Signalled,
        lost: Callable[[], None],
    ) -> Bus:
        """Connect, and wait until systemd answers. :raise Unavailable: it does not."""
        bus = cls(reactor, signalled, lost)
        try:
            await connectProtocol(endpoint, bus)
            bus._ready.addTimeout(CONNECT_SECONDS, reactor)
            await bus._ready
            await bus._settle()
        except TimeoutError:
            bus.close()
            raise Unavailable("systemd does not answer on its socket") from None
        except InfranetesError:
            raise
        except Exception as error:
            raise Unavailable(
                f"systemd can't be reached: {error}; that takes root, and systemd as process 1"
            ) from None
        return bus

    async def _settle(self) -> None:
        """Ping until there is an answer: a message that systemd receives together with the end of the
        handshake is not processed before the next one arrives."""
        until = self._reactor.seconds() + CONNECT_SECONDS
        pings: list[Deferred[Body | None]] = []
        try:
            while not any(ping.called for ping in pings):
                if self._over or self._reactor.seconds() > until:
                    raise Unavailable("systemd does not answer on its socket")
                await sleep(self._reactor, SETTLE_SECONDS * min(10, len(pings) + 1))
                call = start(self.call(_PEER, "Ping"))
                pings.append(call.addErrback(lambda failure: None))
                await sleep(self._reactor, SETTLE_SECONDS)
        finally:
            for ping in pings:
                ping.cancel()

    # Protocol

    def connectionMade(self) -> None:
        self._negotiate()

    def _negotiate(self) -> None:
        assert self._auth is not None
        data = self._auth.data_to_send()
        if data:
            self.transport.write(data)

    def dataReceived(self, data: bytes) -> None:
        if self._auth is not None:
            try:
                self._auth.feed(data)
            except AuthenticationError as error:
                self._fail(Unavailable(f"systemd refuses this process: {error}; it has to be root"))
                return
            if self._auth.authenticated:
                self._auth = None
                self.transport.write(BEGIN)
                self._ready.callback(None)
            else:
                self._negotiate()
            return
        self._parser.add_data(data)
        while True:
            try:
                message = self._parser.get_next_message()
            except Exception as error:  # the parser may raise any exception
                self._fail(Unavailable(f"systemd sent an invalid D-Bus message: {error}"))
                return
            if message is None:
                break
            self._received(message)
        if self._parser.buf.bytes_buffered > MAX_MESSAGE_BYTES:
            self._fail(Unavailable("systemd sent a message that is too large"))

    def _received(self, message: Message) -> None:
        fields = message.header.fields
        kind = message.header.message_type
        if kind is MessageType.signal:
            path, member = fields.get(HeaderFields.path, ""), fields.get(HeaderFields.member, "")
            self._signalled(path, member, message.body)
            return
        waiting = self._calls.pop(fields.get(HeaderFields.reply_serial, 0), None)
        if waiting is None or waiting.called:
            return
        if kind is MessageType.error:
            text = str(message.body[0]) if message.body else ""
            waiting.errback(BusError(fields.get(HeaderFields.error_name, ""), text))
        else:
            waiting.callback(message.body)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._end(Unavailable("the connection to systemd was lost; try again"))

    def _fail(self, error: InfranetesError) -> None:
        self._end(error)
        self.transport.abortConnection()

    def _end(self, error: InfranetesError) -> None:
        if self._over:
            return
        self._over = True
        calls, self._calls = self._calls, {}
        if not self._ready.called:
            self._ready.errback(error)
        for waiting in calls.values():
            if not waiting.called:
                waiting.errback(error)
        self._lost()

    # Calls

    def close(self) -> None:
        """Close the connection; pending calls fail. Idempotent."""
        self._lost = lambda: None
        self._end(Unavailable("the connection to systemd was closed"))
        if self.transport is not None:
            self.transport.abortConnection()

    async def call(
        self,
        address: DBusAddress,
        method: str,
        signature: str = "",
        body: Sequence[object] = (),
        within: float = CALL_SECONDS,
    ) -> Body:
        """Call a method and return the reply's values.

        For file descriptors in `body` see `manager_with_descriptors`.

        :param within: seconds.
        :raise BusError: systemd refuses. :raise Unavailable: there is no answer.
        """
        if self._over:
            raise Unavailable("the connection to systemd was lost; try again")
        self._serial += 1
        serial = self._serial
        descriptors = array.array("i")
        message = new_method_call(address, method, signature or None, tuple(body))
        data = message.serialise(serial, fds=descriptors)
        for descriptor in descriptors:
            self.transport.sendFileDescriptor(descriptor)
        self.transport.write(data)
        answer: Deferred[Body] = Deferred()
        self._calls[serial] = answer
        answer.addTimeout(within, self._reactor)
        try:
            return await answer
        except TimeoutError:
            raise Unavailable(f"systemd did not answer to {method} within {within:g} s") from None
        finally:
            self._calls.pop(serial, None)

    async def manager(self, method: str, signature: str = "", body: Sequence[object] = ()) -> Body:
        """Call a method of systemd's manager object."""
        return await self.call(MANAGER, method, signature, body)

    @classmethod
    async def manager_with_descriptors(
        cls,
        reactor: IReactorTime,
        endpoint: IStreamClientEndpoint,
        method: str,
        signature: str,
        body: Sequence[object],
    ) -> Body:
        """Call a method of the manager with file descriptors in `body`, which the caller closes.

        This takes a connection of its own: Twisted sends descriptors with the next bytes of the connection,
        which have to be those of this call."""
        bus = await cls.connect(reactor, endpoint, lambda *_: None, lambda: None)
        try:
            return await bus.manager(method, signature, body)
        finally:
            bus.close()

    async def properties(self, path: str, interface: str) -> Properties:
        """Return all properties of an object."""
        address = DBusAddress(path, SERVICE, "org.freedesktop.DBus.Properties")
        (found,) = await self.call(address, "GetAll", "s", (f"{SERVICE}.{interface}",))
        return {name: value for name, (_, value) in found.items()}
