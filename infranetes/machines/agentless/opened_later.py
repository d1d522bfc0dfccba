# SPDX-License-Identifier: Apache-2.0
"""Calls with streams on both sides that are opened by their first message, once it is known by which way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

from twisted.internet.defer import CancelledError

from infranetes.machines.sessions import AgentCall
from infranetes_common.concurrency import Event, Flight
from infranetes_common.errors import Unavailable

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class OpenedLater(Generic[RequestT, ResponseT]):
    """An `AgentCall` that another one serves, which is opened when the first message is sent.

    :param opened: given the first message, returns the call that serves it, which has been sent that."""

    def __init__(self, opened: Callable[[RequestT], Awaitable[AgentCall[RequestT, ResponseT]]]) -> None:
        self._opened = opened
        self._call: AgentCall[RequestT, ResponseT] | None = None
        self._opening: Flight[None] | None = None
        self._over: Event[None] = Event()  # the opening is over, or never begins
        self._cancelled = False

    async def send(self, request: RequestT) -> None:
        """See `AgentCall.send`."""
        if self._call is not None:
            await self._call.send(request)
            return
        self._opening = Flight(self._open(request))
        await self._opening.join()

    async def _open(self, request: RequestT) -> None:
        try:
            self._call = await self._opened(request)
        except CancelledError:
            self._over.fail(Unavailable("the call was ended while it was opened"))
            raise
        except Exception as error:
            self._over.fail(error)
            raise
        if self._cancelled:
            self._call.cancel()
        self._over.succeed(None)

    async def done_sending(self) -> None:
        """See `AgentCall.done_sending`."""
        if self._call is not None:
            await self._call.done_sending()

    def cancel(self) -> None:
        """See `AgentCall.cancel`."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()
        elif self._opening is not None:
            self._opening.cancel()

    async def __aiter__(self) -> AsyncIterator[ResponseT]:
        await self._over.wait()
        assert self._call is not None
        async for response in self._call:
            yield response
