# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests, both valid and invalid, made when they are needed."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import attrs
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from OpenSSL import SSL, crypto

from infranetes_common.identity import Identity

NODE_URI = "infranetes:node"
CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
DAY = datetime.timedelta(days=1)
NO_TIME = datetime.timedelta(0)


@attrs.frozen
class Pair:
    """A certificate and its key, PEM."""

    certificate: str
    key: str


class Authority:
    """A CA for one test."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test CA")])
        builder = self._builder(self._key, self._name, datetime.timedelta(0))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._certificate = builder.sign(self._key, hashes.SHA256())

    @property
    def pem(self) -> str:
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    def issue(
        self,
        name: str,
        names: Sequence[x509.GeneralName],
        usage: x509.ObjectIdentifier,
        *,
        shift: datetime.timedelta = NO_TIME,
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(key, subject, shift)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Pair(
            certificate.public_bytes(serialization.Encoding.PEM).decode(),
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ).decode(),
        )

    def _builder(
        self, key: ec.EllipticCurvePrivateKey, subject: x509.Name, shift: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC) + shift
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + 2 * DAY)
        )

    def node(self, shift: datetime.timedelta = NO_TIME) -> Pair:
        return self.issue("node", [x509.UniformResourceIdentifier(NODE_URI)], CLIENT, shift=shift)

    def vm(self, sandbox_id: str, usage: x509.ObjectIdentifier = SERVER) -> Pair:
        names = [
            x509.DNSName(f"{sandbox_id}.vm.infranetes.internal"),
            x509.UniformResourceIdentifier(f"infranetes:vm:{sandbox_id}"),
        ]
        return self.issue(sandbox_id, names, usage)

    def identity(self, sandbox_id: str, **fields: object) -> Identity:
        pair = self.vm(sandbox_id)
        values: dict[str, object] = {"listen": "127.0.0.1:0", **fields}
        return Identity(
            sandbox_id=sandbox_id,
            certificate_pem=pair.certificate,
            key_pem=pair.key,
            ca_pem=self.pem,
            **values,  # type: ignore[arg-type]
        )


def client_context(ca_pem: str, pair: Pair | None) -> SSL.Context:
    """Return a TLS client's context that trusts that CA and presents that certificate."""
    context = SSL.Context(SSL.TLS_METHOD)
    store = context.get_cert_store()
    assert store is not None
    store.add_cert(crypto.load_certificate(crypto.FILETYPE_PEM, ca_pem.encode()))
    context.set_verify(SSL.VERIFY_PEER, lambda connection, certificate, error, depth, good: bool(good))
    context.set_alpn_protos([b"h2"])
    if pair is not None and pair.certificate:
        context.use_certificate(crypto.load_certificate(crypto.FILETYPE_PEM, pair.certificate.encode()))
        context.use_privatekey(crypto.load_privatekey(crypto.FILETYPE_PEM, pair.key.encode()))
    return context
