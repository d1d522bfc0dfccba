# SPDX-License-Identifier: Apache-2.0
"""The calls of ``proto/control.proto`` for the screens of pods' VMs: pictures, and screen with keyboard."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.control.visits import Visit, Visits, Words, vm_of
from infranetes.pods.node.inventory import Inventory
from infranetes.pods.node.meant import present_sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.vm.guest_view import hypervisor_of
from infranetes.pods.vm.screens import screen_of, screenshot
from infranetes_common.byte_connection import ByteConnection
from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError, InvalidArgument, Unavailable
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlScreenRpcs
from txgrpc import Call, GrpcError

MAX_CHUNK_BYTES = 256 * 1024  # of one message
AHEAD_BYTES = 256 * 1024  # the most that a viewer may send before the VM has taken it
MAX_VIEWERS = 32  # connections to screens of the whole node at a time
_PIECE_BYTES = 128 * 1024  # of a picture

_log = Logger()
_WORDS = Words(
    _log,
    refused="the screen of a pod's VM was refused: {key} is false",
    opened="a viewer is connected to screen and keyboard of VM {vm} of pod {pod}",
    ended="the viewer of the screen of VM {vm} of pod {pod} has left after {seconds} s: {why}",
    may_not="nobody may use screen and keyboard of pods' VMs on this node",
    too_many="{most} viewers are connected to screens of this node's VMs already: close one of them",
    stopping="connect again once it has started",
)

Requests = AsyncIterator[control.ConnectScreenRequest]


class ScreenCalls(ControlScreenRpcs):
    """One method per RPC.

    :param allowed: whether the configuration allows connections to screens and keyboards now.
    """

    def __init__(
        self, clock: IReactorTime, inventory: Inventory, providers: Providers, allowed: Callable[[], bool]
    ) -> None:
        self._clock = clock
        self._inventory = inventory
        self._providers = providers
        self._visits = Visits(clock, allowed, MAX_VIEWERS, _WORDS)

    async def Screenshot(
        self, request: control.ScreenshotRequest, call: Call
    ) -> AsyncIterator[control.ScreenshotResponse]:
        sandbox = present_sandbox(self._inventory, request.pod)
        vm = vm_of(sandbox)
        png = await screenshot(self._clock, hypervisor_of(self._providers, sandbox))
        for at in range(0, len(png), _PIECE_BYTES):
            piece = control.ScreenshotResponse(png=png[at : at + _PIECE_BYTES])
            if not at:
                piece.vm.CopyFrom(vm)
            yield piece

    async def ConnectScreen(
        self, requests: Requests, call: Call
    ) -> AsyncIterator[control.ConnectScreenResponse]:
        call.receive_ahead(AHEAD_BYTES)
        visitor = self._visits.admit(call)
        first = await self._visits.first(requests)
        if first is None or first.WhichOneof("input") != "start":
            raise InvalidArgument("the first message has to be the start")
        sandbox = present_sandbox(self._inventory, first.start.pod)
        hypervisor = hypervisor_of(self._providers, sandbox)
        begun = control.ConnectScreenResponse(begun=vm_of(sandbox))
        if first.start.only_check:
            hypervisor.screen()
            yield begun
            return
        self._visits.check_room()
        screen = await screen_of(self._clock, hypervisor)
        try:
            with self._visits.opened(sandbox, visitor, screen.abort) as visit:
                yield begun
                feeding = start(_feed(screen, visit, requests))
                feeding.addErrback(_broken, visit)
                try:
                    while data := await screen.read():
                        yield control.ConnectScreenResponse(data=data)
                    visit.why = "the VM has closed the connection"
                except Unavailable as error:
                    if visit.error is not None:
                        visit.why = str(visit.error)
                        raise visit.error from None
                    if visit.why != _LEFT:
                        visit.why = str(error)
                        raise
                finally:
                    feeding.cancel()
        finally:
            screen.abort()

    def stop(self) -> None:
        """Close all connections, because the daemon stops."""
        self._visits.stop()


_LEFT = "the viewer left"


async def _feed(screen: ByteConnection, visit: Visit, requests: Requests) -> None:
    """Pass on what the viewer says, as fast as the VM takes it."""
    async for request in requests:
        if request.WhichOneof("input") != "data":
            raise InvalidArgument("after the start, data is expected")
        if len(request.data) > MAX_CHUNK_BYTES:
            raise InvalidArgument(f"a message of more than {MAX_CHUNK_BYTES} bytes")
        await screen.write(request.data)
    visit.why = _LEFT
    screen.abort()


def _broken(failure: Failure, visit: Visit) -> None:
    """End a connection whose viewer sends what is wrong. What the screen says tells what else ended it."""
    if failure.check(CancelledError, GrpcError, Unavailable) is not None:
        return
    if failure.check(InfranetesError) is None:
        _log.failure("reading what a viewer says failed", failure)
    visit.end(
        failure.value if isinstance(failure.value, InfranetesError) else InfranetesError("broken input")
    )
