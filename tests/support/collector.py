# SPDX-License-Identifier: Apache-2.0
"""A collector of traces: OTLP over HTTP, decoded with OpenTelemetry's own messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, cast

import attrs
from twisted.internet.address import IPv4Address
from twisted.internet.defer import maybeDeferred
from twisted.internet.interfaces import IReactorTCP
from twisted.internet.protocol import ServerFactory
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request, Site

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue

try:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    from infranetes.tracing import exported as _exported  # noqa: F401
except Exception as error:  # Debian 12 does not have it, and a new one does not fit Debian 12's protobuf
    MISSING = f"the extra `tracing` and opentelemetry-proto are needed: {error}"
else:
    MISSING = ""


@attrs.frozen
class Received:
    """A span that was received."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin: int
    end: int
    kind: int
    failed: bool
    attributes: Mapping[str, object] = attrs.field(eq=False)
    resource: Mapping[str, object] = attrs.field(eq=False)

    def during(self, other: Received) -> bool:
        """Return whether it lies within `other`, as a part does whose end `other` waits for."""
        return other.begin <= self.begin and self.end <= other.end


class Collector(Resource):
    """Receives spans, or fails as collectors in trouble do.

    :ivar spans: the spans that it accepted. :ivar bodies: every request's body.
    :ivar headers: those of the last request.
    :ivar answer: the status that it answers with; 0: it never answers.
    """

    isLeaf = True

    def __init__(self, reactor: IReactorTCP) -> None:
        super().__init__()
        self.spans: list[Received] = []
        self.bodies: list[bytes] = []
        self.headers: Mapping[str, str] = {}
        self.answer = 200
        self._waiting: list[Request] = []
        self._site = Site(self)
        self._site.displayTracebacks = False
        self._port = reactor.listenTCP(0, cast(ServerFactory, self._site), interface="127.0.0.1")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{cast(IPv4Address, self._port.getHost()).port}/v1/traces"

    async def stop(self) -> None:
        for request in self._waiting:
            request.transport.abortConnection()
        await maybeDeferred(self._port.stopListening)
        for channel in list(getattr(self._site, "_channels", ())):
            channel.abortConnection()

    def render_POST(self, request: Request) -> bytes | int:
        body = request.content.read()
        self.bodies.append(body)
        self.headers = {
            name.decode().lower(): values[0].decode()
            for name, values in request.requestHeaders.getAllRawHeaders()
        }
        if not self.answer:
            self._waiting.append(request)
            request.notifyFinish().addBoth(lambda _: self._waiting.remove(request))
            return NOT_DONE_YET
        request.setResponseCode(self.answer)
        if self.answer == 200:
            self.spans += spans_of(body)
        return b""

    def named(self, name: str) -> list[Received]:
        """The spans of this name."""
        return [span for span in self.spans if span.name == name]

    def below(self, span: Received) -> list[Received]:
        """The children of `span`."""
        return [each for each in self.spans if each.parent_id == span.span_id]


def spans_of(body: bytes) -> Iterator[Received]:
    """The spans of a request."""
    for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _values(of_resource.resource.attributes)
        for scope in of_resource.scope_spans:
            for span in scope.spans:
                yield Received(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.kind,
                    span.status.code == 2,
                    _values(span.attributes),
                    resource,
                )


def _values(attributes: Iterable[KeyValue]) -> Mapping[str, object]:
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in attributes}
