# SPDX-License-Identifier: Apache-2.0
"""A proxy in front of a server with Demo: two of its methods by bytes, all else by frames."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from twisted.internet import reactor
from twisted.internet.endpoints import UNIXClientEndpoint, UNIXServerEndpoint

from tests.txgrpc.demo import DEMO
from tests.txgrpc.support import socket_path
from txgrpc import Call, Channel, Server, Service
from txgrpc.raw import RawStub, metadata_of, raw_method, relayed
from txgrpc.service import Answer, Method


class Proxy:
    """A server on a socket of its own, whose unary Echo and streaming Count go to another by bytes, and all
    else by frames."""

    def __init__(self, case: Any, target: str) -> None:
        self.path = socket_path(case)
        self.channel = Channel(reactor, UNIXClientEndpoint(reactor, target))
        self.stub = RawStub(self.channel)
        self.seen: list[bytes] = []
        self.asked: list[str] = []
        answers: dict[Method, Answer] = {
            raw_method("/txgrpc.demo.Demo/Echo"): self.echo,
            raw_method("/txgrpc.demo.Demo/Count", server_streaming=True): self.count,
        }
        self.server = Server(reactor, [Service.of(DEMO.full_name, answers)], unknown=self.unknown)

    async def start(self, case: Any) -> None:
        port = await UNIXServerEndpoint(reactor, self.path).listen(self.server.factory)
        case.addCleanup(self.channel.close)
        case.addCleanup(lambda: self.server.drain(2))
        case.addCleanup(port.stopListening)

    async def echo(self, request: bytes, call: Call) -> bytes:
        self.seen.append(request)
        timeout = call.time_remaining()
        return await self.stub.call(call.method, request, timeout=timeout, metadata=metadata_of(call))

    async def count(self, request: bytes, call: Call) -> AsyncIterator[bytes]:
        async with self.stub.stream(call.method, request, timeout=call.time_remaining()) as numbers:
            async for number in numbers:
                yield number

    def unknown(self, path: str) -> tuple[Method, Answer] | None:
        self.asked.append(path)
        return relayed(self.stub, path) if path.startswith(f"/{DEMO.full_name}/") else None
