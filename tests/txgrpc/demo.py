# SPDX-License-Identifier: Apache-2.0
"""A service with all four kinds of call, described at run time, and an implementation to test against."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from txgrpc import Code, GrpcError
from txgrpc.client import Stub
from txgrpc.service import message_class


def _describe() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="txgrpc_demo.proto", package="txgrpc.demo")
    file.syntax = "proto3"
    message = file.message_type.add(name="Note")
    field = descriptor_pb2.FieldDescriptorProto
    message.field.add(name="text", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    message.field.add(name="number", number=2, type=field.TYPE_INT64, label=field.LABEL_OPTIONAL)
    message.field.add(name="blob", number=3, type=field.TYPE_BYTES, label=field.LABEL_OPTIONAL)
    service = file.service.add(name="Demo")
    for name, up, down in (
        ("Echo", False, False),
        ("Fail", False, False),
        ("Wait", False, False),
        ("Missing", False, False),
        ("Count", False, True),
        ("Sum", True, False),
        ("Chat", True, True),
    ):
        service.method.add(
            name=name,
            input_type=".txgrpc.demo.Note",
            output_type=".txgrpc.demo.Note",
            client_streaming=up,
            server_streaming=down,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool.FindFileByName("txgrpc_demo.proto")


FILE = _describe()
DEMO = FILE.services_by_name["Demo"]
Note: Any = message_class(FILE.message_types_by_name["Note"])


class DemoStub(Stub):
    """Calls a remote Demo."""

    service = DEMO

    Echo: Any  # Any: of Note; likewise below
    Fail: Any
    Wait: Any
    Missing: Any
    Count: Any
    Sum: Any
    Chat: Any


class Demo:
    """Echo answers the request; Fail fails with the status `number`; Wait answers after `number` ms (0:
    never); Count streams `number` notes, each with the request's blob; Sum adds; Chat answers each note.
    Missing is missing."""

    def __init__(self, reactor: Any) -> None:
        self.reactor = reactor
        self.calls: list[Any] = []
        self.ended: list[str] = []
        self.sent = 0
        self.taken = 0

    async def Echo(self, request: Any, call: Any) -> Any:
        self.calls.append(call)
        call.set_trailing_metadata([(k, v) for k, v in call.metadata if k.startswith("x-")])
        return request

    async def Fail(self, request: Any, call: Any) -> Any:
        if request.number < 0:
            raise RuntimeError("a secret")
        raise GrpcError(Code(request.number), request.text, (("x-why-bin", b"\0\xff"),))

    async def Wait(self, request: Any, call: Any) -> Any:
        self.calls.append(call)
        try:
            if request.number:
                await deferLater(self.reactor, request.number / 1000, lambda: None)
            else:
                await Deferred()
        finally:
            self.ended.append("Wait cancelled" if call.cancelled else "Wait")
        return request

    async def Count(self, request: Any, call: Any) -> Any:
        self.calls.append(call)
        try:
            for number in range(request.number):
                self.sent += 1
                yield Note(number=number, blob=request.blob)
            if request.text:
                raise GrpcError(Code.ABORTED, request.text)
        finally:
            self.ended.append("Count cancelled" if call.cancelled else "Count")

    async def Sum(self, requests: Any, call: Any) -> Any:
        self.calls.append(call)
        total = 0
        try:
            async for request in requests:
                self.taken += 1
                total += request.number
                if request.text:
                    raise GrpcError(Code.ABORTED, request.text)
        finally:
            self.ended.append("Sum cancelled" if call.cancelled else "Sum")
        return Note(number=total)

    async def Chat(self, requests: Any, call: Any) -> Any:
        self.calls.append(call)
        try:
            async for request in requests:
                if request.text == "bye":
                    return
                yield Note(text=request.text.upper(), number=request.number)
        finally:
            self.ended.append("Chat cancelled" if call.cancelled else "Chat")
