# SPDX-License-Identifier: Apache-2.0
"""The cluster's certificates and kubeconfigs, which are valid for a day."""

from __future__ import annotations

import datetime
import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


class Authority:
    """The CA of one cluster. `directory` holds the certificates that it issues, and the kubeconfigs.

    :ivar certificate: the CA's own, in PEM."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.certificate = directory / "ca.crt"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cluster")])
        directory.mkdir(mode=0o700, parents=True)
        self._write(self.certificate, self._signed(self._name, self._key, [], authority=True))

    def issue(self, user: str, groups: Sequence[str] = (), names: Sequence[str] = ()) -> tuple[Path, Path]:
        """Issue a certificate and key for a client that is also a server at `names` (hosts, addresses)."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, user)]
        subject += [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        stem = user.replace(":", "-")
        certificate_path, key_path = self.directory / f"{stem}.crt", self.directory / f"{stem}.key"
        self._write(certificate_path, self._signed(x509.Name(subject), key, names))
        self._write(key_path, _pem(key))
        return certificate_path, key_path

    def kubeconfig(self, user: str, server: str, groups: Sequence[str] = ()) -> Path:
        """Write a kubeconfig with which that user reaches the API server; return its path."""
        certificate, key = self.issue(user, groups)
        cluster = {"server": server, "certificate-authority": str(self.certificate)}
        identity = {"client-certificate": str(certificate), "client-key": str(key)}
        path = certificate.with_suffix(".conf")
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "cluster", "cluster": cluster}],
            "users": [{"name": user, "user": identity}],
            "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": user}}],
            "current-context": "cluster",
        }
        self._write(path, json.dumps(document, indent=2).encode())
        return path

    def signing_key(self, name: str) -> tuple[Path, Path]:
        """Make a key pair that signs service accounts' tokens; return the private and public keys' paths."""
        key = ec.generate_private_key(ec.SECP256R1())
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        private_path, public_path = self.directory / f"{name}.key", self.directory / f"{name}.pub"
        self._write(private_path, _pem(key))
        self._write(public_path, public)
        return private_path, public_path

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        names: Sequence[str],
        authority: bool = False,
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if not authority:
            usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if names:
            alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names])
            builder = builder.add_extension(alternatives, critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    def _write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)
        path.chmod(0o600)
