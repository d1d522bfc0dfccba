# SPDX-License-Identifier: Apache-2.0
"""The connection to a guest's agent: made when something is asked, and again after a loss.

QEMU takes the connection whether or not there is an agent, and one at a time. Requests wait for each other. A
guest that sends nonsense is left alone for a while, which grows; one that is silent is given up at once for
some seconds, but by `reach`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from twisted.internet.defer import CancelledError, Deferred, DeferredLock
from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.machines.agentless.guest_agent.protocol import Answer, Conversation, Nonsense, Request
from infranetes_common.concurrency import Flight, backoff, cancellable, sleep, within
from infranetes_common.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from infranetes_common.transports import StreamTransport

CONNECT_SECONDS = 10.0
SYNC_SECONDS = 10.0  # for the first answer on a connection
MOST_WAITING = 200  # requests
ATTEMPT_SECONDS = 5.0  # of `reach`, on a connection of its own: an agent that starts forgets what came before
CONNECT_PAUSE = 0.5  # between attempts of `reach`
SILENT_PAUSES = 0.5, 5.0  # the first and the longest
NONSENSE_PAUSES = 1.0, 60.0
FORGIVEN_SECONDS = 600.0  # without nonsense, after which its pauses begin anew

T = TypeVar("T")

_log = Logger()


class Unanswered(Unavailable):
    """A request was sent, and no answer came: what became of it is not known."""


class _Channel(Protocol):
    """One connection."""

    transport: StreamTransport | None

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._conversation = Conversation()
        self._expected: Deferred[Answer] | None = None
        self._timer: IDelayedCall | None = None
        self._silence = self._until = 0.0
        self.lost = False
        self.nonsense = False

    @property
    def ready(self) -> bool:
        return self._conversation.ready and not self.lost

    def synchronise(self, seconds: float) -> Deferred[Answer]:
        return self._send(self._conversation.synchronise(), seconds, seconds)

    def ask(self, request: Request) -> Deferred[Answer]:
        return self._send(self._conversation.ask(request), request.silence, request.total)

    def _send(self, data: bytes, silence: float, total: float) -> Deferred[Answer]:
        assert self._expected is None
        expected = self._expected = Deferred[Answer]()
        self._silence, self._until = silence, self._clock.seconds() + total
        self._timer = self._clock.callLater(min(silence, total), self._too_late)
        assert self.transport is not None
        self.transport.write(data)
        return expected

    def dataReceived(self, data: bytes) -> None:
        try:
            answer = self._conversation.receive(data)
        except Nonsense as nonsense:
            self.cut(nonsense)
            return
        if answer is not None:
            self._end(answer)
        elif self._timer is not None:
            self._timer.reset(max(0.0, min(self._silence, self._until - self._clock.seconds())))

    def _too_late(self) -> None:
        self._timer = None
        self.close("it does not answer")

    def _end(self, result: Answer | Failure) -> None:
        expected, self._expected = self._expected, None
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if expected is not None:
            expected.callback(result)  # errback, if it is a Failure

    def cut(self, nonsense: Nonsense) -> None:
        """Close the connection to a guest that sends nonsense."""
        self.nonsense = True
        self.close(f"it sent {nonsense}")

    def close(self, why: str) -> None:
        """Close the connection. Idempotent."""
        if not self.lost:
            self.lost = True
            self._end(Failure(Unanswered(why)))
            if self.transport is not None:
                self.transport.abortConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost = True
        self._end(Failure(Unanswered("the connection was lost")))


class _Channels(Factory):
    noisy = False

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock

    def buildProtocol(self, addr: IAddress | None) -> _Channel:
        return _Channel(self._clock)


class AgentConnection:
    """What requests are sent over.

    :param name: whose agent it is, for messages: "the QEMU guest agent of sandbox 1f2e".
    :ivar conversations: how many have begun: what was learned in an earlier one may be wrong by now.
    :ivar closed: whether `close` was called.
    """

    def __init__(self, clock: IReactorTime, endpoint: IStreamClientEndpoint, name: str) -> None:
        self.clock = clock
        self.name = name
        self.conversations = 0
        self._endpoint = endpoint
        self._channel: _Channel | None = None
        self._connecting: Deferred[_Channel] | None = None
        self._turn = DeferredLock()
        self._waiting = 0
        self.closed = False
        self._depending: set[Deferred[Any]] = set()  # Any: each has its own result
        self._why = ""  # there was no answer the last time
        self._silent_until = self._nonsense_until = 0.0
        self._silent = backoff(*SILENT_PAUSES)
        self._nonsense = backoff(*NONSENSE_PAUSES)

    async def ask(
        self,
        request: Request,
        read: Callable[[Answer], T],
        abandoned: Callable[[T], object] = lambda result: None,
    ) -> T:
        """Ask the agent, once those that asked before have their answers, and return what `read` returns.

        Cancelled before its turn, it is never sent.

        :param read: is given the answer, and raises Nonsense if it is none, or what is to be raised here.
        :param abandoned: called with the result, if this is cancelled before that is there.
        :raise Unavailable: no answer; `Unanswered` once the request was sent.
        :raise ResourceExhausted: too many wait already.
        """
        await self._take_turn(request.total)
        try:
            self._check_pauses()
        except Unavailable:
            self._end_turn()
            raise
        exchange = Flight(self._exchange(request, read))
        try:
            return await exchange.join()
        except CancelledError:
            exchange.join().addCallbacks(abandoned, lambda failure: None)
            raise

    async def reach(self, seconds: float) -> None:
        """Return once the agent answers, now. :raise Unavailable: it does not, in so many seconds."""
        end = self.clock.seconds() + seconds
        while True:
            pause = self._nonsense_until - self.clock.seconds()
            if pause <= 0:
                try:
                    await self._answers(end - self.clock.seconds())
                    return
                except Unavailable as error:
                    pause, why = CONNECT_PAUSE, str(error)
            else:
                why = self._reason()
            left = end - self.clock.seconds()
            if self.closed or left <= pause:
                raise Unavailable(why)
            await self.pause(pause)

    async def _answers(self, seconds: float) -> None:
        await self._take_turn(seconds)
        seconds = max(min(seconds, ATTEMPT_SECONDS), 0.1)
        ping = Request("guest-ping", silence=seconds, total=seconds)
        await Flight(self._exchange(ping, lambda answer: None, seconds)).join()

    async def pause(self, seconds: float) -> None:
        """Wait between two requests. :raise Unavailable: the connection is closed meanwhile."""
        await self.while_open(sleep(self.clock, seconds))

    async def while_open(self, work: Deferred[T]) -> T:
        """Return the result of `work`. :raise Unavailable: the connection is closed before, or meanwhile."""
        self._depending.add(work)
        try:
            if self.closed:
                work.cancel()
            return await work
        except CancelledError:
            if self.closed:
                raise Unavailable(f"the connection to {self.name} was closed") from None
            raise
        finally:
            self._depending.discard(work)

    def close(self) -> None:
        """Close the connection; requests under way fail with Unavailable. Idempotent."""
        self.closed = True
        for work in list(self._depending):
            work.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._channel is not None:
            self._channel.close("the connection to it was closed")

    def _reason(self) -> str:
        return f"{self.name} can't be asked: {self._why}"

    def _check_pauses(self) -> None:
        if max(self._nonsense_until, self._silent_until) > self.clock.seconds():
            raise Unavailable(self._reason())

    async def _take_turn(self, seconds: float) -> None:
        if self._waiting >= MOST_WAITING:
            raise ResourceExhausted(f"{self.name} has {MOST_WAITING} requests to answer; try again later")
        self._waiting += 1
        try:
            await within(self.clock, seconds, self._turn.acquire(), "")
        except DeadlineExceeded:
            raise Unavailable(f"{self.name} is busy with an earlier request; try again later") from None
        finally:
            self._waiting -= 1

    async def _exchange(
        self, request: Request, read: Callable[[Answer], T], sync_seconds: float = SYNC_SECONDS
    ) -> T:
        """Send a request, in its turn, which ends with this."""
        try:
            channel = await self._ready_channel(sync_seconds)
            answer = await channel.ask(request)
            self._silent_until, self._silent = 0.0, backoff(*SILENT_PAUSES)
            try:
                return read(answer)
            except Nonsense as nonsense:
                channel.cut(nonsense)
                raise Unavailable(f"it answered {request.command} with {nonsense}") from None
        except Unavailable as error:
            if self._channel is None or self._channel.lost:
                self._failed(str(error))
                raise type(error)(self._reason()) from None
            raise
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        if self._turn.waiting:
            self.clock.callLater(0, self._turn.release)  # many that fail at once are not called by each other
        else:
            self._turn.release()

    async def _ready_channel(self, seconds: float) -> _Channel:
        if self.closed:
            raise Unavailable("the connection to it was closed")
        if self._channel is not None and self._channel.ready:
            return self._channel
        self._channel = await self._connected()
        try:
            await self._channel.synchronise(seconds)
        except Unanswered as error:
            raise Unavailable(str(error)) from None
        self.conversations += 1
        return self._channel

    async def _connected(self) -> _Channel:
        connecting = cast("Deferred[_Channel]", self._endpoint.connect(_Channels(self.clock)))
        self._connecting = connecting
        try:
            return await within(self.clock, CONNECT_SECONDS, cancellable(connecting), "connecting")
        except CancelledError:
            raise Unavailable("the connection to it was closed") from None
        except Exception as error:  # an endpoint may raise whatever it likes
            raise Unavailable(f"no connection to its port: {str(error)[:200]}") from None
        finally:
            self._connecting = None

    def _failed(self, why: str) -> None:
        now = self.clock.seconds()
        channel, self._channel = self._channel, None
        self._why = why
        if channel is not None:
            channel.close(why)
        if channel is None or not channel.nonsense:
            self._silent_until = now + next(self._silent)
            return
        if now > self._nonsense_until + FORGIVEN_SECONDS:
            self._nonsense = backoff(*NONSENSE_PAUSES)
        self._nonsense_until = now + next(self._nonsense)
        _log.warn("{name} is left alone for a while: {why}", name=self.name, why=why)
