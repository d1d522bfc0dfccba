# SPDX-License-Identifier: Apache-2.0
"""X.509 certificates of the node and its VMs: their content, creation and names."""

from __future__ import annotations

import datetime
import hashlib
import re
from typing import TYPE_CHECKING

import attrs
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from infranetes_common.errors import InvalidArgument

if TYPE_CHECKING:  # not in Debian 12's cryptography
    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes

NODE_URI = "infranetes:node"
VM_URI_PREFIX = "infranetes:vm:"
NODE_AT_URI_PREFIX = "infranetes:node-at:"  # in VMs' certificates: an address or a network of the node
VM_DOMAIN = "vm.infranetes.internal"

BACKDATE_SECONDS = 300  # a guest's clock may be this much behind the node's

_SANDBOX_ID = re.compile(r"[0-9a-z](?:[0-9a-z-]{0,61}[0-9a-z])?")


def vm_name(sandbox_id: str) -> str:
    """Return the DNS name in a VM's certificate.

    :raise InvalidArgument: the id can't be a DNS label.
    """
    if not _SANDBOX_ID.fullmatch(sandbox_id):
        raise InvalidArgument(f"sandbox id {sandbox_id!r}: 1 to 63 of 0-9, a-z and - are allowed")
    return f"{sandbox_id}.{VM_DOMAIN}"


@attrs.frozen
class Pair:
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


def key_id(key: CertificatePublicKeyTypes) -> str:
    """Return the SHA-256 of a public key (its SubjectPublicKeyInfo), hex."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def signed(certificate: x509.Certificate, key_pem: str) -> Signed:
    """Return a VM's certificate with what the node remembers of it."""
    pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
    until = not_after(certificate).timestamp()
    return Signed(pem, key_pem, key_id(certificate.public_key()), until)


def builder(
    name: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: float,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    """Begin a certificate: its names, key and validity."""
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(moment(now - BACKDATE_SECONDS))
        .not_valid_after(end)
    )


def key_usage(signs_certificates: bool) -> x509.KeyUsage:
    """Return the key usage of a CA, or of anything else."""
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


def moment(seconds: float) -> datetime.datetime:
    """Return a time given in seconds since 1970 UTC."""
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def signed_at(certificate: x509.Certificate) -> float:
    """Return when a certificate of `builder` was made, whole seconds since 1970 UTC."""
    try:
        begin = certificate.not_valid_before_utc
    except AttributeError:  # cryptography before 42
        begin = certificate.not_valid_before.replace(tzinfo=datetime.UTC)
    return begin.timestamp() + BACKDATE_SECONDS


def not_after(certificate: x509.Certificate) -> datetime.datetime:
    """Return when a certificate expires."""
    try:
        return certificate.not_valid_after_utc
    except AttributeError:  # cryptography before 42
        return certificate.not_valid_after.replace(tzinfo=datetime.UTC)
