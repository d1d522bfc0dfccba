"""Calls to systemd over its own socket, in D-Bus's protocol and without a D-Bus daemon.

Source: D-Bus Specification 0.41; org.freedesktop.systemd1(5). On this socket every signal comes unasked.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from typing import Any

from jeepney import DBusAddress, HeaderFields, Message, MessageType, Parser, new_method_call
from jeepney.auth import BEGIN, AuthenticationError, Authenticator
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.endpoints import connectProtocol
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import Protocol
from twisted.internet.task import deferLater

from infranetes_common.errors import InfranetesError, Unavailable

SERVICE = "org.freedesktop.systemd1"
MANAGER = DBusAddress("/org/freedesktop/systemd1", SERVICE, f"{SERVICE}.Manager")
_PEER = DBusAddress("/org/freedesktop/systemd1", SERVICE, "org.freedesktop.DBus.Peer")
CALL_SECONDS = 30.0
CONNECT_SECONDS = 10.0
SETTLE_SECONDS = 0.002
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

Signal = Callable[[str, str, tuple[Any, ...]], None]
"""`signal(path, member, body)`"""


class BusError(Exception):
    """systemd refused a call."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message or name)
        self.name = name
        self.message = message or name


class Bus(Protocol):
    """One connection.

    :param signal: is told each signal. :param lost: is called once the connection is no more.
    """

    transport: Any

    def __init__(self, reactor: Any, signal: Signal, lost: Callable[[], None]) -> None:
        self._reactor = reactor
        self._signal, self._lost = signal, lost
        self._auth: Authenticator | None = Authenticator(enable_fds=True)
        self._parser = Parser()
        self._serial = 0
        self._calls: dict[int, Deferred[tuple[Any, ...]]] = {}
        self._ready: Deferred[None] = Deferred()
        self._over = False

    @classmethod
    async def connect(
        cls, reactor: Any, endpoint: IStreamClientEndpoint, signal: Signal, lost: Callable[[], None]
    ) -> Bus:
        """:raise Unavailable: systemd does not answer."""
        bus = cls(reactor, signal, lost)
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
                f"systemd can't be reached: {error}; this agent needs systemd as the machine's "
                "process 1, and to be root"
            ) from None
        return bus

    async def _settle(self) -> None:
        """Until an answer has come. What systemd reads together with the end of the handshake it looks at
        only when more arrives."""
        until = self._reactor.seconds() + CONNECT_SECONDS
        asked: list[Deferred[Any]] = []
        try:
            while not any(each.called for each in asked):
                if self._over or self._reactor.seconds() > until:
                    raise Unavailable("systemd does not answer on its socket")
                await deferLater(self._reactor, SETTLE_SECONDS * min(10, len(asked) + 1), lambda: None)
                one = Deferred.fromCoroutine(self.call(_PEER, "Ping"))
                one.addErrback(lambda failure: None)
                asked.append(one)
                await deferLater(self._reactor, SETTLE_SECONDS, lambda: None)
        finally:
            for one in asked:
                one.cancel()

    # Protocol

    def connectionMade(self) -> None:
        self._negotiate()

    def _negotiate(self) -> None:
        assert self._auth is not None
        said = self._auth.data_to_send()
        if said:
            self.transport.write(said)

    def dataReceived(self, data: bytes) -> None:
        if self._auth is not None:
            try:
                self._auth.feed(data)
            except AuthenticationError as error:
                self._fail(Unavailable(f"systemd lets this process not in: {error}; it has to be root"))
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
            except Exception as error:  # a fault of the other side, whatever it is
                self._fail(Unavailable(f"systemd sent what is no message of D-Bus: {error}"))
                return
            if message is None:
                break
            self._take(message)
        if self._parser.buf.bytes_buffered > MAX_MESSAGE_BYTES:
            self._fail(Unavailable("systemd sent a message that is too large"))

    def _take(self, message: Message) -> None:
        fields = message.header.fields
        kind = message.header.message_type
        if kind is MessageType.signal:
            self._signal(fields.get(HeaderFields.path, ""), fields.get(HeaderFields.member, ""), message.body)
            return
        waiting = self._calls.pop(fields.get(HeaderFields.reply_serial, 0), None)
        if waiting is None or waiting.called:
            return
        if kind is MessageType.error:
            words = str(message.body[0]) if message.body else ""
            waiting.errback(BusError(fields.get(HeaderFields.error_name, ""), words))
        else:
            waiting.callback(message.body)

    def connectionLost(self, reason: Any = None) -> None:
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
        """Let go. Twice is once; calls under way fail."""
        self._lost = lambda: None
        self._end(Unavailable("the agent is stopping"))
        if self.transport is not None:
            self.transport.abortConnection()

    async def call(
        self,
        address: DBusAddress,
        method: str,
        signature: str = "",
        body: Sequence[Any] = (),
        within: float = CALL_SECONDS,
    ) -> tuple[Any, ...]:
        """The body of the answer. For file descriptors in `body` see `manager_with_descriptors`.

        :raise BusError: systemd refuses. :raise Unavailable: no answer.
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
        answer: Deferred[tuple[Any, ...]] = Deferred()
        self._calls[serial] = answer
        answer.addTimeout(within, self._reactor)
        try:
            return await answer
        except TimeoutError:
            raise Unavailable(f"systemd did not answer to {method} within {within:g} s") from None
        finally:
            self._calls.pop(serial, None)

    async def manager(self, method: str, signature: str = "", body: Sequence[Any] = ()) -> tuple[Any, ...]:
        """A call to the manager itself."""
        return await self.call(MANAGER, method, signature, body)

    @classmethod
    async def manager_with_descriptors(
        cls, reactor: Any, endpoint: IStreamClientEndpoint, method: str, signature: str, body: Sequence[Any]
    ) -> tuple[Any, ...]:
        """As `manager`, with file descriptors in `body`, which stay the caller's; over a connection of its
        own: Twisted sends descriptors with the first bytes that it has to send, which have to be this
        call's."""
        bus = await cls.connect(reactor, endpoint, lambda *_: None, lambda: None)
        try:
            return await bus.manager(method, signature, body)
        finally:
            bus.close()

    async def properties(self, path: str, interface: str) -> dict[str, Any]:
        """All properties of an object, without their types."""
        address = DBusAddress(path, SERVICE, "org.freedesktop.DBus.Properties")
        (found,) = await self.call(address, "GetAll", "s", (f"{SERVICE}.{interface}",))
        return {name: value for name, (_, value) in found.items()}
