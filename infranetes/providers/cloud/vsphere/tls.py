# SPDX-License-Identifier: Apache-2.0
"""The TLS of all connections to a vCenter."""

from __future__ import annotations

import ssl
from pathlib import Path

from infranetes.providers.cloud.interface import CloudError, ErrorKind


def tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """Return a context that always verifies certificates and host names. It allows TLS 1.2, for older
    vCenters, without renegotiation."""
    try:
        context = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        return context
    except (OSError, ssl.SSLError) as error:
        raise CloudError(ErrorKind.INVALID, f"ca_file {ca_file} can't be used: {error}") from None
