# SPDX-License-Identifier: Apache-2.0
"""An agent that answers every call of the service: honestly, or as the attack in force does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeAlias, cast

from google.protobuf.message import Message
from twisted.internet.defer import Deferred

from infranetes_common.errors import NotFound, Unavailable
from infranetes_common.wire import cri, vmserver

Answer: TypeAlias = Message | bytes
"""A response, or bytes that need not be a valid message."""
Attack = Callable[..., Awaitable[Answer] | AsyncIterator[Answer]]
"""Takes the HostileAgent and a request."""


class HostileAgent:
    """An implementation of vmserver.Agent that attacks the daemon.

    :ivar attacks: the attacks in force, by method; each answers in place of the honest method.
    :ivar corpus: messages for the attacks called `corpus`, by method, repeated endlessly.
    """

    def __init__(self, sandbox_id: str, containers: tuple[str, ...]) -> None:
        self.sandbox_id = sandbox_id
        self.containers = containers
        self.attacks: Mapping[str, Attack] = {}
        self.corpus: Mapping[str, Iterator[bytes]] = {}
        for method in vmserver.Agent.methods:
            kind = self._stream if method.server_streaming else self._unary
            setattr(self, method.name, kind(method.name))

    def state(
        self, container_id: str, state: cri.ContainerState = cri.CONTAINER_RUNNING, **fields: Any
    ) -> vmserver.ContainerState:  # Any: fields of the message
        """A container's state, as an honest agent reports it."""
        return vmserver.ContainerState(id=container_id, state=state, created_at=1, started_at=2, **fields)

    def _unary(self, name: str) -> Callable[[Message, object], Awaitable[Answer]]:
        async def answer(request: Message, call: object) -> Answer:
            attack = self.attacks.get(name)
            if attack is not None:
                return await cast(Awaitable[Answer], attack(self, request))
            honest: Callable[[Message], Answer] | None = getattr(self, f"_{name}", None)
            if honest is None:
                raise Unavailable(f"this agent has no {name}")
            return honest(request)

        return answer

    def _stream(self, name: str) -> Callable[[Message, object], AsyncIterator[Answer]]:
        async def answer(request: Message, call: object) -> AsyncIterator[Answer]:
            attack = self.attacks.get(name)
            honest: Callable[[Message], AsyncGenerator[Answer, None]] | None = getattr(self, f"_{name}", None)
            if attack is not None:
                messages = cast("AsyncGenerator[Answer, None]", attack(self, request))
            elif honest is not None:
                messages = honest(request)
            else:
                raise NotFound(f"{name}: nothing is here")
            try:
                async for message in messages:
                    yield message
            finally:
                await messages.aclose()

        return answer

    def _Info(self, request: vmserver.InfoRequest) -> vmserver.InfoResponse:
        return vmserver.InfoResponse(sandbox_id=self.sandbox_id, version="0", container_provider="fake")

    def _Stats(self, request: vmserver.StatsRequest) -> vmserver.StatsResponse:
        return vmserver.StatsResponse(
            machine=vmserver.Usage(time_nanos=1),
            containers=[
                vmserver.ContainerUsage(id=one, usage=vmserver.Usage(time_nanos=1)) for one in self.containers
            ],
        )

    def _StopContainer(self, request: vmserver.StopContainerRequest) -> vmserver.StopContainerResponse:
        state = self.state(request.id, cri.CONTAINER_EXITED, finished_at=3)
        return vmserver.StopContainerResponse(state=state)

    def _RemoveContainer(self, request: vmserver.RemoveContainerRequest) -> vmserver.RemoveContainerResponse:
        return vmserver.RemoveContainerResponse()

    def _ExecSync(self, request: vmserver.ExecSyncRequest) -> vmserver.ExecSyncResponse:
        return vmserver.ExecSyncResponse(stdout=b"well\n")

    async def _Watch(self, request: vmserver.WatchRequest) -> AsyncIterator[vmserver.WatchEvent]:
        for one in self.containers:
            yield vmserver.WatchEvent(container=self.state(one))
        yield vmserver.WatchEvent(synced=vmserver.Synced())
        await Deferred()

    async def _ReadLog(self, request: vmserver.ReadLogRequest) -> AsyncIterator[bytes]:
        await Deferred()
        yield b""

    async def _WatchVolumes(self, request: vmserver.WatchVolumesRequest) -> AsyncIterator[bytes]:
        await Deferred()
        yield b""
