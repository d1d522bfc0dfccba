"""The agent's door: mutual TLS, opened to the node that made this VM and to nobody else.

A peer must show a certificate that the VM's own CA signed for client use and that names the node by
URI. The CA's other certificates, those of VMs, name a VM and are for servers: both checks refuse
them. Who has not shown a certificate yet has a deadline, and such peers push out one another only.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from OpenSSL import SSL, crypto
from twisted.internet.interfaces import IOpenSSLServerConnectionCreator, IProtocolFactory
from twisted.internet.ssl import (
    Certificate,
    CertificateOptions,
    TLSVersion,
    trustRootFromCertificates,
)
from twisted.logger import Logger
from twisted.protocols.tls import TLSMemoryBIOFactory
from zope.interface import implementer

from infranetes_common.errors import InvalidArgument
from infranetes_common.identity import Identity

NODE_URI = "infranetes:node"
VM_URI_PREFIX = "infranetes:vm:"

_log = Logger()
# What TLSMemoryBIOFactory makes; its name differs between Twisted's releases.
_Base: Any = TLSMemoryBIOFactory.protocol


def uris(certificate: x509.Certificate) -> list[str]:
    """The URIs that a certificate names, none where it has no alternative names."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return list(names.get_values_for_type(x509.UniformResourceIdentifier))


def _verify(connection: Any, certificate: Any, error: int, depth: int, good: int) -> bool:
    if not good:
        return False
    if depth > 0:
        return True
    try:
        return NODE_URI in uris(certificate.to_cryptography())
    except ValueError:
        return False


def made_at(identity: Identity) -> Any:
    """When its certificate begins to count (a datetime in UTC).

    :raise InvalidArgument: it is no PEM."""
    try:
        certificate = x509.load_pem_x509_certificate(identity.certificate_pem.encode())
    except ValueError:
        raise InvalidArgument("the identity's certificate, key or CA is not PEM") from None
    try:
        return certificate.not_valid_before_utc
    except AttributeError:  # cryptography before 42
        return certificate.not_valid_before.replace(tzinfo=datetime.UTC)


def sandbox_of(certificate_pem: str) -> str:
    """The sandbox that a certificate names. :raise InvalidArgument: no PEM, or it names none."""
    try:
        named = uris(x509.load_pem_x509_certificate(certificate_pem.encode()))
    except ValueError:
        raise InvalidArgument("the certificate is not PEM") from None
    for uri in named:
        if uri.startswith(VM_URI_PREFIX):
            return uri.removeprefix(VM_URI_PREFIX)
    raise InvalidArgument(f"the certificate names no sandbox: it has no URI {VM_URI_PREFIX}ID")


def context(identity: Identity) -> Any:
    """The SSL.Context of this identity's listener.

    :raise InvalidArgument: certificate, key or CA are no PEM, don't fit together, or are not this VM's.
    """
    try:
        certificate = x509.load_pem_x509_certificate(identity.certificate_pem.encode())
        key: Any = load_pem_private_key(identity.key_pem.encode(), None)
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
            raiseMinimumTo=TLSVersion.TLSv1_2,
            acceptableProtocols=[b"h2"],
        )
        made = options.getContext()
    except (ValueError, TypeError, SSL.Error, crypto.Error):
        raise InvalidArgument("the identity's key does not fit its certificate") from None
    made.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, _verify)
    made.set_info_callback(_handshake_info)
    return made


def _handshake_info(connection: Any, where: int, result: int) -> None:
    if where & SSL.SSL_CB_HANDSHAKE_DONE:
        protocol = connection.get_app_data()
        if protocol is not None:
            protocol.authenticated()


@implementer(IOpenSSLServerConnectionCreator)
class _Creator:
    """Connections of the present context; a renewed identity brings a new one."""

    def __init__(self, made: Any) -> None:
        self.context = made

    def serverConnectionForTLS(self, protocol: Any) -> Any:
        connection = SSL.Connection(self.context, None)
        connection.set_app_data(protocol)
        return connection


class _GuardedTLS(_Base):  # type: ignore[misc]
    """One connection, told apart by whether its handshake is done."""

    def makeConnection(self, transport: Any) -> None:
        self.factory.opened(self)
        super().makeConnection(transport)

    def authenticated(self) -> None:
        self.factory.authenticated(self)

    def connectionLost(self, reason: Any) -> None:
        self.factory.closed(self)
        super().connectionLost(reason)


class Door(TLSMemoryBIOFactory):
    """A factory of TLS connections to `inner`, bounded.

    :param connections: authenticated ones at a time; more are refused.
    :param handshakes: unauthenticated ones at a time; one more ends the oldest.
    :param handshake_seconds: from accepting to the handshake's end.
    """

    protocol = _GuardedTLS
    noisy = False

    def __init__(
        self,
        reactor: Any,
        made: Any,
        inner: IProtocolFactory,
        *,
        connections: int = 16,
        handshakes: int = 32,
        handshake_seconds: float = 10.0,
    ) -> None:
        self._creator = _Creator(made)
        super().__init__(self._creator, False, inner)
        self._reactor = reactor
        self._connections = connections
        self._handshakes = handshakes
        self._handshake_seconds = handshake_seconds
        self._pending: dict[Any, Any] = {}  # connection -> its deadline, oldest first
        self._open: set[Any] = set()

    @property
    def counts(self) -> tuple[int, int]:
        """How many connections are authenticated, and how many are not yet."""
        return len(self._open), len(self._pending)

    def renew(self, made: Any) -> None:
        """Serve new connections with another context."""
        self._creator.context = made

    def opened(self, connection: Any) -> None:
        """Accepted; nothing is known of the peer."""
        if len(self._pending) >= self._handshakes:
            self._end(next(iter(self._pending)))
        deadline = self._reactor.callLater(self._handshake_seconds, self._end, connection)
        self._pending[connection] = deadline

    def authenticated(self, connection: Any) -> None:
        """The peer is the node."""
        if not self._forget(connection):
            return  # a renegotiation, or over already
        if len(self._open) >= self._connections:
            _log.warn("refused a connection: {count} are open already", count=len(self._open))
            self._later(connection.abortConnection)
        else:
            self._open.add(connection)

    def closed(self, connection: Any) -> None:
        """It is gone."""
        self._forget(connection)
        self._open.discard(connection)

    def end_all(self) -> None:
        """Cut every connection off."""
        for connection in [*self._open, *self._pending]:
            connection.abortConnection()

    def _forget(self, connection: Any) -> bool:
        deadline = self._pending.pop(connection, None)
        if deadline is not None and deadline.active():
            deadline.cancel()
        return deadline is not None

    def _end(self, connection: Any) -> None:
        self._forget(connection)
        connection.abortConnection()

    def _later(self, call: Callable[[], None]) -> None:
        # Never from inside OpenSSL's own callback.
        self._reactor.callLater(0, call)
