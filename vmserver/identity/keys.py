# SPDX-License-Identifier: Apache-2.0
"""New keys of a running machine: the node signs a certificate, and the key never leaves the machine."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import attrs
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.identity import Identity

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes  # in newer releases only

MAX_CERTIFICATE = 16 * 1024


class PendingKey:
    """The key whose certificate has been requested. A new request replaces it."""

    def __init__(self) -> None:
        self._key: ec.EllipticCurvePrivateKey | None = None

    def request(self, sandbox_id: str) -> bytes:
        """Make a key and return the PKCS #10 request for its certificate, DER."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, sandbox_id)])
        builder = x509.CertificateSigningRequestBuilder().subject_name(name)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)

    def renewed(self, identity: Identity, certificate_pem: str) -> Identity:
        """Return `identity` with the pending key and its certificate. Idempotent: the key stays pending.

        :raise InvalidArgument: no certificate, or not of the identity's CA.
        :raise FailedPrecondition: it is for another key.
        """
        if len(certificate_pem) > MAX_CERTIFICATE:
            raise InvalidArgument(f"certificate: over {MAX_CERTIFICATE} characters")
        try:
            certificate = x509.load_pem_x509_certificate(certificate_pem.encode())
            authority = x509.load_pem_x509_certificate(identity.ca_pem.encode())
            public = authority.public_key()
            if not isinstance(public, ec.EllipticCurvePublicKey):
                raise ValueError
            public.verify(certificate.signature, certificate.tbs_certificate_bytes, ec.ECDSA(hashes.SHA256()))
        except (ValueError, TypeError, InvalidSignature):
            raise InvalidArgument("certificate: it is no PEM certificate that this VM's CA signed") from None
        if _spki(certificate.public_key()) != (self._key and _spki(self._key.public_key())):
            raise FailedPrecondition(
                "certificate: it is not for the key that NewKey made last; ask for a new key"
            )
        assert self._key is not None
        key_pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return attrs.evolve(identity, certificate_pem=certificate_pem, key_pem=key_pem.decode())


def key_of(certificate_pem: str) -> str:
    """Return the SHA-256 of a certificate's public key (its SubjectPublicKeyInfo), hex."""
    return hashlib.sha256(
        _spki(x509.load_pem_x509_certificate(certificate_pem.encode()).public_key())
    ).hexdigest()


def _spki(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
