"""The node's certificate authority: who a VM is, and who the node is to a VM.

One ECDSA P-256 key pair signs everything. `STATE_DIR/ca/authority.pem` (mode 0600 in a directory of
mode 0700) holds its key and certificate and is the only thing kept on disk; the node's own client
credentials live in memory and are made anew before they run out.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
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
from OpenSSL import SSL
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from twisted.internet.ssl import (
    Certificate,
    CertificateOptions,
    PrivateCertificate,
    TLSVersion,
    trustRootFromCertificates,
)
from zope.interface import implementer

from infranetes_common.errors import ConfigError, FailedPrecondition, InvalidArgument

NODE_URI = "infranetes:node"
VM_URI_PREFIX = "infranetes:vm:"
VM_DOMAIN = "vm.infranetes.internal"

BACKDATE_SECONDS = 300  # a guest's clock may be this much behind the node's
CA_LIFETIME_SECONDS = 20 * 365 * 86400
NODE_LIFETIME_SECONDS = 7 * 86400
NODE_RENEWAL_SECONDS = 86400  # credentials are replaced once they have less than this to live

_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED of <openssl/x509_vfy.h>
_KEY = re.compile(rb"-----BEGIN (EC )?PRIVATE KEY-----")
_SANDBOX_ID = re.compile(r"[0-9a-z](?:[0-9a-z-]{0,61}[0-9a-z])?")


def vm_name(sandbox_id: str) -> str:
    """The DNS name in a VM's certificate.

    :raise InvalidArgument: the id can't be a DNS label.
    """
    if not _SANDBOX_ID.fullmatch(sandbox_id):
        raise InvalidArgument(f"sandbox id {sandbox_id!r}: 1 to 63 of 0-9, a-z and - are allowed")
    return f"{sandbox_id}.{VM_DOMAIN}"


@attrs.frozen
class _Pair:
    """A private key and its certificate."""

    key: ec.EllipticCurvePrivateKey = attrs.field(repr=False)
    certificate: x509.Certificate

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)


@attrs.frozen
class Signed:
    """A VM's certificate, and what the node remembers of it."""

    certificate_pem: str
    key_pem: str = attrs.field(repr=False)  # "": the VM made the key itself
    key_id: str  # SHA-256 of the public key (its SubjectPublicKeyInfo), hex
    until: float  # seconds since 1970 UTC at which it expires


