# SPDX-License-Identifier: Apache-2.0
"""The agent's listener: opened with the first identity, renewed with each later one.

Where the hypervisor gives the machine a virtio-serial port for it, the node alone can call there, and needs
to show nothing. Everywhere else it is mutual TLS over TCP; and there too, where nobody calls by the port: the
node's daemon may be of the release before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from OpenSSL import SSL
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IListeningPort, IProtocolFactory
from twisted.logger import Logger

from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.identity import Identity
from infranetes_common.reactors import IReactor
from vmserver.config import LimitsConfig, split_address
from vmserver.identity import tls
from vmserver.identity.guard import PortGuard
from vmserver.identity.serial_device import open_port
from vmserver.identity.serial_listener import SerialListener

Listen = Callable[[str, int, IProtocolFactory], "Deferred[IListeningPort]"]
"""`listen(host, port, factory)`: listen there."""

_PEM = "-----BEGIN CERTIFICATE-----"
BACKLOG = 512  # connections that the kernel has made and the agent has not accepted yet

_log = Logger()


class Listener:
    """Serves `inner` over its own virtio-serial port, or over mutual TLS where there is none.

    :param inner: set before `open`; protocols of it are served.
    :param address: HOST:PORT; "": the identity's.
    :param guard: keeps the port for the node alone; None: nobody does, here.
    :param listen: replaces TCP.
    :param device: the virtio-serial port; None: this machine is to have none.
    :ivar factory: None until it listens for TLS.
    """

    inner: IProtocolFactory

    def __init__(
        self,
        reactor: IReactor,
        address: str,
        limits: LimitsConfig,
        guard: PortGuard | None = None,
        listen: Listen | None = None,
        device: Path | None = None,
    ) -> None:
        self._device = device
        self._serial: SerialListener | None = None
        self._identity: Identity | None = None  # while it is called by the port
        self._guard = guard
        self._reactor = reactor
        self._address = address
        self._limits = limits
        self._listen = listen or self._listen_tcp
        self._port: IListeningPort | None = None
        self.factory: tls.BoundedTLSFactory | None = None

    @property
    def port(self) -> int:
        """The TCP port's number; 0 while it does not listen, and where it is called by the serial port."""
        listens = self._port is not None and self._serial is None
        return cast(IPv4Address, cast(IListeningPort, self._port).getHost()).port if listens else 0

    @property
    def by_tls(self) -> bool:
        """Whether it is, or is going to be, called by TLS."""
        return self._serial is None and (
            self.factory is not None or self._device is None or not self._device.exists()
        )

    @property
    def is_open(self) -> bool:
        """Whether it can be called."""
        return self._port is not None or self._serial is not None

    def check(self, identity: Identity) -> SSL.Context | None:
        """Return what `open` needs of an identity: the context of TLS, where it is called so.

        Elsewhere the certificate is not read: that is much code to run in a machine that has just woken up.

        :raise InvalidArgument: its certificate, key or CA can't serve."""
        if self.by_tls:
            return tls.context(identity)
        if not identity.certificate_pem.startswith(_PEM):
            raise InvalidArgument("the identity's certificate is not PEM")
        return None

    async def open(self, identity: Identity, context: SSL.Context | None) -> None:
        """Listen with `context`, or use it for new connections where it listens already.

        :param context: of `check`.
        :raise InvalidArgument: the identity's address is none. :raise FailedPrecondition: it can't be had.
        """
        if context is None:
            self._open_device(identity)
        elif self.factory is not None:
            await self.renew(identity, context)
        else:
            await self._open_tls(identity, context)

    async def _open_tls(self, identity: Identity, context: SSL.Context) -> None:
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
        _log.info("serving sandbox {sandbox} on port {port}", sandbox=identity.sandbox_id, port=port)

    def _open_device(self, identity: Identity) -> None:
        self._identity = identity
        if self._serial is not None:
            return
        path = str(self._device)
        serial = SerialListener(self._reactor, lambda: open_port(path), self.inner, self._lonely)
        try:
            serial.start()
        except OSError as error:
            raise FailedPrecondition(f"the agent's port {path} can't be opened: {error.strerror}") from error
        self._serial = serial
        _log.info("serving sandbox {sandbox} by {path}", sandbox=identity.sandbox_id, path=path)

    def _lonely(self) -> None:
        start(self._serve_the_release_before()).addErrback(
            lambda failure: _log.failure("the agent can't be called by TLS either", failure)
        )

    async def _serve_the_release_before(self) -> None:
        """Listen for TLS, too, as nobody calls by the port."""
        if self.factory is None and self._serial is not None and self._identity is not None:
            await self._open_tls(self._identity, tls.context(self._identity))

    async def renew(self, identity: Identity, context: SSL.Context | None) -> None:
        """Use another identity's context for new connections. :param context: of `check`."""
        if self.factory is not None and context is not None:
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
        if self._serial is not None:
            self._serial.stop_accepting()
        port, self._port = self._port, None
        if port is not None:
            await maybeDeferred(port.stopListening)

    def abort_connections(self) -> None:
        """Reset every connection, and close the serial port."""
        serial, self._serial = self._serial, None
        if serial is not None:
            serial.stop()
        if self.factory is not None:
            self.factory.abort_all()

    def _listen_tcp(self, host: str, port: int, factory: IProtocolFactory) -> Deferred[IListeningPort]:
        endpoint = TCP4ServerEndpoint(self._reactor, port, backlog=BACKLOG, interface=host.strip("[]"))
        listening: Deferred[IListeningPort] = endpoint.listen(factory)
        return listening
