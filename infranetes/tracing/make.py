# SPDX-License-Identifier: Apache-2.0
"""The tracer that the configuration asks for."""

from __future__ import annotations

from infranetes.tracing.config import TracingConfig, read_headers
from infranetes.tracing.spans import NullTracer, Tracer
from infranetes_common.errors import ConfigError
from infranetes_common.reactors import IReactor


def make_tracer(reactor: IReactor, config: TracingConfig, node: str, source: str = "configuration") -> Tracer:
    """Make the tracer. Blocks while it loads a library. Nothing is sent before a span has ended.

    :param node: the node's name. :param source: the configuration's file, which errors name.
    :raise ConfigError: the file of headers is wrong, or the library is missing."""
    if not config.endpoint:
        return NullTracer()
    try:
        headers = read_headers(config.headers_file)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    try:
        from infranetes.tracing.exported import exporting_tracer
    except Exception as error:  # not installed, or generated for another release of protobuf
        raise ConfigError(
            f"{source}: tracing.endpoint: spans are sent by opentelemetry-sdk and "
            "opentelemetry-exporter-otlp-proto-http, which can't be loaded "
            f"({type(error).__name__}: {error}): docs/tracing.md says how to install them; or leave the key "
            "out"
        ) from None
    return exporting_tracer(reactor, config, headers, node)
