# SPDX-License-Identifier: Apache-2.0
"""The node's certificate authority: the identities of VMs and of the node.

One ECDSA P-256 key pair signs everything. `STATE_DIR/ca/authority.pem` (mode 0600 in a directory of
mode 0700) holds its key and certificate and is the only thing kept on disk; the node's own client
credentials live in memory and are renewed before they expire.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier
from OpenSSL import SSL, crypto
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from twisted.internet.ssl import (
    Certificate,
    CertificateOptions,
    PrivateCertificate,
    TLSVersion,
    trustRootFromCertificates,
)
from twisted.protocols.tls import TLSMemoryBIOProtocol
from zope.interface import implementer

from infranetes.identity.certificates import (
    NODE_AT_URI_PREFIX,
    NODE_URI,
    VM_URI_PREFIX,
    Pair,
    Signed,
    builder,
    key_id,
    key_usage,
    moment,
    not_after,
    signed,
    signed_at,
    vm_name,
)
from infranetes_common.concurrency import sync_directory
from infranetes_common.errors import ConfigError, FailedPrecondition, InvalidArgument

CA_LIFETIME_SECONDS = 20 * 365 * 86400
NODE_LIFETIME_SECONDS = 7 * 86400
NODE_RENEWAL_SECONDS = 86400  # credentials are replaced once they have less than this to live

_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED of <openssl/x509_vfy.h>
_KEY = re.compile(rb"-----BEGIN (EC )?PRIVATE KEY-----")


@attrs.frozen
class VouchedKey:
    """The key for which a VM's processor has vouched.

    Whoever could read the VM's first key may have had others certified before that. What is certified later
    is the VM's own.

    :ivar id: its `key_id`. :ivar at: when it was vouched for, seconds since 1970 UTC."""

    id: str
    at: float


@attrs.frozen
class KnownKey:
    """What is known of a VM's keys.

    :ivar id: the `key_id` of the last certificate that it was given, which is accepted also when it has
        expired: no daemon may have run to replace it; "": it is not known.
    :ivar vouched: None: the VM's processor has vouched for none; otherwise certificates that were signed
        before it did are refused, but for that key's own."""

    id: str = ""
    vouched: VouchedKey | None = None


