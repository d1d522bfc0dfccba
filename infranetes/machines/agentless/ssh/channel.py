# SPDX-License-Identifier: Apache-2.0
"""One command of a guest: a channel with its streams, its terminal and its end."""

from __future__ import annotations

import signal
import struct
from collections import deque

from twisted.conch.ssh.channel import SSHChannel
from twisted.conch.ssh.common import NS, getNS
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from infranetes.machines.agentless.local_call import Stream
from infranetes.machines.agentless.ssh.connection import MAX_DATA, Connection
from infranetes.machines.agentless.ssh.transport import Silent, shown
from infranetes_common.concurrency import Event, Notifier
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable

WINDOW = 1024 * 1024  # bytes of output that the guest sends ahead of its reader
DRAIN_SECONDS = 2.0  # for reading output of a command's descendants after the command's end
_UNKNOWN_SIGNAL = 255  # the exit code of what a signal has ended that has no number here
_END_OF_FILE = b"\x04"  # as it is typed in a terminal
_UNTOLD = "its SSH server ended the command without saying how"


class CommandChannel(SSHChannel):
    """A channel of the type session. Iterate over it: the command's output, as (stream, bytes).

    :ivar opened: succeeds once the server has opened it; what is wrong is its error.
    """

    name = b"session"
    _log = Silent()
    conn: Connection

    def __init__(self, reactor: IReactorTime) -> None:
        super().__init__(localWindow=WINDOW, localMaxPacket=MAX_DATA)
        self._reactor = reactor
        self.opened: Event[None] = Event()
        self.over: Event[None] = Event()
        self.tty = False
        self._output: deque[tuple[Stream, bytes]] = deque()
        self._uncredited = 0
        self._ended_input = False
        self._exit_code: int | None = None
        self._drain: IDelayedCall | None = None
        self._changed = Notifier()

    # From the connection

    def channelOpen(self, specificData: bytes) -> None:
        self.opened.succeed(None)

    def openFailed(self, reason: Exception) -> None:
        self.opened.fail(refusal(reason))
        self._end()

    def addWindowBytes(self, data: int) -> None:
        self.remoteWindowLeft = min(self.remoteWindowLeft + data, 2**32)
        self._changed.notify()

    def arrived(self, stream: int, data: bytes) -> None:
        """See `connection.Receiver`."""
        if self.over.happened or stream not in (0, 1):
            self._credit(len(data))
        elif data:
            self._output.append(("stderr" if stream else "stdout", data))
            self._changed.notify()

    def request_exit_status(self, data: bytes) -> bool:
        (code,) = struct.unpack(">L", data[:4])
        self._exited(code if code < 2**31 else code - 2**32)
        return True

    def request_exit_signal(self, data: bytes) -> bool:
        name, _ = getNS(data)
        number = signal.Signals.__members__.get(f"SIG{shown(name)}")
        self._exited(_UNKNOWN_SIGNAL if number is None else 128 + number)
        return True

    def requestReceived(self, requestType: bytes, data: bytes) -> bool:
        if requestType == b"exit-status":
            return self.request_exit_status(data)
        return requestType == b"exit-signal" and self.request_exit_signal(data)

    def _exited(self, code: int) -> None:
        if self._exit_code is None:
            self._exit_code = code
            self._drain = self._reactor.callLater(DRAIN_SECONDS, self._drained)

    def _drained(self) -> None:
        self._drain = None
        if self._output:  # its reader is behind
            self._drain = self._reactor.callLater(DRAIN_SECONDS, self._drained)
        else:
            self.close()

    def eofReceived(self) -> None:
        """Nothing more comes; the exit status may."""

    def closeReceived(self) -> None:
        self.conn.sendClose(self)
        self._end()

    def closed(self) -> None:
        self._end()

    def _end(self) -> None:
        drain, self._drain = self._drain, None
        if drain is not None:
            drain.cancel()
        self.over.succeed(None)
        self._changed.notify()

    # For its user

    @property
    def runs(self) -> bool:
        """Whether its command has not ended, as far as is known."""
        return self._exit_code is None and not self.over.happened

    def close(self) -> None:
        """Close the channel. Idempotent; a command without a terminal runs on."""
        if not self.over.happened:
            if self.opened.happened and not self.localClosed:
                self.conn.sendClose(self)
            self._output.clear()
            self._end()

    def request(self, kind: bytes, data: bytes) -> Deferred[object]:
        """Make a request and wait for the server's consent; ConchError: it refuses."""
        answer: Deferred[object] | None = self.conn.sendRequest(self, kind, data, wantReply=1)
        if answer is None:
            raise self.lost or Unavailable(_UNTOLD)
        return answer

    def open_terminal(self, term: str) -> Deferred[object]:
        """Have the command run in a terminal."""
        self.tty = True
        return self.request(b"pty-req", NS(term.encode()) + struct.pack(">4L", 80, 24, 0, 0) + NS(b"\0"))

    def resize(self, width: int, height: int) -> None:
        """Tell the command's terminal its size in characters."""
        if not self.over.happened:
            size = struct.pack(">4L", width, height, 0, 0)
            self.conn.sendRequest(self, b"window-change", size)

    def kill(self) -> None:
        """Kill the command, as far as its server does that, and close the channel."""
        if not self.over.happened and self.opened.happened:
            self.conn.sendRequest(self, b"signal", NS(b"KILL"))
        self.close()

    async def write_stdin(self, data: bytes) -> None:
        """Write to the command's stdin, no faster than it is read. Dropped after its end."""
        view = memoryview(data)
        while view and not self._ended_input and not self.over.happened:
            await self.conn.transport.clear()
            if self.over.happened:
                return
            size = min(len(view), self.remoteWindowLeft, self.remoteMaxPacket, MAX_DATA)
            if not size:
                await self._changed.wait()
                continue
            self.conn.sendData(self, bytes(view[:size]))
            self.remoteWindowLeft -= size
            view = view[size:]

    async def end_stdin(self) -> None:
        """End the command's stdin: in a terminal, as one types that. Idempotent."""
        if self._ended_input or self.over.happened:
            return
        if self.tty:
            await self.write_stdin(_END_OF_FILE)
        self._ended_input = True
        if not self.tty:
            self.conn.sendEOF(self)

    def __aiter__(self) -> CommandChannel:
        return self

    async def __anext__(self) -> tuple[Stream, bytes]:
        while not self._output and not self.over.happened:
            await self._changed.wait()
        if not self._output:
            raise StopAsyncIteration
        stream, data = self._output.popleft()
        self._credit(len(data))
        return stream, data

    def _credit(self, size: int) -> None:
        """Let the server send as much as has been taken, in large steps."""
        self._uncredited += size
        if self._uncredited >= WINDOW // 4 and not self.over.happened:
            self.conn.adjustWindow(self, self._uncredited)
            self._uncredited = 0

    def exit_code(self) -> int:
        """Return how the command has ended. :raise Unavailable: that is not known."""
        if self._exit_code is None:
            raise self.lost or Unavailable(_UNTOLD)
        return self._exit_code

    @property
    def lost(self) -> InfranetesError | None:
        """Why the connection is lost; None: it is not."""
        return self.conn.transport.reason


def refusal(reason: Exception) -> InfranetesError:
    """Return why a channel was not opened."""
    code = getattr(reason, "data", None)  # ConchError's
    text = shown(getattr(reason, "value", b"") or b"") if code is not None else str(reason)
    return FailedPrecondition(f"its SSH server opens no session: {text}")
