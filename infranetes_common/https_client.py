# SPDX-License-Identifier: Apache-2.0
"""What clients of HTTPS share: whom they trust, how they prove who they are, and what went wrong."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from twisted.internet.ssl import (
    Certificate,
    PrivateCertificate,
    optionsForClientTLS,
    platformTrust,
    trustRootFromCertificates,
)
from twisted.web.iweb import IPolicyForHTTPS
from zope.interface import implementer

if TYPE_CHECKING:
    from twisted.internet._sslverify import IOpenSSLTrustRoot

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def machine_trust() -> IOpenSSLTrustRoot:
    """Return trust in the machine's own CAs."""
    trust: IOpenSSLTrustRoot = platformTrust()
    return trust


def trust_in(pem: bytes) -> IOpenSSLTrustRoot | None:
    """Return trust in the CAs of a PEM document; None: it has none.

    :raise Exception: one can't be read. OpenSSL's errors have no common base."""
    roots = [Certificate.loadPEM(root) for root in _PEM.findall(pem)]
    return trustRootFromCertificates(roots) if roots else None


@implementer(IPolicyForHTTPS)
class TlsPolicy:
    """The TLS policy of a `twisted.web.client.Agent`.

    :param own: the client's certificate and key; None: it has none.
    :param server_name: that the server's certificate has to have; "": the URL's."""

    def __init__(
        self, trust: IOpenSSLTrustRoot, own: PrivateCertificate | None = None, server_name: str = ""
    ) -> None:
        self._trust = trust
        self._own = own
        self._server_name = server_name

    def creatorForNetloc(self, hostname: bytes, port: int) -> IOpenSSLClientConnectionCreator:
        name = self._server_name or hostname.decode("ascii")
        options: IOpenSSLClientConnectionCreator = optionsForClientTLS(name, self._trust, self._own)
        return options


def error_words(error: Exception) -> str:
    """Return the message of an error. Some errors of twisted.web hold lists of Failures."""
    reasons = getattr(error, "reasons", None)
    return "; ".join(reason.getErrorMessage() for reason in reasons) if reasons else str(error)
