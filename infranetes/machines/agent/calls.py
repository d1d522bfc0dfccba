# SPDX-License-Identifier: Apache-2.0
"""The base of all calls to an agent: the stub, and the translation of failures into our errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from google.protobuf.message import Message
from twisted.internet.defer import Deferred

from infranetes.machines.agent import checks
from infranetes.machines.sessions import AgentCall
from infranetes_common.errors import InfranetesError, NotOffered, Unavailable, from_grpc
from infranetes_common.wire import vmserver
from infranetes_common.wire.vmserver_rpcs import AgentStub
from txgrpc import Channel, Code, GrpcError, StreamCall

CHUNK_BYTES = 256 * 1024  # the most bytes of a file in one message

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)

SessionStream = StreamCall[vmserver.SessionInput, vmserver.SessionOutput]
PortForwardStream = StreamCall[vmserver.PortForwardInput, vmserver.PortForwardOutput]


@asynccontextmanager
async def closing(data: AsyncIterator[bytes]) -> AsyncIterator[None]:
    """Close `data` after the block, if it can be closed."""
    try:
        yield
    finally:
        close = getattr(data, "aclose", None)
        if close is not None:
            await close()


class AgentCalls:
    """The calls to the agent of one sandbox, over `channel`."""

    def __init__(self, sandbox_id: str, channel: Channel) -> None:
        self._sandbox_id = sandbox_id
        self._channel = channel
        self._stub = AgentStub(channel)

    async def _call(self, call: Deferred[_Response]) -> _Response:
        try:
            return await call
        except GrpcError as error:
            raise self._as_error(error) from None

    async def _streamed(self, call: AgentCall[_Request, _Response]) -> AsyncGenerator[_Response, None]:
        """Yield the call's responses. Closing the generator ends the call."""
        try:
            async for message in call:
                yield message
        except GrpcError as error:
            raise self._as_error(error) from None
        finally:
            call.cancel()

    async def _turn(self) -> None:
        """Give other work a turn of the reactor, if this channel has used up its share."""
        resting = self._channel.turns.rest()
        if resting is not None:
            await resting

    def _as_error(self, error: GrpcError) -> InfranetesError:
        error = checks.shortened(error)
        if error.code in (Code.UNAVAILABLE, Code.CANCELLED):
            return Unavailable(f"the agent of sandbox {self._sandbox_id} can't be reached: {error.message}")
        if error.code is Code.UNKNOWN:
            return InfranetesError(f"the agent of sandbox {self._sandbox_id} failed: {error.message}")
        if error.code is Code.UNIMPLEMENTED:  # guest images, and the VMs made from them, outlive upgrades
            return NotOffered(
                f"the agent of sandbox {self._sandbox_id} does not offer this: {error.message}. If its guest "
                "image is of an earlier release: rebuild it (infranetes-guest build) and recreate the pod"
            )
        return from_grpc(error)
