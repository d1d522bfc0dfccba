# SPDX-License-Identifier: Apache-2.0
"""Spans that are recorded and sent by OpenTelemetry's library; see `make`, which alone imports this."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from twisted.logger import Logger

from infranetes.tracing.config import TracingConfig
from infranetes.tracing.delivery import Delivery
from infranetes.tracing.spans import SYSTEM, Attributes, Kind, Span
from infranetes_common import __version__
from infranetes_common.concurrency import run_in_thread
from infranetes_common.reactors import IReactor
from infranetes_common.trace_context import TraceContext
from txgrpc import Code

EXPORT_SECONDS = 10.0  # for a request, including its retries
MAX_ATTRIBUTE = 256  # characters

_KINDS = {
    Kind.INTERNAL: trace.SpanKind.INTERNAL,
    Kind.SERVER: trace.SpanKind.SERVER,
    Kind.CLIENT: trace.SpanKind.CLIENT,
}
# Other codes mean that the caller did something wrong (source: OpenTelemetry's conventions for gRPC).
_FAULTS_OF_SERVERS = (
    Code.UNKNOWN,
    Code.DEADLINE_EXCEEDED,
    Code.UNIMPLEMENTED,
    Code.INTERNAL,
    Code.UNAVAILABLE,
    Code.DATA_LOSS,
)

_log = Logger()


class _Forwarded(logging.Handler):
    """Writes the library's log messages into the daemon's log."""

    def emit(self, record: logging.LogRecord) -> None:
        _log.debug("{text}", text=record.getMessage()[:500])


class _Ended(SpanProcessor):
    """Queues the spans that are sampled when they end."""

    def __init__(self, delivery: Delivery[ReadableSpan]) -> None:
        self._delivery = delivery

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is not None and context.trace_flags.sampled:
            self._delivery.put(span)


class _Recorded:
    """A `Span` that the library records."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, kind: Kind, rpc: bool) -> None:
        self._tracer = tracer
        self._span = span
        self._kind = kind
        self._rpc = rpc

    @property
    def context(self) -> TraceContext:
        found = self._span.get_span_context()
        return TraceContext(
            trace.format_trace_id(found.trace_id),
            trace.format_span_id(found.span_id),
            bool(found.trace_flags.sampled),
            found.trace_state.to_header(),
        )

    def child(self, name: str, kind: Kind = Kind.INTERNAL, attributes: Attributes | None = None) -> Span:
        return _begun(self._tracer, self._span, name, kind, attributes)

    def add(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def end(self, code: Code) -> None:
        if self._rpc:
            self._span.set_attribute("rpc.grpc.status_code", int(code))
        fault = code in _FAULTS_OF_SERVERS if self._kind is Kind.SERVER else code is not Code.OK
        if fault:
            # The error's text may quote what is not for the collector. It is in the daemon's log.
            why = code.name if self._rpc or code is not Code.INTERNAL else None
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, why))
        self._span.end()


def _begun(
    tracer: trace.Tracer, parent: trace.Span | None, name: str, kind: Kind, attributes: Attributes | None
) -> Span:
    context = trace.set_span_in_context(parent if parent is not None else trace.INVALID_SPAN)
    span = tracer.start_span(name, context, _KINDS[kind], attributes, record_exception=False)
    return _Recorded(tracer, span, kind, SYSTEM in (attributes or ()))


class ExportingTracer:
    """Records spans, and sends them to a collector."""

    def __init__(
        self, reactor: IReactor, exporter: SpanExporter, ratio: float, node: str, where: str
    ) -> None:
        self._reactor = reactor
        self._exporter = exporter
        self._delivery: Delivery[ReadableSpan] = Delivery(reactor, self._thd_export, where)
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            resource=Resource.create(
                {"service.name": "infranetes", "service.version": __version__, "host.name": node}
            ),
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_span_attribute_length=MAX_ATTRIBUTE),
        )
        provider.add_span_processor(_Ended(self._delivery))
        self._tracer = provider.get_tracer("infranetes", __version__)

    def call(self, name: str, parent: TraceContext | None, attributes: Attributes) -> Span | None:
        """See `Tracer.call`."""
        caller = trace.NonRecordingSpan(_span_context(parent)) if parent is not None else None
        return _begun(self._tracer, caller, name, Kind.SERVER, attributes)

    async def stop(self) -> None:
        """See `Tracer.stop`."""
        await self._delivery.stop()
        await run_in_thread(self._reactor, self._exporter.shutdown)

    def _thd_export(self, spans: Sequence[ReadableSpan]) -> bool:
        return self._exporter.export(spans) is SpanExportResult.SUCCESS


def exporting_tracer(
    reactor: IReactor, config: TracingConfig, headers: Mapping[str, str], node: str
) -> ExportingTracer:
    """Make the tracer of this configuration."""
    library = logging.getLogger("opentelemetry")
    library.propagate = False
    library.handlers = [_Forwarded()]
    exporter = OTLPSpanExporter(config.endpoint, headers=dict(headers), timeout=EXPORT_SECONDS)
    return ExportingTracer(reactor, exporter, config.sampling_ratio, node, config.endpoint)


def _span_context(parent: TraceContext) -> trace.SpanContext:
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.sampled else trace.TraceFlags.DEFAULT)
    state = trace.TraceState.from_header([parent.state]) if parent.state else None
    return trace.SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, flags, state)
