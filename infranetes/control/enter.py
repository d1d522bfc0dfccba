# SPDX-License-Identifier: Apache-2.0
"""The call of ``proto/control.proto`` that opens a shell in a pod's VM: what goes in and out is relayed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from pathlib import Path

import attrs
from twisted.internet.defer import CancelledError, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.control.chosen import find_sandbox
from infranetes.machines.sessions import SessionCall
from infranetes.pods.node.inventory import Inventory, PastSandbox, Sandbox
from infranetes.pods.store.states import SandboxState
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
    to_grpc,
)
from infranetes_common.wire import control, vmserver
from infranetes_common.wire.control_rpcs import ControlShellRpcs
from txgrpc import Call, GrpcError
from txgrpc.peers import PeerCredentials

KEY = "control.enter"
MAX_CHUNK_BYTES = 256 * 1024  # of input in one message: an agent takes no more
AHEAD_BYTES = 512 * 1024  # the most that the caller may send before the agent has taken it
START_SECONDS = 30.0  # within which the first message has to come
MAX_SHELLS = 32  # shells of the whole node at a time; an agent has a limit of its own
_NOBODY = 2**32 - 1  # a login uid that is not set

_log = Logger()

Requests = AsyncIterator[control.EnterPodRequest]


@attrs.define(eq=False)
class _Shell:
    """A shell that is open. :ivar error: why it is ended here."""

    call: SessionCall
    error: InfranetesError | None = None

    def end(self, error: InfranetesError) -> None:
        """End it with this error. The first one counts."""
        self.error = self.error or error
        self.call.cancel()


@attrs.frozen
class _Visitor:
    """The caller. :ivar login: the uid that logged in, though it is another one by now; None: not known."""

    uid: int | None
    pid: int | None
    login: int | None


def _visitor(peer: PeerCredentials | None) -> _Visitor:
    if peer is None:
        return _Visitor(None, None, None)
    login = None
    with suppress(OSError, ValueError):
        login = int(Path(f"/proc/{peer.pid}/loginuid").read_text())
    return _Visitor(peer.uid, peer.pid, None if login == _NOBODY else login)


class EnterCalls(ControlShellRpcs):
    """Opens shells in pods' VMs, and logs who did and for how long, but never the input or output.

    :param allowed: whether the configuration allows it now.
    """

    def __init__(self, clock: IReactorTime, inventory: Inventory, allowed: Callable[[], bool]) -> None:
        self._clock = clock
        self._inventory = inventory
        self._allowed = allowed
        self._open: set[_Shell] = set()

    async def EnterPod(self, requests: Requests, call: Call) -> AsyncIterator[control.EnterPodResponse]:
        call.receive_ahead(AHEAD_BYTES)
        visitor = _visitor(call.peer_credentials)
        if not self._allowed():
            _log.warn("a shell in a pod's VM was refused: {key} is false", key=KEY, **attrs.asdict(visitor))
            raise PermissionDenied(
                f"nobody may enter pods' VMs on this node: set {KEY} = true in its configuration, and reload "
                "it (systemctl reload infranetes)"
            )
        wanted = await self._first(requests)
        if len(self._open) >= MAX_SHELLS:
            raise ResourceExhausted(f"{MAX_SHELLS} shells are open on this node already: leave one of them")
        sandbox = self._meant(wanted.pod)
        shell = _Shell(sandbox.agent().shell())
        self._open.add(shell)
        try:
            async with aclosing(self._serve(sandbox, shell, wanted, requests, visitor)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            self._open.discard(shell)
            shell.call.cancel()

    def stop(self) -> None:
        """End all shells, because the daemon stops."""
        for shell in list(self._open):
            shell.end(Unavailable("the daemon is stopping: enter the pod again once it has started"))

    async def _first(self, requests: Requests) -> control.EnterPodStart:
        coming = start(_next(requests))
        try:
            first = await coming.addTimeout(START_SECONDS, self._clock)
        except TimeoutError:
            raise DeadlineExceeded(f"no first message within {START_SECONDS:g} s") from None
        if first is None or first.WhichOneof("input") != "start":
            raise InvalidArgument("the first message has to be the start")
        return first.start

    def _meant(self, pod: str) -> Sandbox:
        """Return the sandbox whose VM is meant. :raise FailedPrecondition: it has none, or is not ready."""
        meant = find_sandbox(self._inventory, pod)
        if isinstance(meant, PastSandbox):
            raise FailedPrecondition(f"sandbox {meant.record.id} is gone, and its VM with it")
        if meant.state is SandboxState.READY and meant.client is None:
            raise FailedPrecondition(
                f"sandbox {meant.id} has no VM yet: its image is the VM, which is made with its container"
            )
        return meant

    async def _serve(
        self,
        sandbox: Sandbox,
        shell: _Shell,
        wanted: control.EnterPodStart,
        requests: Requests,
        visitor: _Visitor,
    ) -> AsyncGenerator[control.EnterPodResponse, None]:
        vm, who = sandbox.record.instance_id, attrs.asdict(visitor)
        about = {"vm": vm, "sandbox": sandbox.id, "pod": sandbox.pod, **who}
        began, why = self._clock.seconds(), "the caller went away"
        code: int | None = None
        _log.warn("a shell is opened in VM {vm} of pod {pod}", **about)
        feeding = start(_feed(shell.call, wanted, requests))
        feeding.addErrback(_broken, shell)
        metadata = sandbox.config.metadata
        begun = control.EnterPodBegun(
            sandbox_id=sandbox.id, namespace=metadata.namespace, name=metadata.name, vm_id=vm
        )
        try:
            yield control.EnterPodResponse(begun=begun)
            async with aclosing(sandbox.agent().shell_output(shell.call)) as output:
                async for message in output:
                    if message.WhichOneof("output") is None:
                        continue
                    if message.HasField("end"):
                        code = message.end.exit_code
                        why = f"exit code {code}"
                    yield _answer(message)
        except InfranetesError as error:
            why = str(shell.error or error)
            raise to_grpc(shell.error or error) from None  # a status: a VM's wrong answer is not our fault
        finally:
            feeding.cancel()
            seconds = round(self._clock.seconds() - began, 1)
            _log.warn(
                "the shell in VM {vm} of pod {pod} has ended after {seconds} s: {why}",
                seconds=seconds,
                exit_code=code,
                why=why,
                **about,
            )


async def _next(requests: Requests) -> control.EnterPodRequest | None:
    return await anext(aiter(requests), None)


async def _feed(call: SessionCall, wanted: control.EnterPodStart, requests: Requests) -> None:
    """Pass the input on, as fast as the agent takes it."""
    begin = vmserver.SessionStart(
        command=wanted.command, tty=wanted.tty, stdin=True, stdout=True, stderr=True, term=wanted.term
    )
    await call.send(vmserver.SessionInput(start=begin))
    async for request in requests:
        kind = request.WhichOneof("input")
        if kind == "stdin":
            if len(request.stdin) > MAX_CHUNK_BYTES:
                raise InvalidArgument(f"a message of more than {MAX_CHUNK_BYTES} bytes")
            await call.send(vmserver.SessionInput(stdin=request.stdin))
        elif kind == "resize":
            size = vmserver.TerminalSize(width=request.resize.width, height=request.resize.height)
            if not (0 < size.width < 65536 and 0 < size.height < 65536):
                raise InvalidArgument("resize: width and height are 1 to 65535 characters")
            await call.send(vmserver.SessionInput(resize=size))
        else:
            raise InvalidArgument("after the start, stdin and sizes are expected")
    await call.done_sending()


def _broken(failure: Failure, shell: _Shell) -> None:
    """End a shell whose input is wrong. Its output tells what else ended it."""
    if failure.check(CancelledError, GrpcError) is not None:
        return
    if failure.check(InfranetesError) is None:
        _log.failure("reading the input of a shell failed", failure)
    shell.end(
        failure.value if isinstance(failure.value, InfranetesError) else InfranetesError("broken input")
    )


def _answer(message: vmserver.SessionOutput) -> control.EnterPodResponse:
    kind = message.WhichOneof("output")
    if kind == "end":
        return control.EnterPodResponse(exit_code=message.end.exit_code)
    if kind == "stderr":
        return control.EnterPodResponse(stderr=message.stderr)
    return control.EnterPodResponse(stdout=message.stdout)
