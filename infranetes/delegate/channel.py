# SPDX-License-Identifier: Apache-2.0
"""The connection to the delegate, and what is known of it.

=======  =====================================================================================
state    what is true
=======  =====================================================================================
UNKNOWN  it has never answered this process
UP       its last answer is the last that was heard
DOWN     there is no connection: calls fail at once, and a connection is tried again at each
=======  =====================================================================================

Apart from that it may be refused for something: it answers, but pods of ours that need this of it can't be
beside it as it is set up.
"""

from __future__ import annotations

import enum
import os
import stat
from collections.abc import AsyncGenerator, Iterable, Mapping

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.logger import Logger

from infranetes.delegate.hidden import Hidden
from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from txgrpc import Call, Channel, Code, Disconnected, GrpcError
from txgrpc.channel import Backoff
from txgrpc.raw import RawStub, metadata_of

IMAGES = "images"  # a delegate is refused for this if VMs can't be made of its images
VERSION = "/runtime.v1.RuntimeService/Version"
# The pauses are short, so that a restarted runtime is found at once: it is on the same node.
_BACKOFF = Backoff(first=0.05, most=0.5)
_AGAIN = 1.0  # seconds until a runtime that is about to start is asked again
_log = Logger()


class DelegateState(enum.Enum):
    """The state of the delegate, as far as it is known."""

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"


