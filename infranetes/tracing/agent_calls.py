# SPDX-License-Identifier: Apache-2.0
"""Spans of the calls to VMs' agents, and the metadata that tells the agent which span a call belongs to."""

from __future__ import annotations

from infranetes.tracing.spans import SYSTEM, Kind, Span, current
from infranetes_common.trace_context import TraceContext
from txgrpc import Code, GrpcError
from txgrpc.metadata import Metadata
from txgrpc.observer import Observed
from txgrpc.service import Method


class _AgentCall:
    """A call with a span of its own."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.metadata = span.context.to_metadata()

    def ended(self, error: GrpcError | None, trailing: Metadata) -> None:
        self._span.end(Code.OK if error is None else error.code)


class _AgentStream:
    """A stream. It may last as long as the VM, so it has no span; the agent is told the caller's."""

    def __init__(self, context: TraceContext) -> None:
        self.metadata = context.to_metadata()

    def ended(self, error: GrpcError | None, trailing: Metadata) -> None:
        pass


def observe(method: Method) -> Observed | None:
    """Begin to follow a call to an agent; see `txgrpc.observer.Observer`."""
    span = current()
    if span is None:
        return None
    if method.server_streaming:
        return _AgentStream(span.context)
    service = method.path.strip("/").rpartition("/")[0]
    attributes = {SYSTEM: "grpc", "rpc.service": service, "rpc.method": method.name}
    return _AgentCall(span.child(method.path.strip("/"), Kind.CLIENT, attributes))
