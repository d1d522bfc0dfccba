# SPDX-License-Identifier: Apache-2.0
"""The first RPC, which is slower than all later ones, made before a template is frozen.

A call to this agent's own server, by the same way as the node's, loads every module and fills every cache on
it: the interpreter's, protobuf's, OpenSSL's. A pair of sockets stands in for the virtio-serial port; under
mutual TLS, the certificates are made for the call and forgotten.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from OpenSSL import SSL, crypto
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint, wrapClientTLS
from twisted.internet.interfaces import (
    IListeningPort,
    IOpenSSLClientConnectionCreator,
    IProtocol,
    IProtocolFactory,
    IStreamClientEndpoint,
)
from twisted.logger import Logger
from zope.interface import implementer

from infranetes_common.identity import Identity, decode, encode
from infranetes_common.reactors import IReactor
from infranetes_common.serial_session import SerialAddress, SessionOpener
from infranetes_common.wire import vmserver
from infranetes_common.wire.vmserver_rpcs import AgentStub
from txgrpc import Channel
from vmserver.identity import tls
from vmserver.identity.serial_device import HostConnection
from vmserver.identity.serial_listener import SerialListener

_HOST = "127.0.0.1"
_NAME = "prewarm"
_SECONDS = 30.0

_log = Logger()


class _Issuer:
    """A CA for one call."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _common_name("prewarm CA")
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        self.certificate = self._sign(self._key, self._name, constraints)

    def _sign(
        self, key: ec.EllipticCurvePrivateKey, subject: x509.Name, *extensions: x509.ExtensionType
    ) -> str:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM).decode()

    def issue(self, uri: str, usage: x509.ObjectIdentifier) -> tuple[str, str]:
        """Make a certificate and its key, PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        # A subject other than the CA's: otherwise OpenSSL would take the certificate for a self-signed one.
        certificate = self._sign(key, _common_name(_NAME), names, x509.ExtendedKeyUsage([usage]))
        return certificate, pem.decode()


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


@implementer(IOpenSSLClientConnectionCreator)
class _Client:
    def __init__(self, certificate: str, key: str) -> None:
        self._context = SSL.Context(SSL.TLS_METHOD)
        self._context.set_alpn_protos([b"h2"])
        self._context.use_certificate(crypto.load_certificate(crypto.FILETYPE_PEM, certificate.encode()))
        self._context.use_privatekey(crypto.load_privatekey(crypto.FILETYPE_PEM, key.encode()))

    def clientConnectionForTLS(self, protocol: IProtocol) -> SSL.Connection:
        connection = SSL.Connection(self._context, None)
        connection.set_connect_state()
        return connection


@implementer(IStreamClientEndpoint)
class _Connected:
    """Opens a session on a descriptor that leads to the agent already."""

    def __init__(self, reactor: IReactor, fd: int) -> None:
        self._reactor = reactor
        self._fd = fd

    def connect(self, factory: IProtocolFactory) -> Deferred[IProtocol]:
        opener = SessionOpener(self._reactor, factory, SerialAddress("the agent"))
        connection = HostConnection(self._reactor, self._fd, opener.dataReceived, opener.connectionLost)
        opener.makeConnection(connection)  # type: ignore[no-untyped-call]
        connection.startReading()  # type: ignore[no-untyped-call]
        return opener.opened


@asynccontextmanager
async def _by_port(reactor: IReactor, factory: IProtocolFactory) -> AsyncIterator[IStreamClientEndpoint]:
    """Serve `factory` at a stand-in for the virtio-serial port; yield what leads there."""
    host, guest = socket.socketpair()
    host.setblocking(False)
    guest.setblocking(False)
    listener = SerialListener(reactor, guest.detach, factory)
    listener.start()
    try:
        yield _Connected(reactor, host.fileno())
    finally:
        listener.stop()
        host.close()


@asynccontextmanager
async def _by_tls(reactor: IReactor, factory: IProtocolFactory) -> AsyncIterator[IStreamClientEndpoint]:
    """Serve `factory` by mutual TLS; yield what leads there."""
    issuer = _Issuer()
    certificate, key = issuer.issue(tls.VM_URI_PREFIX + _NAME, ExtendedKeyUsageOID.SERVER_AUTH)
    identity = Identity(_NAME, certificate, key, issuer.certificate)
    tls_factory = tls.BoundedTLSFactory(reactor, tls.context(decode(encode(identity))), factory)
    port: IListeningPort = await TCP4ServerEndpoint(reactor, 0, interface=_HOST).listen(tls_factory)
    try:
        client = _Client(*issuer.issue(tls.NODE_URI, ExtendedKeyUsageOID.CLIENT_AUTH))
        endpoint = TCP4ClientEndpoint(reactor, _HOST, cast(IPv4Address, port.getHost()).port)
        yield wrapClientTLS(client, endpoint)
    finally:
        await maybeDeferred(port.stopListening)


async def make_first_call(reactor: IReactor, factory: IProtocolFactory, *, by_tls: bool = True) -> None:
    """Call the server behind `factory`, once. A failure is only logged."""
    try:
        async with (_by_tls if by_tls else _by_port)(reactor, factory) as endpoint:
            channel = Channel(reactor, endpoint)
            try:
                await AgentStub(channel).Info(vmserver.InfoRequest(), timeout=_SECONDS)
            finally:
                await channel.close()
    except Exception as error:
        _log.warn(
            "the agent's call to itself, which prepares it for its first call, failed: {kind}: {error}",
            kind=type(error).__name__,
            error=error,
        )
