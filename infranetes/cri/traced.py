# SPDX-License-Identifier: Apache-2.0
"""A span for every RPC, below its caller's if that sends one.

A span names the pod and container, and has nothing else of the request."""

from __future__ import annotations

from google.protobuf.message import Message

from infranetes.tracing.spans import SYSTEM, Attributes, Tracer, within_span
from infranetes_common.trace_context import TraceContext
from infranetes_common.wire import cri
from txgrpc import Call, GrpcError
from txgrpc.service import Answer, Interceptor, Method

_MOST = 128  # the most characters of a name that a client chose


def traced(tracer: Tracer) -> Interceptor:
    """Return an interceptor for a service that makes each call a span, except calls that stream responses."""

    def interceptor(method: Method, answer: Answer) -> Answer:
        return answer if method.server_streaming else _traced(tracer, method, answer)

    return interceptor


def _traced(tracer: Tracer, method: Method, answer: Answer) -> Answer:
    name = method.path.strip("/")
    about = {SYSTEM: "grpc", "rpc.service": name.rpartition("/")[0], "rpc.method": method.name}

    async def call_traced(request: Message, call: Call) -> Message | bytes:
        span = tracer.call(name, _caller(call), {**about, **subject(request)})
        if span is None:
            response: Message | bytes = await answer(request, call)
            return response
        with within_span(span):
            response = await answer(request, call)
            span.add(subject(response))
            return response

    return call_traced


def _caller(call: Call) -> TraceContext | None:
    try:
        return TraceContext.of_metadata(call.metadata)
    except GrpcError:  # the metadata is malformed, which must not fail the call
        return None


def subject(message: Message | bytes) -> Attributes:
    """Return attributes that name the pod and container of a request or response."""
    if isinstance(message, bytes):
        return {}
    attributes = {
        "infranetes.sandbox": getattr(message, "pod_sandbox_id", ""),
        "infranetes.container": getattr(message, "container_id", ""),
        "infranetes.handler": getattr(message, "runtime_handler", ""),
    }
    if isinstance(message, cri.RunPodSandboxRequest):
        metadata = message.config.metadata
        attributes["k8s.namespace.name"] = metadata.namespace
        attributes["k8s.pod.name"] = metadata.name
        attributes["k8s.pod.uid"] = metadata.uid
    return {key: value[:_MOST] for key, value in attributes.items() if value}
