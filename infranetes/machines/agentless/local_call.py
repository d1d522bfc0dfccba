# SPDX-License-Identifier: Apache-2.0
"""Sessions whose other end is code on this node: commands by SSH, a guest's serial console."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal, TypeAlias

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes_common.concurrency import Coro, Notifier
from infranetes_common.concurrency import start as run
from infranetes_common.errors import InfranetesError, InvalidArgument
from infranetes_common.wire import vmserver
from txgrpc import Code, GrpcError
from txgrpc.turns import Turns

INPUT_AHEAD = 256 * 1024  # bytes of input that wait to be read, beyond which `send` waits
OUTPUT_AHEAD = 512 * 1024  # bytes of output that wait for the client, beyond which `write` waits
MESSAGE_BYTES = 128 * 1024  # the most bytes of one output
_OVERHEAD = 64  # bytes that a message counts beside its data

_log = Logger()

Stream: TypeAlias = Literal["stdout", "stderr"]


class Served:
    """The serving end of a session: reads what the client sends, writes what it is to see.

    :ivar start: what is wanted.
    """

    def __init__(self, call: LocalCall, start: vmserver.SessionStart) -> None:
        self.start = start
        self._call = call

    async def read(self) -> vmserver.SessionInput | None:
        """Return the client's next input, for one reader; None: no more comes."""
        return await self._call._input()

    async def write(self, stream: Stream, data: bytes) -> None:
        """Write output, and wait while the client is behind. A stream that it does not want is dropped."""
        if data and getattr(self.start, stream):
            await self._call._output(stream, data)


Serve: TypeAlias = Callable[[Served], Coro[int]]
"""Serves a session to its end, and returns its exit code. What it raises is raised in the client, behind all
that was written. It is cancelled when the client cancels."""


class LocalCall:
    """An `infranetes.machines.sessions.SessionCall` that is served by a coroutine of this process.

    It starts with the first `send`. Messages are handed over for a moment, then all other work has a turn.
    """

    def __init__(self, reactor: IReactorTime, serve: Serve) -> None:
        self._serve = serve
        self._turns = Turns(reactor)
        self._serving: Deferred[int] | None = None
        self._inputs: deque[vmserver.SessionInput] = deque()
        self._outputs: deque[tuple[Stream, bytes]] = deque()
        self._input_size = self._output_size = 0
        self._sent_all = False
        self._exit_code: int | None = None
        self._failure: Exception | None = None
        self._end_told = False
        self._changed = Notifier()

    # The client's end

    async def send(self, request: vmserver.SessionInput) -> None:
        """Send the start, then input; returns when the next may follow.

        :raise InvalidArgument: the first one is not a start, or another one is.
        :raise GrpcError: CANCELLED: the session has ended. If it has failed, its error is raised."""
        self._check_live()
        if (request.WhichOneof("input") == "start") is not (self._serving is None):
            raise InvalidArgument("a session begins with one start message, and input follows")
        if self._serving is None:
            start = vmserver.SessionStart()
            start.CopyFrom(request.start)
            self._serving = run(self._serve(Served(self, start)))
            self._serving.addCallbacks(self._ended, self._failed)
            return
        self._inputs.append(request)
        self._input_size += len(request.stdin) + _OVERHEAD
        self._changed.notify()
        while self._input_size > INPUT_AHEAD:
            await self._changed.wait()
            self._check_live()

    async def done_sending(self) -> None:
        """Say that no input follows. No effect when the session has ended."""
        self._sent_all = True
        self._changed.notify()

    def cancel(self) -> None:
        """End the session, and the coroutine that serves it. Idempotent."""
        if not self._over:
            self._finish(GrpcError(Code.CANCELLED, "the session was cancelled by its client"))
            if self._serving is not None:
                self._serving.cancel()

    def __aiter__(self) -> LocalCall:
        return self

    async def __anext__(self) -> vmserver.SessionOutput:
        while not self._outputs and not self._over:
            await self._changed.wait()
        resting = self._turns.rest()
        if resting is not None:
            await resting
        if self._outputs:
            stream, data = self._next_output()
            if stream == "stdout":
                return vmserver.SessionOutput(stdout=data)
            return vmserver.SessionOutput(stderr=data)
        if self._failure is not None:
            raise self._failure
        if self._end_told or self._exit_code is None:
            raise StopAsyncIteration
        self._end_told = True
        return vmserver.SessionOutput(end=vmserver.SessionEnd(exit_code=self._exit_code))

    def _next_output(self) -> tuple[Stream, bytes]:
        """Take the next piece of output, joined with those of the same stream that follow it."""
        stream, data = self._outputs.popleft()
        pieces, size = [data], len(data)
        while (
            self._outputs
            and self._outputs[0][0] == stream
            and size + len(self._outputs[0][1]) <= MESSAGE_BYTES
        ):
            pieces.append(self._outputs.popleft()[1])
            size += len(pieces[-1])
        self._output_size -= size + _OVERHEAD * len(pieces)
        self._changed.notify()
        return stream, b"".join(pieces)

    # The serving end

    async def _input(self) -> vmserver.SessionInput | None:
        while not self._inputs and not self._sent_all:
            await self._changed.wait()
        resting = self._turns.rest()
        if resting is not None:
            await resting
        if not self._inputs:
            return None
        request = self._inputs.popleft()
        self._input_size -= len(request.stdin) + _OVERHEAD
        self._changed.notify()
        return request

    async def _output(self, stream: Stream, data: bytes) -> None:
        for at in range(0, len(data), MESSAGE_BYTES):
            piece = data[at : at + MESSAGE_BYTES]
            if self._over:
                return
            self._outputs.append((stream, piece))
            self._output_size += len(piece) + _OVERHEAD
            self._changed.notify()
            while self._output_size > OUTPUT_AHEAD and not self._over:
                await self._changed.wait()

    # The end

    @property
    def _over(self) -> bool:
        return self._exit_code is not None or self._failure is not None

    def _check_live(self) -> None:
        if self._over:
            raise self._failure or GrpcError(Code.CANCELLED, "the session has ended")

    def _ended(self, code: int) -> None:
        if not self._over:
            self._exit_code = code
            self._changed.notify()

    def _failed(self, failure: Failure) -> None:
        error = failure.value
        if isinstance(error, GrpcError | InfranetesError):
            self._finish(error, keep_output=True)
        elif self._over and isinstance(error, CancelledError):
            return
        else:
            _log.failure("serving a session failed", failure)
            self._finish(
                InfranetesError("serving the session failed; the daemon's log has the details"), True
            )

    def _finish(self, error: Exception, keep_output: bool = False) -> None:
        if self._over:
            return
        self._failure = error
        self._inputs.clear()
        if not keep_output:
            self._outputs.clear()
        self._changed.notify()
