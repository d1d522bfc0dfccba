# SPDX-License-Identifier: Apache-2.0
"""Certificates for servers on this machine, without identifiers of keys."""

from __future__ import annotations

import datetime
import ipaddress

import attrs
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@attrs.frozen
class Issued:
    """A certificate and what it was signed by, as PEM."""

    authority: bytes
    certificate: bytes
    key: bytes


def make_certificate(name: str) -> tuple[bytes, bytes]:
    """Return a certificate for 127.0.0.1 and localhost, which is its own CA, and its key, both as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    return _pem(_certificate(name, name, key, key, authority=True)), _key_pem(key)


def issue_certificate(name: str) -> Issued:
    """Return a certificate for 127.0.0.1 and localhost of a CA that is another one."""
    signing, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _certificate("authority", "authority", signing, signing, authority=True)
    return Issued(
        _pem(authority),
        _pem(_certificate(name, "authority", key, signing, authority=False)),
        _key_pem(key),
    )


def _certificate(
    name: str,
    issuer: str,
    key: ec.EllipticCurvePrivateKey,
    signing: ec.EllipticCurvePrivateKey,
    *,
    authority: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    length = 0 if authority else None
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=length), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(signing, hashes.SHA256())
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
