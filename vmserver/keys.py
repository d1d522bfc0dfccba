"""The machine's own key, made anew while it runs: the node signs, and the key stays here."""

from __future__ import annotations

import attrs
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.identity import Identity

MAX_CERTIFICATE = 16 * 1024


class Keys:
    """At most one key that waits for its certificate; a new one takes its place."""

    def __init__(self) -> None:
        self._waiting: ec.EllipticCurvePrivateKey | None = None

    def request(self, sandbox_id: str) -> bytes:
        """Make a key; the PKCS #10 request for its certificate, DER."""
        self._waiting = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, sandbox_id)])
        builder = x509.CertificateSigningRequestBuilder().subject_name(name)
        return builder.sign(self._waiting, hashes.SHA256()).public_bytes(serialization.Encoding.DER)

    def renewed(self, identity: Identity, certificate_pem: str) -> Identity:
        """`identity` with the waiting key and its certificate. The key waits on, so this may be asked again.

        :raise InvalidArgument: no certificate, or not of the identity's CA.
        :raise FailedPrecondition: it is for another key."""
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
        if _spki(certificate.public_key()) != (self._waiting and _spki(self._waiting.public_key())):
            raise FailedPrecondition(
                "certificate: it is not for the key that NewKey made last; ask for a new key"
            )
        assert self._waiting is not None
        key = self._waiting.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return attrs.evolve(identity, certificate_pem=certificate_pem, key_pem=key.decode())


def _spki(key: object) -> bytes:
    return key.public_bytes(  # type: ignore[attr-defined,no-any-return]
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
