# SPDX-License-Identifier: Apache-2.0
"""The calls whose both sides send: a command's or a container's streams, and a connection to a port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, TypeVar

from infranetes_common.wire import vmserver

RequestT = TypeVar("RequestT", contravariant=True)
ResponseT = TypeVar("ResponseT", covariant=True)


class AgentCall(Protocol[RequestT, ResponseT]):
    """A bidirectional call to an agent; `txgrpc.StreamCall` is one.

    It begins with the first `send`, whose message says what is wanted. Its methods and its iterator fail with
    `txgrpc.GrpcError`, or with errors of `infranetes_common.errors`."""

    async def send(self, request: RequestT) -> None:
        """Send a request; returns when the next may follow."""

    async def done_sending(self) -> None:
        """Say that no request follows."""

    def cancel(self) -> None:
        """End the call. Idempotent."""

    def __aiter__(self) -> AsyncIterator[ResponseT]:
        """Iterate over the responses."""


SessionCall = AgentCall[vmserver.SessionInput, vmserver.SessionOutput]
"""The call of Exec, Attach or Shell: the streams of a command or a container."""
PortForwardCall = AgentCall[vmserver.PortForwardInput, vmserver.PortForwardOutput]
"""A connection to a port of the pod."""
