# SPDX-License-Identifier: Apache-2.0
"""Who may see what is served: the token and the TLS certificate, read from their files."""

from __future__ import annotations

import base64
import binascii
import hmac
import re
import stat
from pathlib import Path

from cryptography.x509 import DNSName, ExtensionNotFound, SubjectAlternativeName
from OpenSSL import crypto
from twisted.internet.ssl import CertificateOptions, TLSVersion

from infranetes_common.errors import FailedPrecondition

MAX_BYTES = 1 << 20  # the most that is read of a file
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.S)


class Token:
    """A secret that clients have to send."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def is_shown(self, authorization: bytes) -> bool:
        """Whether an Authorization header shows it: as a bearer token, or as the password of any user.

        Browsers ask people for the latter. A wrong token takes as long to compare as the right one."""
        scheme, _, credentials = authorization.partition(b" ")
        shown = credentials.strip()
        if scheme.lower() == b"basic":
            try:
                shown = base64.b64decode(shown, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(shown, self._secret)


def _thd_read(key: str, path: str, *, secret: bool) -> bytes:
    """Read a file. :raise FailedPrecondition: it can't be read, or it is secret and others may read it."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(Path(path).stat().st_mode)
            content = file.read(MAX_BYTES)
    except OSError as error:
        raise FailedPrecondition(f"{key}: {path} can't be read: {error.strerror}") from None
    if secret and mode & 0o007:
        raise FailedPrecondition(f"{key}: {path} may be read by others (mode {mode:04o}): chmod o= {path}")
    return content


def thd_read_token(path: str) -> Token:
    """Read a token. :raise FailedPrecondition: what is wrong with the file."""
    key = "metrics.token_file"
    secret = _thd_read(key, path, secret=True).strip()
    if len(secret) < 16 or not secret.isascii() or len(secret.split()) != 1:
        raise FailedPrecondition(
            f"{key}: {path} has to hold one word of at least 16 characters: openssl rand -hex 32 >{path}"
        )
    return Token(secret)


def thd_read_tls(certificate: str, key: str) -> CertificateOptions:
    """Read a server's certificate and key. :raise FailedPrecondition: what is wrong with the files."""
    chain = _CERTIFICATE.findall(_thd_read("metrics.certificate_file", certificate, secret=False))
    private = _thd_read("metrics.key_file", key, secret=True)
    try:
        own, *others = [crypto.load_certificate(crypto.FILETYPE_PEM, each) for each in chain]
        options = CertificateOptions(
            privateKey=crypto.load_privatekey(crypto.FILETYPE_PEM, private, passphrase=b""),
            certificate=own,
            extraCertChain=others,
            raiseMinimumTo=TLSVersion.TLSv1_2,
        )
        options.getContext().check_privatekey()
    except Exception as error:  # OpenSSL's errors have no common class, and differ between releases
        raise FailedPrecondition(
            f"metrics.certificate_file, metrics.key_file: {certificate} and {key} are not a certificate and "
            f"its key in PEM: {type(error).__name__}"
        ) from None
    return options


def certificate_names(tls: CertificateOptions) -> list[str]:
    """List the host names of a server's certificate, among them patterns such as ``*.example.com``."""
    assert tls.certificate is not None
    try:
        names = tls.certificate.to_cryptography().extensions.get_extension_for_class(SubjectAlternativeName)
    except ExtensionNotFound:
        return []
    return list(names.value.get_values_for_type(DNSName))
