# SPDX-License-Identifier: Apache-2.0
"""Exec, Attach and PortForward: the bidirectional streaming calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes_common.concurrency import Coro, start
from infranetes_common.errors import DeadlineExceeded, InfranetesError, InvalidArgument
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentSessionRpcs
from txgrpc import Call, GrpcError
from vmserver import validate
from vmserver.containers.interface import ISession, Streams
from vmserver.containers.provider_choice import ProviderChoice
from vmserver.containers.sessions import Output
from vmserver.rpc import forwards as connections
from vmserver.rpc.quota import Quota

#: The most bytes in one message of input, or of output.
MAX_CHUNK_BYTES = 256 * 1024
#: The most bytes that the node may send before a container's stdin, or a connection, takes them.
AHEAD_BYTES = 512 * 1024
#: The time within which a call's first message has to arrive.
START_SECONDS = 30.0

T = TypeVar("T")
_log = Logger()


class SessionCalls(AgentSessionRpcs):
    """Copies data between a call's messages and a session's streams.

    :ivar sessions: limits Exec and Attach together. :ivar forwards: limits the connections of PortForward.
    """

    def __init__(self, reactor: IReactor, choice: ProviderChoice, *, sessions: int, forwards: int) -> None:
        self._reactor = reactor
        self._choice = choice
        self.sessions = Quota(sessions, "sessions are open")
        self.forwards = Quota(forwards, "forwarded connections are open")

    def Exec(
        self, requests: AsyncIterator[messages.SessionInput], call: Call
    ) -> AsyncIterator[messages.SessionOutput]:
        def begin(start: messages.SessionStart) -> Deferred[ISession]:
            validate.container_id(start.id)
            command = validate.command(start.command)
            return self._choice.provider.exec_session(start.id, command, streams(start))

        call.receive_ahead(AHEAD_BYTES)
        return serve(self._reactor, self.sessions, requests, begin)

    def Attach(
        self, requests: AsyncIterator[messages.SessionInput], call: Call
    ) -> AsyncIterator[messages.SessionOutput]:
        def begin(start: messages.SessionStart) -> Deferred[ISession]:
            validate.container_id(start.id)
            return self._choice.provider.attach_session(start.id, streams(start))

        call.receive_ahead(AHEAD_BYTES)
        return serve(self._reactor, self.sessions, requests, begin)

    async def PortForward(
        self, requests: AsyncIterator[messages.PortForwardInput], call: Call
    ) -> AsyncIterator[messages.PortForwardOutput]:
        call.receive_ahead(AHEAD_BYTES)
        with self.forwards.slot():
            first = await _first(self._reactor, requests)
            if first.WhichOneof("input") != "port" or not 0 < first.port < 65536:
                raise InvalidArgument("the first message has to be a port, 1 to 65535")
            connection = await connections.connect(self._reactor, first.port)
            feeding = _feed_beside(_feed_connection(connection, requests), connection.output)
            try:
                async for _, data in connection.output:
                    for chunk in _chunks(data):
                        yield messages.PortForwardOutput(data=chunk)
            finally:
                feeding.cancel()
                connection.close()


async def serve(
    reactor: IReactorTime,
    quota: Quota,
    requests: AsyncIterator[messages.SessionInput],
    begin: Callable[[messages.SessionStart], Deferred[ISession]],
) -> AsyncIterator[messages.SessionOutput]:
    """Serve a session from its first message to its exit code.

    :param begin: validates the first message and opens the session, which is closed with the call."""
    with quota.slot():
        first = await _first(reactor, requests)
        if first.WhichOneof("input") != "start":
            raise InvalidArgument("the first message has to be the start")
        session = await begin(first.start)
        feeding = _feed_beside(_feed_session(session, requests), session.output)
        try:
            async for stream, data in session.output:
                for chunk in _chunks(data):
                    yield _session_output(stream, chunk)
            end = messages.SessionEnd(exit_code=await session.ended())
            yield messages.SessionOutput(end=end)
        finally:
            feeding.cancel()
            session.close()


async def _first(reactor: IReactorTime, requests: AsyncIterator[T]) -> T:
    coming = start(_next(requests))
    try:
        return await coming.addTimeout(START_SECONDS, reactor)
    except TimeoutError:
        raise DeadlineExceeded(f"no first message within {START_SECONDS:g} s") from None


async def _next(requests: AsyncIterator[T]) -> T:
    first = await anext(aiter(requests), None)
    if first is None:
        raise InvalidArgument("the first message is missing")
    return first


def streams(start: messages.SessionStart) -> Streams:
    """Return the streams that a request asks for."""
    return Streams(
        tty=start.tty, stdin=start.stdin, stdout=start.stdout, stderr=start.stderr and not start.tty
    )


def _session_output(stream: str, data: bytes) -> messages.SessionOutput:
    if stream == "stderr":
        return messages.SessionOutput(stderr=data)
    return messages.SessionOutput(stdout=data)


def _chunks(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), MAX_CHUNK_BYTES):
        yield data[at : at + MAX_CHUNK_BYTES]


async def _feed_session(session: ISession, requests: AsyncIterator[messages.SessionInput]) -> None:
    async for request in requests:
        kind = request.WhichOneof("input")
        if kind == "stdin":
            await session.write(_bounded(request.stdin))
        elif kind == "resize":
            size = request.resize
            if not (0 < size.width < 65536 and 0 < size.height < 65536):
                raise InvalidArgument("resize: width and height are 1 to 65535 characters")
            await session.resize(size.width, size.height)
        else:
            raise InvalidArgument("after the start, stdin and sizes are expected")
    session.close_stdin()


async def _feed_connection(
    connection: connections.ForwardedConnection, requests: AsyncIterator[messages.PortForwardInput]
) -> None:
    async for request in requests:
        if request.WhichOneof("input") != "data":
            raise InvalidArgument("after the port, data is expected")
        await connection.write(_bounded(request.data))
    connection.finish()


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_CHUNK_BYTES:
        raise InvalidArgument(f"a message of more than {MAX_CHUNK_BYTES} bytes")
    return data


def _feed_beside(
    feed: Coro[None],
    output: Output,
) -> Deferred[None]:
    """Write the input while the output is read. An error in the input ends the output."""
    running = start(feed)

    def failed(failure: Failure) -> None:
        if failure.check(CancelledError, GrpcError) is not None:
            return  # the call is over
        if failure.check(InfranetesError) is None:
            _log.failure("reading the input of a session failed", failure)
        assert isinstance(failure.value, Exception)
        output.fail(failure.value)

    running.addErrback(failed)
    return running
