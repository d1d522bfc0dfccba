# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests, made when they are needed."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from twisted.internet.ssl import Certificate, PrivateCertificate

_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


class Authority:
    """A CA of its own."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.pem = self._sign(name, self._name, self._key.public_key(), ca=True)
        self.certificate = Certificate.loadPEM(self.pem)

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """A certificate for the DNS name `name`, and its key, in PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return self._sign(name, subject, key.public_key(), ca=False), pem

    def private(self, name: str) -> PrivateCertificate:
        """The same as Twisted takes it."""
        certificate, key = self.issue(name)
        private: PrivateCertificate = PrivateCertificate.loadPEM(certificate + key)
        return private

    def _sign(self, name: str, subject: x509.Name, key: ec.EllipticCurvePublicKey, ca: bool) -> bytes:
        now = datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            # Python 3.13 and later want these, and the key usage of an authority.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        if ca:
            builder = builder.add_extension(_SIGNS, critical=True)
        signed = builder.sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)