class Authority:
    """Issues and verifies the certificates of one node and its VMs.

    The CA is created in `state_dir` once, and loaded from there afterwards. If the daemon is killed while it
    creates the CA, the next one creates it anew.

    :param clock: seconds since 1970 UTC.
    :param path: a CA of the user's own: certificate and key, PEM. It is never written.
    :param sources: tells the addresses and networks that the node's connections are from. VMs' certificates
        name them.
    :raise ConfigError: the state directory can't be written, or `path` not be read.
    :raise FailedPrecondition: the CA is unusable; the message says why and what to do.
    """

    def __init__(
        self,
        state_dir: Path | str,
        clock: Callable[[], float] = time.time,
        path: Path | str = "",
        sources: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        self._sources = sources
        self._clock = clock
        self._given = bool(path)
        self._path = Path(path) if path else Path(state_dir) / "ca" / "authority.pem"
        self._ca = self._load_or_create()
        # Now, as OpenSSL's first context takes longest: the first connection does not wait in the reactor.
        self._context, self._context_until = self._make_context()

    @property
    def ca_pem(self) -> str:
        """The CA's certificate, which the VMs trust."""
        return self._ca.certificate_pem.decode()

    def issue_vm(self, sandbox_id: str, lifetime_seconds: float) -> tuple[str, str]:
        """Issue a key and a server certificate for a sandbox's VM, both PEM: (certificate, key).

        Never valid for longer than the CA itself.

        :raise InvalidArgument: the id can't be a DNS label, or the lifetime is not positive.
        """
        signed = self.issue(sandbox_id, lifetime_seconds)
        return signed.certificate_pem, signed.key_pem

    def issue(self, sandbox_id: str, lifetime_seconds: float) -> Signed:
        """Issue a key and a server certificate for a sandbox's VM, as `issue_vm` does."""
        key = ec.generate_private_key(ec.SECP256R1())
        pair = Pair(key, self._sign_vm(sandbox_id, key.public_key(), lifetime_seconds))
        return signed(pair.certificate, pair.key_pem.decode())

    def sign(self, sandbox_id: str, request: bytes, lifetime_seconds: float) -> Signed:
        """Issue a server certificate for a key that the sandbox's VM has generated itself.

        Only the public key of the request is used: the node knows who the VM is.

        :param request: PKCS #10, DER.
        :raise InvalidArgument: no such request, not signed by its own key, or not for P-256.
        """
        try:
            asked = x509.load_der_x509_csr(request)
            key = asked.public_key()
            if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)):
                raise ValueError("its key is not a P-256 key")
            if not asked.is_signature_valid:
                raise ValueError("it is not signed with its own key")
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InvalidArgument(
                f"the certificate request from the VM of sandbox {sandbox_id} is not valid: "
                f"{str(error)[:100]}"
            ) from None
        return signed(self._sign_vm(sandbox_id, key, lifetime_seconds), "")

    def _sign_vm(self, sandbox_id: str, key: ec.EllipticCurvePublicKey, lifetime: float) -> x509.Certificate:
        names = [
            x509.DNSName(vm_name(sandbox_id)),
            x509.UniformResourceIdentifier(VM_URI_PREFIX + sandbox_id),
            *(x509.UniformResourceIdentifier(NODE_AT_URI_PREFIX + each) for each in self._sources()),
        ]
        if lifetime <= 0:
            raise InvalidArgument(f"certificate lifetime {lifetime} s: it has to be positive")
        return self._sign(sandbox_id, names, ExtendedKeyUsageOID.SERVER_AUTH, lifetime, key)

    def client_options(
        self, sandbox_id: str, known_key: Callable[[], KnownKey] = KnownKey
    ) -> IOpenSSLClientConnectionCreator:
        """Return what makes TLS connections to that sandbox's agent and to no other.

        They trust this CA alone, present the node's certificate, and fail unless the agent's certificate
        names the sandbox. The result may be used for any number of connections, at any time.

        :param known_key: gives the key of the last certificate that this VM was given.
        :raise InvalidArgument: the id can't be a DNS label.
        """
        return _ClientCreator(self, vm_name(sandbox_id), known_key)

    def client_context(self) -> SSL.Context:
        """Return the TLS context of all connections to agents, with credentials that are still valid."""
        if self._clock() > self._context_until - NODE_RENEWAL_SECONDS:
            self._context, self._context_until = self._make_context()
        return self._context

    def _make_context(self) -> tuple[SSL.Context, float]:
        """Return a context with new credentials, and the time until which they are valid."""
        names = [x509.UniformResourceIdentifier(NODE_URI)]
        node = self._issue("infranetes node", names, ExtendedKeyUsageOID.CLIENT_AUTH, NODE_LIFETIME_SECONDS)
        options = CertificateOptions(
            **_key_and_certificate(node),
            trustRoot=trustRootFromCertificates([Certificate.loadPEM(self._ca.certificate_pem)]),
            raiseMinimumTo=TLSVersion.TLSv1_3,  # it has no renegotiation
            acceptableProtocols=[b"h2"],
        )
        return options.getContext(), self._clock() + NODE_LIFETIME_SECONDS

    def _issue(
        self, name: str, names: Sequence[x509.GeneralName], usage: ObjectIdentifier, lifetime: float
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        return Pair(key, self._sign(name, names, usage, lifetime, key.public_key()))

    def _sign(
        self,
        name: str,
        names: Sequence[x509.GeneralName],
        usage: ObjectIdentifier,
        lifetime: float,
        key: ec.EllipticCurvePublicKey,
    ) -> x509.Certificate:
        ca = self._ca.certificate
        end = min(moment(self._clock() + lifetime), not_after(ca))
        return (
            builder(name, ca.subject, key, self._clock(), end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._ca.key.public_key()), critical=False
            )
            .sign(self._ca.key, hashes.SHA256())
        )

    def _load_or_create(self) -> Pair:
        directory = self._path.parent
        try:
            if not self._given:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                directory.chmod(0o700)
                if not self._path.exists():
                    _write_new(self._path, self._create())
            mode = self._path.stat().st_mode & 0o777
            document = self._path.read_bytes()
        except OSError as e:
            if self._given:
                raise ConfigError(f"ca: {self._path} can't be read: {e.strerror}") from None
            raise ConfigError(
                f"state_dir: the node's CA can't be kept in {directory}: {e.strerror}"
            ) from None
        if mode & 0o077:
            raise FailedPrecondition(
                f"the node's CA key {self._path} may be read by others (mode {mode:04o}). {self._remedy()}"
            )
        return self._check(document)

    def _create(self) -> bytes:
        key = ec.generate_private_key(ec.SECP256R1())
        now = self._clock()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "infranetes node CA")])
        certificate = (
            builder("infranetes node CA", subject, key.public_key(), now, moment(now + CA_LIFETIME_SECONDS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        pair = Pair(key, certificate)
        return pair.key_pem + pair.certificate_pem

    def _check(self, document: bytes) -> Pair:
        try:
            begin = _KEY.search(document)  # the file may have more in it, in any order
            if begin is None:
                raise ValueError("it has no private key")
            key = serialization.load_pem_private_key(document[begin.start() :], password=None)
            certificate = x509.load_pem_x509_certificate(document[document.index(b"-----BEGIN CERT") :])
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise ValueError("the key is not an EC key")
            public = key.public_key()
            if public.public_numbers() != certificate.public_key().public_numbers():  # type: ignore[union-attr]
                raise ValueError("the certificate does not belong to the key")
            public.verify(certificate.signature, certificate.tbs_certificate_bytes, ec.ECDSA(hashes.SHA256()))
            if not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
                raise ValueError("the certificate is not a CA certificate")
            if not_after(certificate) <= moment(self._clock()):
                raise ValueError("the certificate has expired")
        except InvalidSignature:
            raise FailedPrecondition(
                f"the node's CA {self._path} is broken: its certificate is not signed with its own key. "
                f"{self._remedy()}"
            ) from None
        except (ValueError, TypeError, AttributeError, x509.ExtensionNotFound) as e:
            why = str(e).splitlines()[0][:100] if str(e) else type(e).__name__
            raise FailedPrecondition(
                f"the node's CA {self._path} is broken: {why}. {self._remedy()}"
            ) from None
        return Pair(key, certificate)

    def _remedy(self) -> str:
        if self._given:
            return (
                "ca names a PEM file, mode 0600, with the CA's certificate and its EC key: "
                "it signs each VM's certificate"
            )
        return (
            "Put the file back from a copy, or move it away to have a new CA made: the node then can "
            "no longer reach VMs that are running now"
        )


@implementer(IOpenSSLClientConnectionCreator)
class _ClientCreator:
    """Makes connections to the VM with one name, all of the authority's context."""

    def __init__(self, authority: Authority, name: str, known_key: Callable[[], KnownKey]) -> None:
        self._authority = authority
        self._name = name
        self._known_key = known_key

    def clientConnectionForTLS(self, tlsProtocol: TLSMemoryBIOProtocol) -> SSL.Connection:
        connection = SSL.Connection(self._authority.client_context(), None)
        connection.set_app_data(tlsProtocol)
        connection.set_tlsext_host_name(self._name.encode())
        connection.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, self._verify)
        return connection

    def _verify(
        self, connection: SSL.Connection, certificate: crypto.X509, errno: int, depth: int, ok: int
    ) -> bool:
        if depth:
            return bool(ok)
        if not ok:  # if this accepts it, the method is called again, and the name is compared then
            return errno == _EXPIRED and self._is_known(certificate)
        # Our names have no wildcards and one spelling, so they are compared as they are.
        # service-identity can't be asked: it fails on any URI with two colons beside the name.
        try:
            names = certificate.to_cryptography().extensions.get_extension_for_class(
                x509.SubjectAlternativeName
            )
            if names.value.get_values_for_type(x509.DNSName) != [self._name]:
                return False
            return self._is_vouched_for(certificate.to_cryptography())
        except Exception:  # whatever is wrong with the certificate, the handshake ends here
            return False

    def _is_vouched_for(self, certificate: x509.Certificate) -> bool:
        """Return whether the VM's processor has vouched for a certificate's key, or need not."""
        vouched = self._known_key().vouched
        if vouched is None:
            return True
        return key_id(certificate.public_key()) == vouched.id or signed_at(certificate) > vouched.at

    def _is_known(self, certificate: crypto.X509) -> bool:
        try:
            known = self._known_key().id
            return bool(known) and key_id(certificate.to_cryptography().public_key()) == known
        except Exception:
            return False


def _key_and_certificate(pair: Pair) -> dict[str, Any]:  # Any: Twisted types neither
    loaded = PrivateCertificate.loadPEM(pair.key_pem + pair.certificate_pem)
    return {"privateKey": loaded.privateKey.original, "certificate": loaded.original}


def _write_new(path: Path, document: bytes) -> None:
    """Create a file with the content `document` and mode 0600, unless it exists."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    for stale in path.parent.glob(f".{path.name}.*"):
        stale.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(document)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another daemon was faster, and its CA is used
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
