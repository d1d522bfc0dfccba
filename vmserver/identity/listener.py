# SPDX-License-Identifier: Apache-2.0
"""The agent's TLS listener: opened with the first identity, renewed with each later one."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from OpenSSL import SSL
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IListeningPort, IProtocolFactory
from twisted.logger import Logger

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.identity import Identity
from infranetes_common.reactors import IReactor
from vmserver.config import LimitsConfig, split_address
from vmserver.identity import tls
from vmserver.identity.guard import PortGuard

Listen = Callable[[str, int, IProtocolFactory], "Deferred[IListeningPort]"]
"""`listen(host, port, factory)`: listen there."""

BACKLOG = 512  # connections that the kernel has made and the agent has not accepted yet

_log = Logger()


class Listener:
    """Serves `inner` over mutual TLS.

    :param inner: set before `open`; protocols of it are served.
    :param address: HOST:PORT; "": the identity's.
    :param guard: keeps the port for the node alone; None: nobody does, here.
    :param listen: replaces TCP.
    :ivar factory: None until `open`.
    """

    inner: IProtocolFactory

    def __init__(
        self,
        reactor: IReactor,
        address: str,
        limits: LimitsConfig,
        guard: PortGuard | None = None,
        listen: Listen | None = None,
    ) -> None:
        self._guard = guard
        self._reactor = reactor
        self._address = address
        self._limits = limits
        self._listen = listen or self._listen_tcp
        self._port: IListeningPort | None = None
        self.factory: tls.BoundedTLSFactory | None = None

    @property
    def port(self) -> int:
        """The port's number; 0 while it does not listen."""
        return cast(IPv4Address, self._port.getHost()).port if self._port is not None else 0

    async def open(self, identity: Identity, context: SSL.Context) -> None:
        """Listen with `context`, or use it for new connections where it listens already.

        :raise InvalidArgument: the identity's address is none. :raise FailedPrecondition: it can't be had.
        """
        if self.factory is not None:
            await self.renew(identity, context)
            return
        try:
            host, port = split_address(self._address or identity.listen)
        except ValueError:
            raise InvalidArgument(f"listen {identity.listen[:80]!r}: expected HOST:PORT") from None
        await self._keep(port, identity)
        factory = tls.BoundedTLSFactory(
            self._reactor,
            context,
            self.inner,
            connections=self._limits.connections,
            handshakes=self._limits.handshakes,
            handshake_seconds=self._limits.handshake_seconds,
            handshake_rate=self._limits.handshake_rate,
            guard=self._guard,
        )
        factory.trust(tls.node_addresses(identity))
        try:
            self._port = await self._listen(host, port, factory)
        except (CannotListenError, OSError) as error:
            raise FailedPrecondition(f"can't listen on {host}:{port}: {error}") from error
        self.factory = factory
        _log.info("serving sandbox {sandbox} on port {port}", sandbox=identity.sandbox_id, port=self.port)

    async def renew(self, identity: Identity, context: SSL.Context) -> None:
        """Use another identity's context for new connections."""
        if self.factory is not None:
            self.factory.renew(context)
            self.factory.trust(tls.node_addresses(identity))
            await self._keep(self.port, identity)

    async def _keep(self, port: int, identity: Identity) -> None:
        """Have the kernel keep the port for the node, if that is for this machine to do."""
        others = identity.network is not None and not identity.network.routes  # the node does, on its bridge
        node = tls.node_addresses(identity)
        if self._guard is not None and node and port and not others:
            await self._guard.shut(port, node)

    def limit(self, limits: LimitsConfig) -> None:
        """Change the bounds for new connections; open connections stay."""
        self._limits = limits
        if self.factory is not None:
            self.factory.limit(
                limits.connections, limits.handshakes, limits.handshake_seconds, limits.handshake_rate
            )

    async def stop_listening(self) -> None:
        """Stop accepting connections; open connections stay. Idempotent."""
        port, self._port = self._port, None
        if port is not None:
            await maybeDeferred(port.stopListening)

    def abort_connections(self) -> None:
        """Reset every connection."""
        if self.factory is not None:
            self.factory.abort_all()

    def _listen_tcp(self, host: str, port: int, factory: IProtocolFactory) -> Deferred[IListeningPort]:
        endpoint = TCP4ServerEndpoint(self._reactor, port, backlog=BACKLOG, interface=host.strip("[]"))
        listening: Deferred[IListeningPort] = endpoint.listen(factory)
        return listening