class Delegate:
    """The runtime behind a socket of the node.

    Calls are passed on as bytes, with what the caller gave along: its deadline, metadata and cancellation.
    They end as the delegate ends them, and are never made twice.

    :param socket: the path of its CRI socket. :param source: the file that names it, which errors name.
    :ivar hidden: its sandboxes that nobody is shown.
    :ivar kind: its name as `Version` has it, such as containerd or cri-o; empty until it has answered.
    """

    def __init__(self, reactor: IReactor, socket: str, source: str = "configuration") -> None:
        self.socket = socket
        self._source = source
        self._reactor = reactor
        self.state = DelegateState.UNKNOWN
        self.hidden = Hidden()
        self.kind = ""
        self.version = ""
        self._trouble = "it has not answered yet"
        self._stranger = ""  # what to do about a socket that is not a runtime's, as a sentence
        self._refusals: dict[str, str] = {}
        self._meeting: Deferred[None] | None = None
        self._stopped = False
        self._channel = Channel(reactor, UNIXClientEndpoint(reactor, socket), backoff=_BACKOFF)
        self._stub = RawStub(self._channel)

    @property
    def trouble(self) -> str:
        """The reason why the delegate does not answer, and what to do, as a sentence; "" while it does."""
        if self.state is DelegateState.UP:
            return ""
        return self._stranger or (
            f"the delegate at {self.socket} does not answer: {self._trouble}; start it, or name its socket "
            f"as delegate.socket in {self._source}"
        )

    def shown(self) -> dict[str, str]:
        """Return what is known of it, for people."""
        found = {"socket": self.socket, "state": self.state.value, "kind": self.kind, "version": self.version}
        return {**found, "trouble": self.trouble, "refusal": "; ".join(self._refusals.values())}

    # Refusal

    def refuse(self, about: str, why: str) -> None:
        """Refuse it for something: no pod of ours that needs this is begun. Without `why` nothing is wrong.

        :param about: IMAGES, or what `refused_name` says of a runtime handler."""
        if self._refusals.get(about, "") == why:
            return
        if why:
            _log.error(
                "pods in VMs are refused because of the delegate's {about}: {why}", about=about, why=why
            )
            self._refusals[about] = why
        else:
            _log.info("pods in VMs are no longer refused because of the delegate's {about}", about=about)
            del self._refusals[about]

    @property
    def refusals(self) -> Mapping[str, str]:
        """The reasons why the delegate is refused, as sentences, by what it is refused for."""
        return self._refusals

    def check(self, needs: Iterable[str]) -> None:
        """Check that it is not refused for what a pod of ours needs.

        :raise FailedPrecondition: it is; says why."""
        for about in needs:
            if about in self._refusals:
                raise FailedPrecondition(self._refusals[about])

    # Calls

    async def call(self, path: str, request: bytes, call: Call | None = None, timeout: float = 10) -> bytes:
        """Make a unary call.

        :param call: the caller's, which is passed on. :param timeout: seconds, without one.
        :raise GrpcError: as the delegate ended it. :raise Unavailable: there is no connection."""
        seconds = timeout if call is None else call.time_remaining()
        try:
            response = await self._stub.call(path, request, timeout=seconds, metadata=_passed(call))
        except GrpcError as error:
            raise self._failed(error) from None
        self._answered()
        return response

    async def stream(
        self, path: str, request: bytes, call: Call | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Make a call with a stream of responses. Raises as `call` does."""
        seconds = None if call is None else call.time_remaining()
        try:
            stream = self._stub.stream(path, request, timeout=seconds, metadata=_passed(call))
            async with stream as responses:
                async for response in responses:
                    self._answered()
                    yield response
        except GrpcError as error:
            raise self._failed(error) from None
        self._answered()

    @property
    def stub(self) -> RawStub:
        """A stub for calls of which only the path is known."""
        return self._stub

    def start(self) -> None:
        """Begin to wait until it answers, to learn what it is; likewise each time that it comes back."""
        if self._meeting is None or self._meeting.called:
            self._meeting = start(self.meet())
            self._meeting.addErrback(lambda failure: failure.trap(CancelledError) and None)
            self._meeting.addErrback(
                lambda failure: _log.failure("asking the delegate what runtime it is failed", failure=failure)
            )

    async def meet(self) -> None:
        """Wait until it answers, and learn what it is."""
        waits = False  # not at first, so that the log says what the daemon waits for
        while True:
            try:
                answer = await self._stub.call(VERSION, b"", timeout=None, wait_for_ready=waits)
                break
            except GrpcError as error:  # it is about to start, or to end
                if self._stopped:
                    return
                self._failed(error)
                if error.code is Code.UNIMPLEMENTED:
                    self._is_strange(error.message)
                await sleep(self._reactor, _AGAIN)
            waits = True
        self._stranger = ""
        self._met(answer)
        self.state = DelegateState.UP
        _log.info(
            "the delegate at {socket} is {kind} {version}",
            socket=self.socket,
            kind=self.kind,
            version=self.version,
        )

    async def asked_kind(self) -> str:
        """Return `kind`, and ask for it if it is not known yet. Raises as `call` does."""
        if not self.kind:
            self._met(await self.call(VERSION, b""))
        return self.kind

    async def stop(self) -> None:
        """Close the connection; calls that run fail."""
        self._stopped = True
        if self._meeting is not None:
            self._meeting.cancel()
        await self._channel.close()

    def _met(self, answer: bytes) -> None:
        version = cri.VersionResponse.FromString(answer)
        self.kind, self.version = version.runtime_name, version.runtime_version

    def _answered(self) -> None:
        if self.state is DelegateState.DOWN:
            _log.info("the delegate at {socket} answers again", socket=self.socket)
            self._is_back()
        self.state = DelegateState.UP

    def _is_back(self) -> None:
        """Ask it for its name and release again: it may have been upgraded while it was away."""
        if not self._stopped:
            self.start()

    def _failed(self, error: GrpcError) -> Exception:
        """Return the error for the caller, and note what an error says about the delegate."""
        if not isinstance(error, Disconnected):
            if error.code is not Code.UNIMPLEMENTED:
                return error
            if self.state is DelegateState.DOWN:
                self.state = DelegateState.UNKNOWN
                self._is_back()
            return GrpcError(error.code, self._stranger) if self._stranger else error
        self._trouble, self._stranger = _why(self.socket, error.message), ""
        if self.state is not DelegateState.DOWN:
            self.state = DelegateState.DOWN
            _log.warn("{trouble}", trouble=self.trouble)
        return Unavailable(self.trouble)

    def _is_strange(self, words: str) -> None:
        """Note that the server that answers is not such a runtime."""
        if not self._stranger:
            self._stranger = (
                f"what listens at {self.socket} offers no CRI ({words[:200]}): name containerd's or CRI-O's "
                f"socket as delegate.socket in {self._source}; if it is containerd's, take cri out of "
                "disabled_plugins in its configuration"
            )
            _log.error("{words}", words=self._stranger)


def refused_name(handler: str) -> str:
    """Return the key in `Delegate.refusals` for a delegate that has a runtime handler of the same name."""
    return f"runtime handler {handler}"


def _why(socket: str, words: str) -> str:
    """Return why there is no connection, in fewer words than Twisted's in simple cases."""
    try:
        if not stat.S_ISSOCK(os.stat(socket).st_mode):
            return "that is no socket"
    except FileNotFoundError:
        return "there is no such socket"
    except OSError as error:
        return error.strerror or str(error)
    return "nobody listens there" if "Connection refused" in words else words


def _passed(call: Call | None) -> tuple[tuple[str, str | bytes], ...]:
    return () if call is None else tuple(metadata_of(call))
