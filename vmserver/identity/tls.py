# SPDX-License-Identifier: Apache-2.0
"""The agent's TLS: mutual, and only for the node that made this VM.

A peer has to show a certificate that the VM's own CA signed for client use and that names the node by URI.
The CA's other certificates, those of VMs, name a VM and are for servers, so both checks refuse them.

Peers that have not shown a certificate can neither displace the node nor keep the agent busy: each address
may connect so often (`callers`), and is refused beyond that before TLS costs anything. Each connection has a
deadline, too many of them displace those of whoever has most, and no authenticated one is ever ended for
another.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any, cast

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from OpenSSL import SSL, crypto
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.interfaces import (
    IAddress,
    IDelayedCall,
    IOpenSSLServerConnectionCreator,
    IProtocol,
    IProtocolFactory,
    IReactorTime,
    ITransport,
)
from twisted.internet.ssl import (
    Certificate,
    CertificateOptions,
    TLSVersion,
    trustRootFromCertificates,
)
from twisted.internet.tcp import Connection
from twisted.logger import Logger
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common.addresses import Network, parse_network
from infranetes_common.errors import InvalidArgument
from infranetes_common.identity import Identity
from vmserver.identity.callers import Callers, source_of
from vmserver.identity.guard import PortGuard

NODE_URI = "infranetes:node"
VM_URI_PREFIX = "infranetes:vm:"
NODE_AT_URI_PREFIX = "infranetes:node-at:"

_NOT_YET_VALID = 9  # X509_V_ERR_CERT_NOT_YET_VALID of <openssl/x509_vfy.h>
_READ_BYTES = 256 * 1024  # per reactor turn, since a turn costs as much as many TLS records
_log = Logger()
# The protocol of TLSMemoryBIOFactory, whose name differs between Twisted's releases.
_Base: Any = TLSMemoryBIOFactory.protocol  # Any: one of two classes


def uris(certificate: x509.Certificate) -> list[str]:
    """List the URIs among a certificate's alternative names."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return list(names.get_values_for_type(x509.UniformResourceIdentifier))


def _verify(connection: SSL.Connection, certificate: crypto.X509, error: int, depth: int, good: int) -> bool:
    # The clock of a VM that was suspended is behind, and is corrected over such a connection. So accept a
    # certificate that is not valid yet: the node may have made it since, and signs none for a later time.
    if not good and not (error == _NOT_YET_VALID and depth == 0):
        return False
    if depth > 0:
        return True
    try:
        return NODE_URI in uris(certificate.to_cryptography())
    except ValueError:
        return False


def valid_from(identity: Identity) -> datetime.datetime:
    """Return the start of the validity of the identity's certificate (not before), in UTC.

    :raise InvalidArgument: it is not PEM.
    """
    try:
        certificate = x509.load_pem_x509_certificate(identity.certificate_pem.encode())
    except ValueError:
        raise InvalidArgument("the identity's certificate, key or CA is not PEM") from None
    try:
        return certificate.not_valid_before_utc
    except AttributeError:  # cryptography before 42
        return certificate.not_valid_before.replace(tzinfo=datetime.UTC)


def sandbox_id_of(certificate_pem: str) -> str:
    """Return the id of the sandbox that a certificate names.

    :raise InvalidArgument: no PEM, or it names none.
    """
    try:
        named = uris(x509.load_pem_x509_certificate(certificate_pem.encode()))
    except ValueError:
        raise InvalidArgument("the certificate is not PEM") from None
    for uri in named:
        if uri.startswith(VM_URI_PREFIX):
            return uri.removeprefix(VM_URI_PREFIX)
    raise InvalidArgument(f"the certificate names no sandbox: it has no URI {VM_URI_PREFIX}ID")


def node_addresses(identity: Identity) -> list[Network]:
    """Return the addresses that the node has, as the VM's certificate says; none: it says nothing.

    :raise InvalidArgument: it is not PEM, or names what is none."""
    try:
        named = uris(x509.load_pem_x509_certificate(identity.certificate_pem.encode()))
        found = [
            each.removeprefix(NODE_AT_URI_PREFIX) for each in named if each.startswith(NODE_AT_URI_PREFIX)
        ]
        return [parse_network(each) for each in found]
    except ValueError:
        raise InvalidArgument("the certificate's addresses of the node are none") from None


def context(identity: Identity) -> SSL.Context:
    """Make the context of this identity's listener.

    :raise InvalidArgument: certificate, key or CA are not PEM, don't fit together, or are not this VM's.
    """
    try:
        certificate = x509.load_pem_x509_certificate(identity.certificate_pem.encode())
        # A key of another kind raises TypeError below.
        key = cast("EllipticCurvePrivateKey", load_pem_private_key(identity.key_pem.encode(), None))
        authority = Certificate.loadPEM(identity.ca_pem.encode())
    except (ValueError, TypeError, AttributeError, crypto.Error):
        raise InvalidArgument("the identity's certificate, key or CA is not PEM") from None
    if VM_URI_PREFIX + identity.sandbox_id not in uris(certificate):
        raise InvalidArgument(f"the identity's certificate is not that of sandbox {identity.sandbox_id}")
    try:
        options = CertificateOptions(
            privateKey=crypto.PKey.from_cryptography_key(key),
            certificate=crypto.X509.from_cryptography(certificate),
            trustRoot=trustRootFromCertificates([authority]),
            raiseMinimumTo=TLSVersion.TLSv1_3,  # TLS 1.3 has no renegotiation
            acceptableProtocols=[b"h2"],
        )
        made: SSL.Context = options.getContext()
    except (ValueError, TypeError, SSL.Error, crypto.Error):
        raise InvalidArgument("the identity's key does not belong to its certificate") from None
    made.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, _verify)
    made.set_info_callback(_handshake_info)
    return made


