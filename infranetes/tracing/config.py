# SPDX-License-Identifier: Apache-2.0
"""The table ``[tracing]``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
from attrs.validators import ge, le

from infranetes_common import config_outside as outside
from infranetes_common import http_headers
from infranetes_common.http_headers import is_absolute, is_url

_HEADERS_FILE = "tracing.headers_file"


@attrs.frozen
class TracingConfig:
    """Where traces are sent, and which calls are recorded."""

    # The URL at which a collector takes OTLP over HTTP. Empty: nothing is recorded.
    endpoint: str = attrs.field(
        default="", validator=is_url, metadata=outside.names(outside.never("no collector was asked"))
    )
    # The share of calls that is recorded, among those whose caller does not decide it.
    sampling_ratio: float = attrs.field(default=0.0, validator=[ge(0.0), le(1.0)])
    headers_file: str = attrs.field(  # sent with each request; mode 0600
        default="", validator=is_absolute, metadata=outside.names(lambda path: _headers(path))
    )


def _headers(path: str) -> Iterator[outside.Finding]:
    return outside.tried(lambda: read_headers(path), _HEADERS_FILE)


def read_headers(path: str) -> Mapping[str, str]:
    """Read the file of headers for the collector. Blocks. Raises as `http_headers.read_headers`."""
    return http_headers.read_headers(path, _HEADERS_FILE)
