# SPDX-License-Identifier: Apache-2.0
"""The table ``[attestation]``."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from attrs.validators import gt

from infranetes_common import config_outside as outside
from infranetes_common.http_headers import is_absolute, is_url, read_headers

HEADERS_FILE = "attestation.headers_file"


@attrs.frozen
class AttestationConfig:
    """Who judges the reports on confidential VMs."""

    # The URL to which each report is posted. Empty: reports are kept with their pods, and nobody judges them.
    url: str = attrs.field(
        default="", validator=is_url, metadata=outside.names(outside.never("the service was not asked"))
    )
    # The CAs of its certificate, PEM. Empty: the machine's.
    ca: str = attrs.field(default="", validator=is_absolute, metadata=outside.names(outside.file))
    headers_file: str = attrs.field(  # sent with each request; mode 0600
        default="", validator=is_absolute, metadata=outside.names(lambda path: _headers(path))
    )
    seconds: float = attrs.field(default=30.0, validator=gt(0))  # for one report

    def __attrs_post_init__(self) -> None:
        if self.url.startswith("http://") and not self.url.startswith(("http://127.0.0.1:", "http://[::1]:")):
            raise ValueError("attestation.url: a verdict has to come by https, or from 127.0.0.1")


def _headers(path: str) -> Iterator[outside.Finding]:
    return outside.tried(lambda: read_headers(path, HEADERS_FILE), HEADERS_FILE)