def _handshake_info(connection: SSL.Connection, where: int, result: int) -> None:
    if where & SSL.SSL_CB_HANDSHAKE_DONE:
        protocol = connection.get_app_data()
        if protocol is not None:
            protocol.authenticated()


@implementer(IOpenSSLServerConnectionCreator)
class _Creator:
    """Makes connections of the current context, which a renewed identity replaces."""

    def __init__(self, context: SSL.Context) -> None:
        self.context = context

    def serverConnectionForTLS(self, protocol: IProtocol) -> SSL.Connection:
        connection = SSL.Connection(self.context, None)
        connection.set_app_data(protocol)
        return connection


class _GuardedTLS(_Base):  # type: ignore[misc]
    """One connection, which tells its factory when it is made, authenticated and lost.

    :ivar host: the peer's address. :ivar source: whom it counts as, as `source_of` says.
    """

    host = source = ""

    def makeConnection(self, transport: ITransport) -> None:
        cast(Connection, transport).bufferSize = _READ_BYTES
        super().makeConnection(transport)
        self.factory.opened(self)

    def authenticated(self) -> None:
        self.factory.authenticated(self)

    def connectionLost(self, reason: Failure) -> None:
        self.factory.closed(self)
        super().connectionLost(reason)


class BoundedTLSFactory(TLSMemoryBIOFactory):
    """A server's factory of TLS connections to `inner`, so many at a time.

    :param connections: authenticated ones at a time; more are refused.
    :param handshakes: unauthenticated ones at a time; one more ends another (`Callers.one_too_many`).
    :param handshake_seconds: from accepting a connection to its handshake's end.
    :param handshake_rate: connections a second from one address; more are closed at once.
    :param guard: is told when the node is there; None: nobody is.
    """

    protocol = _GuardedTLS
    noisy = False

    def __init__(
        self,
        reactor: IReactorTime,
        context: SSL.Context,
        inner: IProtocolFactory,
        *,
        connections: int = 16,
        handshakes: int = 32,
        handshake_seconds: float = 10.0,
        handshake_rate: float = 4.0,
        guard: PortGuard | None = None,
    ) -> None:
        self._guard = guard
        self._creator = _Creator(context)
        super().__init__(self._creator, False, inner)
        self._reactor = reactor
        self._connections = connections
        self._handshakes = handshakes
        self._handshake_seconds = handshake_seconds
        self._callers: Callers[_GuardedTLS] = Callers(reactor, handshake_rate)
        self._deadlines: dict[_GuardedTLS, IDelayedCall] = {}
        self._open: set[_GuardedTLS] = set()

    @property
    def counts(self) -> tuple[int, int]:
        """Return the number of authenticated connections, and of those that are not (yet)."""
        return len(self._open), len(self._deadlines)

    def renew(self, context: SSL.Context) -> None:
        """Serve new connections with another context."""
        self._creator.context = context

    def trust(self, node: Iterable[Network]) -> None:
        """Set the addresses that the node is known to have."""
        self._callers.name(node)

    def limit(
        self, connections: int, handshakes: int, handshake_seconds: float, handshake_rate: float
    ) -> None:
        """Change the bounds for new connections; open connections stay."""
        self._connections = connections
        self._handshakes = handshakes
        self._handshake_seconds = handshake_seconds
        self._callers.rate = handshake_rate

    def buildProtocol(self, addr: IAddress | None) -> Any:  # Any: a `_GuardedTLS`, or None to close it
        host = addr.host if isinstance(addr, IPv4Address | IPv6Address) else ""
        source = source_of(host)
        if not self._callers.admits(source):
            return None
        made = cast(_GuardedTLS, super().buildProtocol(addr))
        made.host, made.source = host, source
        return made

    def opened(self, connection: _GuardedTLS) -> None:
        """Note a connection whose peer is not known yet."""
        self._deadlines[connection] = self._reactor.callLater(self._handshake_seconds, self._end, connection)
        self._callers.add(connection.source, connection)
        while len(self._deadlines) > self._handshakes:
            self._end(self._callers.one_too_many(connection.source))

    def authenticated(self, connection: _GuardedTLS) -> None:
        """Note that a connection's peer is the node."""
        if not self._forget(connection):
            return  # authenticated before, or lost already
        self._callers.trust(connection.source)
        if len(self._open) >= self._connections:
            _log.warn("refused a connection: {count} are open already", count=len(self._open))
            # OpenSSL's callback is still on the stack: don't abort the connection inside it.
            self._reactor.callLater(0, connection.abortConnection)
            return
        self._open.add(connection)
        if self._guard is not None:
            self._guard.connected(connection.host)

    def closed(self, connection: _GuardedTLS) -> None:
        """Note that a connection is lost."""
        self._forget(connection)
        if connection in self._open:
            self._open.discard(connection)
            if not self._open and self._guard is not None:
                self._guard.lost()

    def abort_all(self) -> None:
        """Reset every connection."""
        for connection in [*self._open, *self._deadlines]:
            connection.abortConnection()

    def _forget(self, connection: _GuardedTLS) -> bool:
        self._callers.remove(connection.source, connection)
        deadline = self._deadlines.pop(connection, None)
        if deadline is not None and deadline.active():
            deadline.cancel()
        return deadline is not None

    def _end(self, connection: _GuardedTLS) -> None:
        self._forget(connection)
        connection.abortConnection()
