# SPDX-License-Identifier: Apache-2.0
"""Every RPC is a span below its caller's, with the ids of its subject and no other content."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import cast

from google.protobuf.message import Message
from twisted.trial.unittest import SynchronousTestCase

from infranetes.cri.traced import traced
from infranetes.tracing.spans import Attributes, NullTracer, Span, current
from infranetes_common.concurrency import start
from infranetes_common.errors import NotFound
from infranetes_common.trace_context import TraceContext
from infranetes_common.wire import cri
from tests.infranetes.tracing.test_spans import CALLER, Recorded
from txgrpc import Call, Code, GrpcError, Service
from txgrpc.metadata import Metadata
from txgrpc.service import Answer, Method

METADATA = CALLER.to_metadata()


class Tracer(NullTracer):
    """A tracer that keeps the spans."""

    def __init__(self) -> None:
        self.calls: list[tuple[TraceContext | None, Recorded]] = []

    def call(self, name: str, parent: TraceContext | None, attributes: Attributes) -> Span | None:
        made = Recorded(name, attributes=dict(attributes))
        self.calls.append((parent, made))
        return made


class Malformed:
    """A call whose metadata can't be read."""

    @property
    def metadata(self) -> Metadata:
        raise GrpcError(Code.INVALID_ARGUMENT, "a binary value is not base64")


def call_with(metadata: Metadata) -> Call:
    """Return a call with this metadata and nothing else."""
    return cast(Call, SimpleNamespace(metadata=metadata))


class Calls:
    """A service with some of the RPCs."""

    async def RunPodSandbox(self, request: cri.RunPodSandboxRequest, call: Call) -> cri.RunPodSandboxResponse:
        self.within = current()
        return cri.RunPodSandboxResponse(pod_sandbox_id="s1")

    async def StopContainer(self, request: Message, call: Call) -> Message:
        raise NotFound("no such container")

    async def GetContainerEvents(self, request: Message, call: Call) -> AsyncIterator[bytes]:
        yield b""


class TracedTests(SynchronousTestCase):
    """One span for each call."""

    def setUp(self) -> None:
        self.calls, self.tracer = Calls(), Tracer()

    def answers(self, tracer: NullTracer) -> Mapping[str, Answer]:
        service = Service(cri.RuntimeService, self.calls).intercept(traced(tracer))
        return {method.name: answer for method, answer in service.answers.items()}

    def run_pod(self, tracer: NullTracer, call: Call) -> None:
        metadata = cri.PodSandboxMetadata(name="web", namespace="default", uid="u" * 500)
        config = cri.PodSandboxConfig(metadata=metadata, annotations={"password": "secret"})
        request = cri.RunPodSandboxRequest(config=config, runtime_handler="vm")
        answer = self.successResultOf(start(self.answers(tracer)["RunPodSandbox"](request, call)))
        self.assertEqual(answer.pod_sandbox_id, "s1")

    def test_a_call(self) -> None:
        self.run_pod(self.tracer, call_with(METADATA))
        [(parent, span)] = self.tracer.calls
        self.assertEqual((parent, span.name), (CALLER, "runtime.v1.RuntimeService/RunPodSandbox"))
        self.assertIs(self.calls.within, span)
        self.assertIs(span.ended, Code.OK)
        expected = {
            "rpc.system": "grpc",
            "rpc.service": "runtime.v1.RuntimeService",
            "rpc.method": "RunPodSandbox",
            "infranetes.handler": "vm",
            "infranetes.sandbox": "s1",
            "k8s.namespace.name": "default",
            "k8s.pod.name": "web",
            "k8s.pod.uid": "u" * 128,
        }
        self.assertEqual(span.attributes, expected)

    def test_a_call_that_fails(self) -> None:
        answer = self.answers(self.tracer)["StopContainer"]
        request = cri.StopContainerRequest(container_id="c1")
        self.failureResultOf(start(answer(request, call_with(()))), NotFound)
        [(parent, span)] = self.tracer.calls
        self.assertEqual((parent, span.ended), (None, Code.NOT_FOUND))
        self.assertEqual(span.attributes["infranetes.container"], "c1")

    def test_metadata_that_cannot_be_read_fails_no_call(self) -> None:
        self.run_pod(self.tracer, cast(Call, Malformed()))
        self.assertIsNone(self.tracer.calls[0][0])

    def test_where_nothing_is_recorded(self) -> None:
        self.run_pod(NullTracer(), call_with(METADATA))
        assert self.calls.within is not None
        self.assertEqual(self.calls.within.context, CALLER)
        self.run_pod(NullTracer(), call_with(()))
        self.assertIsNone(self.calls.within)

    def test_a_stream_of_responses_is_left_as_it_is(self) -> None:
        self.assertEqual(self.answers(self.tracer)["GetContainerEvents"], self.calls.GetContainerEvents)

    def test_every_request_can_be_asked_what_it_is_about(self) -> None:
        nobody = call_with(())
        for service in (cri.RuntimeService, cri.ImageService):
            for described in service.methods:
                method = Method.from_descriptor(described)
                answer = traced(self.tracer)(method, self._empty(method))
                if not method.server_streaming:
                    self.successResultOf(start(answer(method.request_class(), nobody)))

    def _empty(self, method: Method) -> Answer:
        async def answer(request: Message, call: Call) -> Message:
            return method.response_class()

        return answer
