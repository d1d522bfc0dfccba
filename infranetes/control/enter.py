# SPDX-License-Identifier: Apache-2.0
"""The calls of ``proto/control.proto`` that run a shell in a pod's VM, or a command in one of its containers.

What goes in and out is relayed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import attrs
from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.control.visits import Visit, Visitor, Visits, Words, vm_of
from infranetes.machines.sessions import SessionCall
from infranetes.pods.containers.lifelog import log_command
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.node.meant import present_sandbox, running_container
from infranetes.pods.store.states import SandboxState
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, to_grpc
from infranetes_common.wire import control, vmserver
from infranetes_common.wire.control_rpcs import ControlShellRpcs
from txgrpc import Call, GrpcError

MAX_CHUNK_BYTES = 256 * 1024  # of input in one message: an agent takes no more
AHEAD_BYTES = 512 * 1024  # the most that the caller may send before the agent has taken it
MAX_SHELLS = 32  # shells of the whole node at a time, and as many commands; an agent has a limit of its own

_log = Logger()
_WORDS = Words(
    _log,
    refused="a shell in a pod's VM was refused: {key} is false",
    opened="a shell is opened in VM {vm} of pod {pod}",
    ended="the shell in VM {vm} of pod {pod} has ended after {seconds} s: {why}",
    may_not="nobody may enter pods' VMs on this node",
    too_many="{most} shells are open on this node already: leave one of them",
    stopping="enter the pod again once it has started",
)
_COMMAND_WORDS = Words(
    _log,
    refused="",  # never is
    opened="infranetes-ctl runs a command in a container of pod {pod} in VM {vm}",
    ended="the command of infranetes-ctl in VM {vm} of pod {pod} has ended after {seconds} s: {why}",
    may_not="",
    too_many="{most} commands of infranetes-ctl run on this node already: end one of them",
    stopping="run the command again once it has started",
)

Requests = AsyncIterator[control.EnterPodRequest]


class EnterCalls(ControlShellRpcs):
    """Opens shells in pods' VMs, and runs commands in their containers.

    :param allowed: whether the configuration allows shells now.
    """

    def __init__(self, clock: IReactorTime, inventory: Inventory, allowed: Callable[[], bool]) -> None:
        self._inventory = inventory
        self._shells = Visits(clock, allowed, MAX_SHELLS, _WORDS)
        self._commands = Visits(clock, lambda: True, MAX_SHELLS, _COMMAND_WORDS)

    async def EnterPod(self, requests: Requests, call: Call) -> AsyncIterator[control.EnterPodResponse]:
        visitor, asked = await _begun(self._shells, requests, call)
        sandbox = self._meant(asked.pod)
        begin = vmserver.SessionStart(
            command=asked.command, tty=asked.tty, stdin=True, stdout=True, stderr=True, term=asked.term
        )
        session = _Session(sandbox, sandbox.agent().shell(), begin)
        async with aclosing(_relay(self._shells, visitor, session, requests)) as answers:
            async for answer in answers:
                yield answer

    async def ExecPod(self, requests: Requests, call: Call) -> AsyncIterator[control.EnterPodResponse]:
        visitor, asked = await _begun(self._commands, requests, call)
        if not asked.command:
            raise InvalidArgument("there is no command: infranetes-ctl exec POD -- COMMAND")
        container = running_container(self._inventory, asked.pod, asked.container)
        log_command(container, list(asked.command), "is run by infranetes-ctl")
        begin = vmserver.SessionStart(
            id=container.id,
            command=asked.command,
            tty=asked.tty,
            stdin=not asked.no_stdin,
            stdout=True,
            stderr=not asked.tty,
        )
        session = _Session(container.sandbox, container.sandbox.agent().exec(), begin)
        async with aclosing(_relay(self._commands, visitor, session, requests)) as answers:
            async for answer in answers:
                yield answer

    def stop(self) -> None:
        """End all shells and commands, because the daemon stops."""
        self._shells.stop()
        self._commands.stop()

    def _meant(self, pod: str) -> Sandbox:
        """Return the sandbox whose VM is meant. :raise FailedPrecondition: it has none, or is not ready."""
        meant = present_sandbox(self._inventory, pod)
        if meant.state is SandboxState.READY and meant.client is None:
            raise FailedPrecondition(
                f"sandbox {meant.id} has no VM yet: its image is the VM, which is made with its container"
            )
        return meant


@attrs.frozen
class _Session:
    """A shell or a command. :ivar begin: the first message to the agent."""

    sandbox: Sandbox
    call: SessionCall
    begin: vmserver.SessionStart


async def _begun(visits: Visits, requests: Requests, call: Call) -> tuple[Visitor, control.EnterPodStart]:
    """Return who calls, and what is wanted.

    :raise PermissionDenied: nobody may. :raise InvalidArgument: the first message is no start.
    :raise ResourceExhausted: there are as many as may be."""
    call.receive_ahead(AHEAD_BYTES)
    visitor = visits.admit(call)
    first = await visits.first(requests)
    if first is None or first.WhichOneof("input") != "start":
        raise InvalidArgument("the first message has to be the start")
    visits.check_room()
    return visitor, first.start


async def _relay(
    visits: Visits, visitor: Visitor, session: _Session, requests: Requests
) -> AsyncGenerator[control.EnterPodResponse, None]:
    try:
        with visits.opened(session.sandbox, visitor, session.call.cancel) as visit:
            async with aclosing(_serve(session, visit, requests)) as answers:
                async for answer in answers:
                    yield answer
    finally:
        session.call.cancel()


async def _serve(
    session: _Session, visit: Visit, requests: Requests
) -> AsyncGenerator[control.EnterPodResponse, None]:
    feeding = start(_feed(session, requests))
    feeding.addErrback(_broken, visit)
    try:
        yield control.EnterPodResponse(begun=vm_of(session.sandbox))
        async with aclosing(session.sandbox.agent().shell_output(session.call)) as output:
            async for message in output:
                if message.WhichOneof("output") is None:
                    continue
                if message.HasField("end"):
                    visit.exit_code = message.end.exit_code
                    visit.why = f"exit code {visit.exit_code}"
                yield _answer(message)
    except InfranetesError as error:
        visit.why = str(visit.error or error)
        raise to_grpc(visit.error or error) from None  # a status: a VM's wrong answer is not our fault
    finally:
        feeding.cancel()


async def _feed(session: _Session, requests: Requests) -> None:
    """Pass the input on, as fast as the agent takes it."""
    call = session.call
    await call.send(vmserver.SessionInput(start=session.begin))
    if not session.begin.stdin and not session.begin.tty:
        await call.done_sending()
        return
    async for request in requests:
        kind = request.WhichOneof("input")
        if kind == "stdin" and session.begin.stdin:
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


def _broken(failure: Failure, shell: Visit) -> None:
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
