# SPDX-License-Identifier: Apache-2.0
"""A client whose calls a test answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from google.protobuf.message import Message
from twisted.internet.defer import succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.agent.client import AgentClient
from infranetes_common.concurrency import start
from infranetes_common.filesync.manifest import Bounds
from infranetes_common.wire import vmserver
from infranetes_common.wire.vmserver_rpcs import AgentStub
from txgrpc import Channel, GrpcError
from txgrpc.service import Method
from txgrpc.turns import Turns

METHODS = {each.name: Method.from_descriptor(each) for each in vmserver.Agent.methods}
BOUNDS = Bounds(entries=3, bytes=1000)


class FakeCall:
    """A streaming call: what it is to yield, and then whether it fails.

    :ivar sent: what was sent. :ivar ahead: how many bytes may be received ahead."""

    def __init__(self, messages: list[Message], error: GrpcError | None = None) -> None:
        self.messages = messages
        self.error = error
        self.sent: list[Message] = []
        self.ahead = 0
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def receive_ahead(self, size: int) -> None:
        self.ahead = size

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def __aiter__(self) -> AsyncIterator[Message]:
        for message in self.messages:
            yield message
        if self.error is not None:
            raise self.error


class FakeChannel:
    """A channel that notes each call.

    :ivar calls: of each call the RPC, the request (a list of a stream's) and the time limit.
    :ivar answers: the answer to an RPC, if it is not an empty message: a message, or a FakeCall."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, float | None]] = []
        self.answers: dict[str, Any] = {}
        self.turns = Turns(Clock())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = METHODS[name]

        def call(request: Any = None, *, timeout: float | None) -> Any:
            answer = self.answers.get(name, method.response_class())
            if method.client_streaming and not method.server_streaming:
                return start(self._upload(name, request, timeout, answer))
            self.calls.append((name, request, timeout))
            return answer if method.server_streaming else succeed(answer)

        return call

    async def _upload(self, name: str, requests: Any, timeout: float | None, answer: Message) -> Message:
        self.calls.append((name, [each async for each in requests], timeout))
        return answer


async def iterated(*values: Any) -> AsyncIterator[Any]:
    for each in values:
        yield each


async def collected(values: Any) -> list[Any]:
    return [each async for each in values]


class NotedClient(AgentClient):
    """A client whose calls the channel itself notes."""

    def __init__(self, channel: FakeChannel) -> None:
        super().__init__("s1", cast(Channel, channel))
        self._stub = cast(AgentStub, channel)


class RequestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.channel = FakeChannel()
        self.client = NotedClient(self.channel)

    def asked(self, call: Any, rpc: str, request: Any, seconds: float | None) -> Any:
        """Check that a call asks for this, and return what it makes of the answer."""
        self.channel.calls.clear()
        result: Any = self.successResultOf(start(call))
        self.assertEqual(self.channel.calls, [(rpc, request, seconds)])
        return result
