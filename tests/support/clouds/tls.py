# SPDX-License-Identifier: Apache-2.0
"""A self-signed certificate for 127.0.0.1."""

from __future__ import annotations

import datetime
from functools import lru_cache
from ipaddress import ip_address
from typing import Any

import attrs
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from OpenSSL import crypto
from twisted.internet.ssl import CertificateOptions


@attrs.frozen
class Certificate:
    """The certificate, for clients to trust, and the server's key."""

    pem: bytes
    options: Any


@lru_cache
def certificate() -> Certificate:
    """Return the certificate shared by all tests of this process."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    options = CertificateOptions(
        privateKey=crypto.PKey.from_cryptography_key(key),
        certificate=crypto.X509.from_cryptography(made),
        acceptableProtocols=[b"http/1.1"],  # which the library `requests` asks for
    )
    return Certificate(pem, options)
