# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl vnc`: VNC viewers of this machine at screen and keyboard of a pod's VM."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import cast

from twisted.internet.address import IPv4Address
from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.endpoints import TCP4ServerEndpoint, UNIXServerEndpoint
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IAddress, IListeningPort, IStreamServerEndpoint
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure

from infranetes.ctl.calls import ASK_SECONDS
from infranetes.ctl.session import Session
from infranetes_common.byte_connection import ByteConnection
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.wire import control
from txgrpc import Code, GrpcError, StreamCall

HOST = "127.0.0.1"
SOCKET_MODE = 0o600
AHEAD_BYTES = 512 * 1024  # the most that is received of the screen before a viewer has taken it

_Call = StreamCall[control.ConnectScreenRequest, control.ConnectScreenResponse]
_FOR_GOOD = (Code.NOT_FOUND, Code.FAILED_PRECONDITION, Code.INVALID_ARGUMENT, Code.PERMISSION_DENIED)


async def vnc(session: Session) -> int:
    """Serve viewers until this is interrupted, or the daemon refuses for good.

    :raise GrpcError: the daemon refuses. :raise InfranetesError: it can't be listened on."""
    vm = await _check(session)
    viewers = _Viewers(session)
    listening = await _listen(session, viewers)
    try:
        _tell(session, vm, listening)
        await viewers.over
    finally:
        viewers.end()
        await maybeDeferred(listening.stopListening)
    raise AssertionError("it ends by an error or an interruption alone")


async def _check(session: Session) -> control.VmOfPod:
    """Return the VM that is meant. Fails as connecting to its screen would."""
    call = session.stub.ConnectScreen(timeout=ASK_SECONDS)
    try:
        await call.send(_begin(session, only_check=True))
        await call.done_sending()
        async for answer in call:
            return answer.begun
    finally:
        call.cancel()
    raise InfranetesError("the daemon did not say which VM this is; its log says why")


def _begin(session: Session, *, only_check: bool = False) -> control.ConnectScreenRequest:
    wanted = control.ConnectScreenStart(pod=session.options.pod, only_check=only_check)
    return control.ConnectScreenRequest(start=wanted)


def _endpoint(session: Session) -> IStreamServerEndpoint:
    options, reactor = session.options, session.reactor
    if options.unix is not None:
        return UNIXServerEndpoint(reactor, str(options.unix), mode=SOCKET_MODE)
    return TCP4ServerEndpoint(reactor, options.listen, interface=HOST)


async def _listen(session: Session, viewers: _Viewers) -> IListeningPort:
    options = session.options
    try:
        found: IListeningPort = await _endpoint(session).listen(viewers)
    except (CannotListenError, OSError) as error:
        why = error.socketError if isinstance(error, CannotListenError) else error
        where = options.unix if options.unix is not None else f"{HOST}:{options.listen}"
        raise FailedPrecondition(
            f"{where} can't be listened on: {why}; give another --listen PORT or --unix PATH"
        ) from None
    return found


def _tell(session: Session, vm: control.VmOfPod, listening: IListeningPort) -> None:
    path = session.options.unix
    port = cast(IPv4Address, listening.getHost()).port if path is None else None
    if session.options.json:
        found = {
            "sandbox_id": vm.sandbox_id,
            "namespace": vm.namespace,
            "name": vm.name,
            "vm_id": vm.vm_id,
            "host": HOST if path is None else None,
            "port": port,
            "unix": str(path) if path is not None else None,
        }
        session.print(json.dumps(found))
        return
    session.print(f"---- screen of VM {vm.vm_id} of pod {vm.namespace}/{vm.name}; Ctrl-C ends this")
    session.print(f"vncviewer {HOST}::{port}" if path is None else f"vncviewer {path}")
    if path is None:
        session.print("every user of this machine can connect meanwhile; to --unix PATH only this one")


class _Viewers(Factory):
    """Connects each viewer with the screen. :ivar over: fails once the daemon refuses for good."""

    noisy = False

    def __init__(self, session: Session) -> None:
        self.over: Deferred[None] = Deferred()
        self._session = session
        self._connected: set[ByteConnection] = set()
        self._ending = False

    def end(self) -> None:
        """Disconnect all viewers."""
        self._ending = True
        for viewer in list(self._connected):
            viewer.abort()

    def buildProtocol(self, addr: IAddress | None) -> ByteConnection:
        return _Viewer(self._arrived)

    def _arrived(self, viewer: ByteConnection) -> None:
        self._connected.add(viewer)
        start(self._serve(viewer)).addErrback(self._ended, viewer)

    async def _serve(self, viewer: ByteConnection) -> None:
        call = self._session.stub.ConnectScreen(timeout=None)
        call.receive_ahead(AHEAD_BYTES)
        feeding: Deferred[None] | None = None
        try:
            await call.send(_begin(self._session))
            feeding = start(_feed(viewer, call))
            feeding.addErrback(_feed_ended)
            async for answer in call:
                if answer.WhichOneof("output") == "data":
                    await viewer.write(answer.data)
            viewer.close()
        finally:
            self._connected.discard(viewer)
            if feeding is not None:
                feeding.cancel()
            call.cancel()

    def _ended(self, failure: Failure, viewer: ByteConnection) -> None:
        viewer.abort()
        if self._ending or failure.check(Unavailable):  # the viewer left
            return
        error = failure.value
        if isinstance(error, GrpcError) and error.code in _FOR_GOOD:
            if not self.over.called:
                self.over.errback(failure)
        else:
            words = error.message if isinstance(error, GrpcError) else str(error)
            print(f"infranetes-ctl: a viewer was disconnected: {words}", file=sys.stderr, flush=True)


class _Viewer(ByteConnection):
    def __init__(self, connected: Callable[[ByteConnection], None]) -> None:
        super().__init__("the viewer")
        self._connected = connected

    def connectionMade(self) -> None:
        super().connectionMade()
        self._connected(self)


async def _feed(viewer: ByteConnection, call: _Call) -> None:
    while data := await viewer.read():
        await call.send(control.ConnectScreenRequest(data=data))
    await call.done_sending()


def _feed_ended(failure: Failure) -> None:
    """Ignore how what the viewer says ended: the call, or writing to it, tells of the end."""
    failure.trap(CancelledError, GrpcError, Unavailable)
