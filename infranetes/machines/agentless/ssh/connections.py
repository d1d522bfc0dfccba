# SPDX-License-Identifier: Apache-2.0
"""The SSH connections to one guest: made when needed, shared by its commands, and remade after a loss.

OpenSSH's server takes ten sessions on a connection (MaxSessions), so more commands at a time have several.
"""

from __future__ import annotations

from collections.abc import Callable

from twisted.conch.ssh.channel import SSHChannel
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import connectProtocol
from twisted.internet.interfaces import IDelayedCall, IReactorTime, IStreamClientEndpoint
from twisted.python.failure import Failure

from infranetes.machines.agentless.ssh.channel import CommandChannel
from infranetes.machines.agentless.ssh.connection import Authentication, Connection
from infranetes.machines.agentless.ssh.transport import Identity, Transport
from infranetes_common.concurrency import Flight, cancellable, start, within
from infranetes_common.errors import DeadlineExceeded, InfranetesError, ResourceExhausted, Unavailable

CONNECT_SECONDS = 20.0  # until the user is authenticated; an emulated guest takes a few
OPEN_SECONDS = 10.0  # until a channel is opened, before its connection is given up
KEEPALIVE_SECONDS = (
    20.0  # between questions to a server that has commands of ours, each answered before the next
)
SESSIONS = 8  # at a time on one connection
CONNECTIONS = 8
_CLOSED = "the node has closed its connection to the guest"


class Link:
    """One connection with its transport."""

    def __init__(self, reactor: IReactorTime, transport: Transport, connection: Connection) -> None:
        self._reactor = reactor
        self.transport = transport
        self.connection = connection
        self.most = SESSIONS  # sessions at a time
        self._beat: IDelayedCall | None = None
        self._unanswered = False
        self._closing: set[SSHChannel] = set()  # channels that were closing when it was last asked

    @property
    def sessions(self) -> int:
        """How many sessions there are, or will be."""
        return len(self.connection.channels)

    @property
    def is_live(self) -> bool:
        return self.transport.reason is None

    async def open(self) -> CommandChannel:
        """Open a channel. :raise Unavailable: the connection is lost. :raise FailedPrecondition: refused."""
        channel = CommandChannel(self._reactor)
        self.connection.openChannel(channel)
        self._keep_alive()
        try:
            await within(self._reactor, OPEN_SECONDS, channel.opened.wait(), "opening a session")
        except DeadlineExceeded:
            self.transport.break_off(Unavailable(f"its SSH server opened no session in {OPEN_SECONDS:g} s"))
        except CancelledError:
            start(self._close_once_open(channel))
            raise
        except InfranetesError as error:
            raise self.transport.reason or error from None
        if self.transport.reason is not None:
            raise self.transport.reason
        return channel

    async def _close_once_open(self, channel: CommandChannel) -> None:
        try:
            await within(self._reactor, OPEN_SECONDS, channel.opened.wait(), "")
        except DeadlineExceeded:
            self.transport.break_off(Unavailable(f"its SSH server opened no session in {OPEN_SECONDS:g} s"))
        except InfranetesError:
            return
        channel.close()

    def _keep_alive(self) -> None:
        if self._beat is None and self.is_live:
            self._beat = self._reactor.callLater(KEEPALIVE_SECONDS, self._ask)

    def _ask(self) -> None:
        self._beat = None
        if self._unanswered:
            self.transport.break_off(
                Unavailable(
                    f"its SSH server has not answered for {KEEPALIVE_SECONDS:g} s: it hangs, or is gone"
                )
            )
        elif self.is_live and self.sessions:
            closing = {channel for channel in self.connection.channels.values() if channel.localClosed}
            if closing & self._closing:
                self.transport.break_off(Unavailable("its SSH server does not close sessions"))
                return
            self._closing = closing
            self._unanswered = True
            asked: Deferred[object] = self.connection.sendGlobalRequest(
                b"keepalive@openssh.com", b"", wantReply=1
            )
            asked.addBoth(self._answered)
            self._keep_alive()

    def _answered(self, _: object) -> None:
        self._unanswered = False

    def lost(self) -> None:
        """Stop asking."""
        beat, self._beat = self._beat, None
        if beat is not None:
            beat.cancel()


