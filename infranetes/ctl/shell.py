# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl enter` and `exec`: a shell in a pod's VM, or a command in a container of it.

It is on this terminal, or has these pipes.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext, suppress

from twisted.internet.defer import CancelledError
from twisted.python.failure import Failure

from infranetes.ctl.session import INTERRUPTED, Session
from infranetes.ctl.terminal import Descriptor, Leaving, raw_terminal, window_size
from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError, InvalidArgument
from infranetes_common.wire import control
from txgrpc import Disconnected, GrpcError, StreamCall

AHEAD_BYTES = 512 * 1024  # the most output that is received before it is written
STDIN, STDOUT, STDERR = 0, 1, 2

_Call = StreamCall[control.EnterPodRequest, control.EnterPodResponse]


async def enter(session: Session) -> int:
    """Open the shell, and return its exit code once it has ended.

    :raise GrpcError: the daemon refuses, or the connection to it or to the VM is lost."""
    terminal = os.isatty(STDIN) and os.isatty(STDOUT)
    wanted = control.EnterPodStart(
        pod=session.options.pod,
        command=session.options.words,
        tty=terminal,
        term=os.environ.get("TERM", "") if terminal else "",
    )
    return await _run(session, session.stub.EnterPod(timeout=None), wanted)


async def execute(session: Session) -> int:
    """Run a command in a container, and return its exit code once it has ended.

    :raise InvalidArgument: there is none. :raise GrpcError: as of `enter`."""
    options = session.options
    if not options.words:
        raise InvalidArgument("say what to run: infranetes-ctl exec POD -- COMMAND")
    terminal = options.tty and os.isatty(STDIN) and os.isatty(STDOUT)
    if options.tty and not terminal:
        print("infranetes-ctl: standard input and output are no terminal, so that --tty is left out",
              file=sys.stderr)  # fmt: skip
    wanted = control.EnterPodStart(
        pod=options.pod,
        container=options.in_container,
        command=options.words,
        tty=terminal,
        no_stdin=not options.stdin,
    )
    return await _run(session, session.stub.ExecPod(timeout=None), wanted)


async def _run(session: Session, call: _Call, wanted: control.EnterPodStart) -> int:
    call.receive_ahead(AHEAD_BYTES)
    try:
        await call.send(control.EnterPodRequest(start=wanted))
        begun = await anext(aiter(call), None)
        if begun is None:
            raise _unfinished()
        if wanted.tty:
            _greet(begun.begun)
        return await _Entered(session, call, wanted).until_it_ends()
    finally:
        call.cancel()


def _unfinished() -> InfranetesError:
    return InfranetesError("the daemon ended the shell without an exit code; its log says why")


def _greet(begun: control.VmOfPod) -> None:
    where = f"VM {begun.vm_id} of pod {begun.namespace}/{begun.name}"
    print(f"---- {where}; ^] three times within a second leaves it", file=sys.stderr, flush=True)


class _Entered:
    """A shell that is open, or a command that runs."""

    def __init__(self, session: Session, call: _Call, first: control.EnterPodStart) -> None:
        self._reactor = session.reactor
        self._call = call
        self._terminal = first.tty
        self._silent = first.no_stdin
        self._left = False

    async def until_it_ends(self) -> int:
        """Pass on what goes in and out. Return the exit code."""
        typed = self._terminal and not self._silent  # else Ctrl-C is a signal
        raw = raw_terminal(self._reactor, STDIN, self._resized) if typed else nullcontext()
        failed = self._terminal
        stopping = self._reactor.addSystemEventTrigger("before", "shutdown", self._leave)
        try:
            with raw:
                feeding = start(self._feed())
                feeding.addErrback(_feed_ended)
                try:
                    code = await self._show()
                finally:
                    feeding.cancel()
            failed = False
            return code
        except GrpcError as error:
            if self._left:
                return INTERRUPTED
            if isinstance(error, Disconnected):
                raise
            raise InfranetesError(error.message) from None  # in the daemon's words
        finally:
            with suppress(ValueError):  # the trigger was called
                self._reactor.removeSystemEventTrigger(stopping)
            if failed:  # the last output may lack a newline
                print(file=sys.stderr, flush=True)

    async def _show(self) -> int:
        outputs = {"stdout": Descriptor(self._reactor, STDOUT), "stderr": Descriptor(self._reactor, STDERR)}
        async for answer in self._call:
            kind = answer.WhichOneof("output")
            if kind == "exit_code":
                return answer.exit_code
            if kind in outputs:
                await outputs[kind].write(answer.stdout if kind == "stdout" else answer.stderr)
        raise _unfinished()

    async def _feed(self) -> None:
        self._resized()
        if self._silent:
            return
        keyboard, leaving = Descriptor(self._reactor, STDIN), Leaving()
        while data := await keyboard.read():
            if self._terminal and leaving.typed(data, self._reactor.seconds()):
                return self._leave()
            await self._call.send(control.EnterPodRequest(stdin=data))
        await self._call.done_sending()

    def _leave(self) -> None:
        self._left = True
        self._call.cancel()

    def _resized(self) -> None:
        size = window_size(STDOUT) if self._terminal else None
        if size is not None:
            window = control.WindowSize(width=size[0], height=size[1])
            start(self._call.send(control.EnterPodRequest(resize=window))).addErrback(_feed_ended)


def _feed_ended(failure: Failure) -> None:
    """Ignore how the input ended: the output tells what ended the call."""
    failure.trap(CancelledError, GrpcError)