class Authority:
    """Issues and checks the certificates of one node and its VMs.

    Creates the CA in `state_dir` the first time. Being killed in the middle of that leaves nothing
    that counts; from then on the same CA is loaded for as long as the state directory lives.

    :param clock: seconds since 1970 UTC.
    :param path: somebody's own CA in place of ours: certificate and key, PEM; it is never written.
    :raise ConfigError: the state directory can't be written, or that file not be read.
    :raise FailedPrecondition: a CA is there and unusable; the message says why and what to do.
    """

    def __init__(
        self, state_dir: Path | str, clock: Callable[[], float] = time.time, path: Path | str = ""
    ) -> None:
        self._clock = clock
        self._given = bool(path)
        self._path = Path(path) if path else Path(state_dir) / "ca" / "authority.pem"
        self._ca = self._load_or_create()
        self._context: Any = None
        self._context_until = 0.0

    @property
    def ca_pem(self) -> str:
        """The CA's certificate: what a VM trusts."""
        return self._ca.certificate_pem.decode()

    def issue_vm(self, sandbox_id: str, lifetime_seconds: float) -> tuple[str, str]:
        """A new key and server certificate for one sandbox's VM, as PEM: (certificate, key).

        Never valid for longer than the CA itself.

        :raise InvalidArgument: the id can't be a DNS label, or the lifetime is not positive.
        """
        signed = self.issue(sandbox_id, lifetime_seconds)
        return signed.certificate_pem, signed.key_pem

    def issue(self, sandbox_id: str, lifetime_seconds: float) -> Signed:
        """As `issue_vm`, with what there is to be remembered."""
        key = ec.generate_private_key(ec.SECP256R1())
        pair = _Pair(key, self._sign_vm(sandbox_id, key.public_key(), lifetime_seconds))
        return _signed(pair.certificate, pair.key_pem.decode())

    def sign(self, sandbox_id: str, request: bytes, lifetime_seconds: float) -> Signed:
        """A server certificate for a key that the sandbox's VM has made itself.

        Of the request nothing counts but the public key: who the VM is the node knows better.

        :param request: PKCS #10, DER.
        :raise InvalidArgument: no such request, not signed by its own key, or not for P-256.
        """
        try:
            asked = x509.load_der_x509_csr(request)
            key = asked.public_key()
            if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)):
                raise ValueError("its key is not of P-256")
            if not asked.is_signature_valid:
                raise ValueError("it is not signed by its own key")
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InvalidArgument(
                f"the VM of sandbox {sandbox_id} asks for a certificate amiss: {str(error)[:100]}"
            ) from None
        return _signed(self._sign_vm(sandbox_id, key, lifetime_seconds), "")

    def _sign_vm(self, sandbox_id: str, key: ec.EllipticCurvePublicKey, lifetime: float) -> x509.Certificate:
        names = [
            x509.DNSName(vm_name(sandbox_id)),
            x509.UniformResourceIdentifier(VM_URI_PREFIX + sandbox_id),
        ]
        if lifetime <= 0:
            raise InvalidArgument(f"certificate lifetime {lifetime} s: it has to be positive")
        return self._sign(sandbox_id, names, ExtendedKeyUsageOID.SERVER_AUTH, lifetime, key)

    def client_options(
        self, sandbox_id: str, known_key: Callable[[], str] = lambda: ""
    ) -> IOpenSSLClientConnectionCreator:
        """How to connect to that sandbox's agent and to nobody else.

        Trusts this CA alone, shows the node's certificate, and ends the handshake unless the other
        side's certificate names the sandbox. Good for any number of connections at any time.

        :param known_key: the `key_id` of the last certificate that this VM was given. That one counts
            also when it has expired: it could not be replaced while no daemon ran.
        :raise InvalidArgument: the id can't be a DNS label.
        """
        return _ClientCreator(self, vm_name(sandbox_id), known_key)

    def client_context(self) -> Any:
        """The one SSL.Context of all connections to agents, with fresh enough credentials."""
        if self._context is None or self._clock() > self._context_until - NODE_RENEWAL_SECONDS:
            names = [x509.UniformResourceIdentifier(NODE_URI)]
            node = self._issue(
                "infranetes node", names, ExtendedKeyUsageOID.CLIENT_AUTH, NODE_LIFETIME_SECONDS
            )
            options = CertificateOptions(
                **_key_and_certificate(node),
                trustRoot=trustRootFromCertificates([Certificate.loadPEM(self._ca.certificate_pem)]),
                raiseMinimumTo=TLSVersion.TLSv1_2,
                acceptableProtocols=[b"h2"],
            )
            self._context = options.getContext()
            self._context_until = self._clock() + NODE_LIFETIME_SECONDS
        return self._context

    def _issue(
        self, name: str, names: Sequence[x509.GeneralName], usage: ObjectIdentifier, lifetime: float
    ) -> _Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        return _Pair(key, self._sign(name, names, usage, lifetime, key.public_key()))

    def _sign(
        self,
        name: str,
        names: Sequence[x509.GeneralName],
        usage: ObjectIdentifier,
        lifetime: float,
        key: ec.EllipticCurvePublicKey,
    ) -> x509.Certificate:
        ca = self._ca.certificate
        end = min(_moment(self._clock() + lifetime), _not_after(ca))
        return (
            _builder(name, ca.subject, key, self._clock(), end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._ca.key.public_key()), critical=False
            )
            .sign(self._ca.key, hashes.SHA256())
        )

    def _load_or_create(self) -> _Pair:
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
            _builder("infranetes node CA", subject, key.public_key(), now, _moment(now + CA_LIFETIME_SECONDS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        pair = _Pair(key, certificate)
        return pair.key_pem + pair.certificate_pem

    def _check(self, document: bytes) -> _Pair:
        try:
            begin = _KEY.search(document)  # whatever else is in the file, in whatever order
            if begin is None:
                raise ValueError("it has no private key")
            key = serialization.load_pem_private_key(document[begin.start() :], password=None)
            certificate = x509.load_pem_x509_certificate(document[document.index(b"-----BEGIN CERT") :])
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise ValueError("the key is not an EC key")
            public = key.public_key()
            if public.public_numbers() != certificate.public_key().public_numbers():  # type: ignore[union-attr]
                raise ValueError("the certificate is not the key's")
            public.verify(certificate.signature, certificate.tbs_certificate_bytes, ec.ECDSA(hashes.SHA256()))
            if not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
                raise ValueError("the certificate is not a CA's")
            if _not_after(certificate) <= _moment(self._clock()):
                raise ValueError("the certificate has expired")
        except InvalidSignature:
            raise FailedPrecondition(
                f"the node's CA {self._path} is broken: its certificate is not its own. {self._remedy()}"
            ) from None
        except (ValueError, TypeError, AttributeError, x509.ExtensionNotFound) as e:
            why = str(e).splitlines()[0][:100] if str(e) else type(e).__name__
            raise FailedPrecondition(
                f"the node's CA {self._path} is broken: {why}. {self._remedy()}"
            ) from None
        return _Pair(key, certificate)

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
    """Connections of the authority's shared context, each bound to one name."""

    def __init__(self, authority: Authority, name: str, known_key: Callable[[], str]) -> None:
        self._authority = authority
        self._name = name
        self._known_key = known_key

    def clientConnectionForTLS(self, tlsProtocol: Any) -> Any:
        connection = SSL.Connection(self._authority.client_context(), None)
        connection.set_app_data(tlsProtocol)
        connection.set_tlsext_host_name(self._name.encode())
        connection.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, self._verify)
        return connection

    def _verify(self, connection: Any, certificate: Any, errno: int, depth: int, ok: int) -> bool:
        if depth:
            return bool(ok)
        if not ok:  # asked again when this is answered with yes; then the name is compared
            return errno == _EXPIRED and self._is_known(certificate)
        # Our names have no wildcards and one spelling, so they are compared as they are.
        # service-identity can't be asked: it fails on any URI with two colons beside the name.
        try:
            names = certificate.to_cryptography().extensions.get_extension_for_class(
                x509.SubjectAlternativeName
            )
            return bool(names.value.get_values_for_type(x509.DNSName) == [self._name])
        except Exception:  # whatever is wrong with the certificate, the handshake ends here
            return False

    def _is_known(self, certificate: Any) -> bool:
        try:
            known = self._known_key()
            return bool(known) and key_id(certificate.to_cryptography().public_key()) == known
        except Exception:
            return False


def key_id(key: Any) -> str:
    """What a public key is remembered by: SHA-256 of its SubjectPublicKeyInfo, hex."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def _signed(certificate: x509.Certificate, key_pem: str) -> Signed:
    pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
    until = _not_after(certificate).timestamp()
    return Signed(pem, key_pem, key_id(certificate.public_key()), until)


def _key_and_certificate(pair: _Pair) -> dict[str, Any]:
    loaded = PrivateCertificate.loadPEM(pair.key_pem + pair.certificate_pem)
    return {"privateKey": loaded.privateKey.original, "certificate": loaded.original}


def _builder(
    name: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: float,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_moment(now - BACKDATE_SECONDS))
        .not_valid_after(end)
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def _not_after(certificate: x509.Certificate) -> datetime.datetime:
    try:
        return certificate.not_valid_after_utc
    except AttributeError:  # cryptography before 42
        return certificate.not_valid_after.replace(tzinfo=datetime.UTC)


def _write_new(path: Path, document: bytes) -> None:
    """Bring a file into being with all of `document`, mode 0600, unless it is there already."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    for stale in path.parent.glob(f".{path.name}.*"):
        stale.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(document)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another daemon was faster; its CA it is
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
