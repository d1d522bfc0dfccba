# SPDX-License-Identifier: Apache-2.0
"""Gives our agent in a VM that boots an image its identity, each time that it asks for one.

The agent asks once its guest has booted, which may be after the daemon was replaced, and again after a reboot
if it has kept none. So the document is kept beside the VM's sockets: in memory, as these are, and root's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes.providers.qemu.program.identity_port import MAX_LINE, Failed, Ready, Waiting, parse
from infranetes.providers.qemu.program.sockets import IDENTITY
from infranetes_common.concurrency import backoff, cancellable, run_in_thread, sleep, start
from infranetes_common.errors import InvalidArgument
from infranetes_common.identity import Identity, decode, encode
from infranetes_common.reactors import IReactor
from infranetes_common.transports import StreamTransport

_DOCUMENT = "identity.json"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 15.0
_log = Logger()


def keep(identity: Identity, sockets: Path) -> None:
    """Keep the identity for the VM whose sockets are in a directory. Blocks.

    :raise InvalidArgument: it can't be one. :raise OSError: it can't be kept."""
    document = encode(identity)
    descriptor = os.open(sockets / _DOCUMENT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(document)


@implementer(IPushProducer)
class _Port(Protocol):
    """The connection. :param asked: is called when the agent asks.

    :ivar full: whether the guest does not read what it was sent; it is sent no more then."""

    transport: StreamTransport | None

    def __init__(self, vm: str, asked: Callable[[], None]) -> None:
        self._vm = vm
        self._asked = asked
        self._buffer = b""
        self.lost: Deferred[None] = Deferred()
        self.full = False

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.registerProducer(self, True)

    def pauseProducing(self) -> None:
        self.full = True

    def resumeProducing(self) -> None:
        self.full = False

    def stopProducing(self) -> None:
        pass

    def dataReceived(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self._buffer = self._buffer[-MAX_LINE:]
        messages = [parse(line[-MAX_LINE:]) for line in lines]
        if any(isinstance(message, Waiting) for message in messages):
            self._asked()
        for message in messages:
            if isinstance(message, Ready):
                _log.info("the agent of VM {vm} has its identity", vm=self._vm)
            elif isinstance(message, Failed):
                reason = message.reason[:200]
                _log.error("the agent of VM {vm} refuses its identity: {reason}", vm=self._vm, reason=reason)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        lost, self.lost = self.lost, Deferred()
        lost.callback(None)


class Introduction:
    """Introduces one VM's agent, until `end`. :param alive: whether its QEMU runs."""

    def __init__(self, reactor: IReactor, vm: str, sockets: Path, alive: Callable[[], bool]) -> None:
        self._reactor = reactor
        self._vm = vm
        self._sockets = sockets
        self._alive = alive
        self._port: _Port | None = None
        self._working: Deferred[None] | None = None
        self._answering: Deferred[None] | None = None

    def begin(self) -> None:
        """Answer from now on. Idempotent."""
        if self._working is None:
            self._working = start(self._work())
            self._working.addErrback(lambda failure: failure.trap(CancelledError))

    async def _work(self) -> None:
        pauses = backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while self._alive():
            port = _Port(self._vm, self._asked)
            factory = Factory.forProtocol(lambda: port)  # noqa: B023
            factory.noisy = False
            try:
                endpoint = UNIXClientEndpoint(self._reactor, str(self._sockets / IDENTITY))
                await cancellable(endpoint.connect(factory))
                self._port = port
                await port.lost
            except CancelledError:
                raise
            except Exception as error:
                _log.warn("VM {vm} has no identity channel: {error}", vm=self._vm, error=str(error))
            await sleep(self._reactor, next(pauses))

    def _asked(self) -> None:
        if self._answering is None:  # it asks once a second
            self._answering = start(self._answer())
            self._answering.addErrback(lambda failure: failure.trap(CancelledError))

    async def _answer(self) -> None:
        try:
            document = await run_in_thread(self._reactor, (self._sockets / _DOCUMENT).read_bytes)
            identity = attrs.evolve(decode(document), now_nanos=time.time_ns())
            if self._port is not None and self._port.transport is not None and not self._port.full:
                self._port.transport.write(encode(identity))
        except (OSError, InvalidArgument) as error:
            _log.error("the agent of VM {vm} is given no identity: {error}", vm=self._vm, error=str(error))
        finally:
            self._answering = None

    def end(self) -> None:
        """Answer no more. Idempotent."""
        for waiting in (self._working, self._answering):
            if waiting is not None:
                waiting.cancel()
        if self._port is not None and self._port.transport is not None:
            self._port.transport.abortConnection()