class Connections:
    """The connections to one guest.

    :param endpoint: of its SSH server. :param identity: returns who connects, and to whom.
    :param proved: called with each server's host key once it has proved to have it; what it raises ends the
        connection.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        endpoint: IStreamClientEndpoint,
        identity: Callable[[], Identity],
        proved: Callable[[bytes], None],
    ) -> None:
        self._reactor = reactor
        self._endpoint = endpoint
        self._identity = identity
        self._proved = proved
        self._links: list[Link] = []
        self._connecting: Flight[Link] | None = None
        self._closed = False

    async def open(self) -> tuple[Link, CommandChannel]:
        """Open a channel, on a connection that is there or on a new one. Nothing runs yet.

        :raise Unavailable: the guest can't be reached. :raise ResourceExhausted: it runs too many commands.
        :raise FailedPrecondition: it is not the guest that it should be, or refuses sessions."""
        while True:
            roomy = self._roomy()
            link = roomy or await self._connect()
            try:
                return link, await link.open()
            except Unavailable:
                if roomy is None or self._closed:
                    raise  # else it was lost without our knowing, as when a guest reboots
            except InfranetesError:
                # Others have opened channels meanwhile, or the server takes fewer.
                if link.sessions == 0:
                    raise
                link.most = min(link.most, link.sessions)

    async def server(self) -> str:
        """Return the server's version; raises what `open` does."""
        live = next((link for link in self._links if link.is_live), None)
        return (live or await self._connect()).transport.server

    def _roomy(self) -> Link | None:
        return next((link for link in self._links if link.is_live and link.sessions < link.most), None)

    async def _connect(self) -> Link:
        if self._closed:
            raise Unavailable(_CLOSED)
        if len(self._links) >= CONNECTIONS:
            raise ResourceExhausted(
                f"the guest runs {sum(link.sessions for link in self._links)} commands for the node already; "
                "try again once some have ended"
            )
        if self._connecting is None or self._connecting.done:
            flight = Flight(self._make(), lambda: flight.cancel())
            self._connecting = flight
        try:
            return await self._connecting.join()
        except CancelledError:
            if self._closed:
                raise Unavailable(_CLOSED) from None
            raise

    async def _make(self) -> Link:
        connection = Connection()
        identity = self._identity()
        transport = Transport(self._reactor, identity, Authentication(identity, connection))
        try:
            await within(
                self._reactor, CONNECT_SECONDS, self._authenticate(transport, connection), "the login by SSH"
            )
            self._proved(transport.host_key)
        except DeadlineExceeded as error:
            transport.give_up(Unavailable(str(error)))
            raise Unavailable(str(error)) from None
        except BaseException:
            transport.give_up(Unavailable("the login was given up"))
            raise
        link = Link(self._reactor, transport, connection)
        self._links.append(link)
        connection.emptied = lambda: self._idle(link)
        transport.over.wait().addErrback(lambda _: self._lost(link))
        return link

    async def _authenticate(self, transport: Transport, connection: Connection) -> None:
        connecting: Deferred[object] = connectProtocol(self._endpoint, transport)
        try:
            await cancellable(connecting)
        except CancelledError:
            raise
        except Exception as error:
            raise Unavailable(f"its SSH port can't be connected to: {error}") from None

        def lost(failure: Failure) -> None:
            connection.started.fail(transport.reason or Unavailable("lost"))

        transport.over.wait().addErrback(lost)
        await connection.started.wait()

    def _lost(self, link: Link) -> None:
        link.lost()
        if link in self._links:
            self._links.remove(link)

    def _idle(self, link: Link) -> None:
        """Close a connection that has no sessions any more, unless it is the only one."""
        if len(self._links) > 1 and link.is_live:
            link.transport.close()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        for link in list(self._links):
            link.transport.close()
