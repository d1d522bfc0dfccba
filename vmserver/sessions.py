"""Exec, Attach and PortForward of ``proto/vmserver.proto``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.logger import Logger

from infranetes_common import vmserver as messages
from infranetes_common.errors import DeadlineExceeded, InfranetesError, InvalidArgument, ResourceExhausted
from txgrpc import GrpcError
from vmserver import forwards, validate
from vmserver.containers.interface import IContainerProvider, Streams

#: Bytes of one message of input, and of one of output.
MAX_PIECE_BYTES = 256 * 1024
#: For a call's first message.
START_SECONDS = 30.0

_log = Logger()


class Places:
    """So many at a time."""

    def __init__(self, limit: int, what: str) -> None:
        self._limit = limit
        self._what = what
        self._taken = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """:raise ResourceExhausted: all are taken."""
        if self._taken >= self._limit:
            raise ResourceExhausted(f"{self._limit} {self._what} are open already; try again later")
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


class SessionCalls:
    """The calls whose bytes go both ways.

    :param sessions: of Exec and Attach at a time. :param forwards: connections of PortForward at a time.
    """

    def __init__(self, reactor: Any, provider: IContainerProvider, *, sessions: int, forwards: int) -> None:
        self._session_reactor = reactor
        self._session_provider = provider
        self._sessions = Places(sessions, "sessions")
        self._forwards = Places(forwards, "forwarded connections")

    def Exec(self, requests: AsyncIterator[Any], call: Any) -> AsyncIterator[Any]:
        def begin(start: Any) -> Any:
            command = validate.command(start.command)
            return self._session_provider.exec_session(start.id, command, _streams(start))

        return self._session(requests, begin)

    def Attach(self, requests: AsyncIterator[Any], call: Any) -> AsyncIterator[Any]:
        def begin(start: Any) -> Any:
            return self._session_provider.attach_session(start.id, _streams(start))

        return self._session(requests, begin)

    async def _session(self, requests: AsyncIterator[Any], begin: Callable[[Any], Any]) -> AsyncIterator[Any]:
        with self._sessions.one():
            first = await self._first(requests)
            if first.WhichOneof("input") != "start":
                raise InvalidArgument("the first message has to be the start")
            validate.container_id(first.start.id)
            session = await begin(first.start)
            feeding = _beside(_feed(session, requests), session)
            try:
                async for stream, data in session.output:
                    for piece in _pieces(data):
                        yield _output(stream, piece)
                end = messages.SessionEnd(exit_code=await session.ended())
                yield messages.SessionOutput(end=end)
            finally:
                feeding.cancel()
                session.close()

    async def PortForward(self, requests: AsyncIterator[Any], call: Any) -> AsyncIterator[Any]:
        with self._forwards.one():
            first = await self._first(requests)
            if first.WhichOneof("input") != "port" or not 0 < first.port < 65536:
                raise InvalidArgument("the first message has to be a port, 1 to 65535")
            connection = await forwards.connect(self._session_reactor, first.port)
            feeding = _beside(_feed_connection(connection, requests), connection)
            try:
                async for _, data in connection.output:
                    for piece in _pieces(data):
                        yield messages.PortForwardOutput(data=piece)
            finally:
                feeding.cancel()
                connection.close()

    async def _first(self, requests: AsyncIterator[Any]) -> Any:
        coming: Deferred[Any] = Deferred.fromCoroutine(_next(requests))
        try:
            return await coming.addTimeout(START_SECONDS, self._session_reactor)
        except TimeoutError:
            raise DeadlineExceeded(f"no first message within {START_SECONDS:g} s") from None


async def _next(requests: AsyncIterator[Any]) -> Any:
    first = await anext(aiter(requests), None)
    if first is None:
        raise InvalidArgument("the first message is missing")
    return first


def _streams(start: Any) -> Streams:
    return Streams(
        tty=start.tty, stdin=start.stdin, stdout=start.stdout, stderr=start.stderr and not start.tty
    )


def _output(stream: str, data: bytes) -> Any:
    if stream == "stderr":
        return messages.SessionOutput(stderr=data)
    return messages.SessionOutput(stdout=data)


def _pieces(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), MAX_PIECE_BYTES):
        yield data[at : at + MAX_PIECE_BYTES]


async def _feed(session: Any, requests: AsyncIterator[Any]) -> None:
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


async def _feed_connection(connection: Any, requests: AsyncIterator[Any]) -> None:
    async for request in requests:
        if request.WhichOneof("input") != "data":
            raise InvalidArgument("after the port, data is expected")
        await connection.write(_bounded(request.data))
    connection.finish()


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_PIECE_BYTES:
        raise InvalidArgument(f"a message of more than {MAX_PIECE_BYTES} bytes")
    return data


def _beside(feeding: Any, session: Any) -> Deferred[None]:
    """The input, on its way beside the output. What is wrong with it ends the output."""
    running: Deferred[None] = Deferred.fromCoroutine(feeding)

    def ended(failure: Any) -> None:
        if failure.check(CancelledError, GrpcError) is not None:
            return  # the call is over
        if failure.check(InfranetesError) is None:
            _log.failure("the input of a session broke", failure)
        session.output.fail(failure.value)

    running.addErrback(ended)
    return running
