# SPDX-License-Identifier: Apache-2.0
"""The call of ``proto/control.proto`` that opens a shell in a pod's VM: what goes in and out is relayed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.control.visits import Visit, Visits, Words, vm_of
from infranetes.machines.sessions import SessionCall
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.node.meant import present_sandbox
from infranetes.pods.store.states import SandboxState
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, to_grpc
from infranetes_common.wire import control, vmserver
from infranetes_common.wire.control_rpcs import ControlShellRpcs
from txgrpc import Call, GrpcError

MAX_CHUNK_BYTES = 256 * 1024  # of input in one message: an agent takes no more
AHEAD_BYTES = 512 * 1024  # the most that the caller may send before the agent has taken it
MAX_SHELLS = 32  # shells of the whole node at a time; an agent has a limit of its own

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

Requests = AsyncIterator[control.EnterPodRequest]


class EnterCalls(ControlShellRpcs):
    """Opens shells in pods' VMs.

    :param allowed: whether the configuration allows it now.
    """

    def __init__(self, clock: IReactorTime, inventory: Inventory, allowed: Callable[[], bool]) -> None:
        self._inventory = inventory
        self._visits = Visits(clock, allowed, MAX_SHELLS, _WORDS)

    async def EnterPod(self, requests: Requests, call: Call) -> AsyncIterator[control.EnterPodResponse]:
        call.receive_ahead(AHEAD_BYTES)
        visitor = self._visits.admit(call)
        first = await self._visits.first(requests)
        if first is None or first.WhichOneof("input") != "start":
            raise InvalidArgument("the first message has to be the start")
        self._visits.check_room()
        sandbox = self._meant(first.start.pod)
        shell = sandbox.agent().shell()
        try:
            with self._visits.opened(sandbox, visitor, shell.cancel) as visit:
                serving = self._serve(sandbox, shell, visit, first.start, requests)
                async with aclosing(serving) as answers:
                    async for answer in answers:
                        yield answer
        finally:
            shell.cancel()

    def stop(self) -> None:
        """End all shells, because the daemon stops."""
        self._visits.stop()

    def _meant(self, pod: str) -> Sandbox:
        """Return the sandbox whose VM is meant. :raise FailedPrecondition: it has none, or is not ready."""
        meant = present_sandbox(self._inventory, pod)
        if meant.state is SandboxState.READY and meant.client is None:
            raise FailedPrecondition(
                f"sandbox {meant.id} has no VM yet: its image is the VM, which is made with its container"
            )
        return meant

    async def _serve(
        self,
        sandbox: Sandbox,
        shell: SessionCall,
        visit: Visit,
        wanted: control.EnterPodStart,
        requests: Requests,
    ) -> AsyncGenerator[control.EnterPodResponse, None]:
        feeding = start(_feed(shell, wanted, requests))
        feeding.addErrback(_broken, visit)
        try:
            yield control.EnterPodResponse(begun=vm_of(sandbox))
            async with aclosing(sandbox.agent().shell_output(shell)) as output:
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
