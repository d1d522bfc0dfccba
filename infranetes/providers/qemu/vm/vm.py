# SPDX-License-Identifier: Apache-2.0
"""A VM as this daemon knows it.

record      process        state, as IPodProvider has it
STARTING    there          PENDING   (also while its process is about to be started)
STARTING    gone           ENDED     an earlier daemon was killed while it made this
READY       there          RUNNING
READY       gone           ENDED     but RUNNING if it boots an image: its guest alone has ended; and if it
                                     sleeps: see `sleep.record`
FAILED      gone           ENDED
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import attrs
from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.defer import TimeoutError as DeferredTimeout

from infranetes.providers.interface import Instance, InstanceState
from infranetes.providers.qemu.program.memory import Memory
from infranetes.providers.qemu.program.process import WatchedProcess
from infranetes.providers.qemu.program.qmp import QmpEvent
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.paths import VmPaths
from infranetes.providers.qemu.vm.record import Phase, VmRecord
from infranetes_common.concurrency import Notifier, run_in_thread
from infranetes_common.errors import Unavailable
from infranetes_common.identity import Network
from infranetes_common.reactors import IReactor

_DETAIL_CHARACTERS = 300
_KILL_SECONDS = 10.0
_GONE = "its process was gone when the daemon started"
_SHUTDOWN_REASONS = {
    "guest-shutdown": "the guest shut down",
    "guest-reset": "the guest asked for a restart, which ends a pod's machine",
    "guest-panic": "the guest's kernel panicked",
    "host-signal": "QEMU was ended by a signal",
}


class Slumbers(Protocol):
    """What the daemon has of a VM that sleeps, or falls asleep or wakes."""

    @property
    def asleep(self) -> bool:
        """Whether it sleeps."""

    @property
    def serials(self) -> Collection[str]:
        """Those of its volumes."""

    async def close(self, reactor: IReactor) -> None:
        """Close what the daemon has of it. Idempotent."""


class Vm:
    """A VM's record, its process and the connections to it.

    :ivar launching: whether this daemon is making it: from the reservation until READY or FAILED.
    :ivar destroying: whether its end was asked for.
    :ivar handover: hands over the identity and then plugs in the pod's size.
    :ivar last_place: the number of the place where this daemon has last shown it a disk.
    :ivar taken_over: the network that it takes over in a namespace, once that was read.
    :ivar ram: the memory that it shares with others, if this daemon has made the VM; None: it has not.
    :ivar slumber: what the daemon has of it while it sleeps, or falls asleep or wakes; None: it does not.
    :ivar changes: notified when its state may have changed.
    :ivar heard: is called with each of QEMU's events, and `lost` when the monitor's connection is lost.
    """

    def __init__(self, record: VmRecord, paths: VmPaths) -> None:
        self.record = record
        self.paths = paths
        self.process: WatchedProcess | None = None
        self.connections: VmConnections | None = None
        self.handover: Deferred[None] | None = None
        self.launching = False
        self.destroying = False
        self.last_place = -1
        self.taken_over: Network | None = None
        self.ram: Memory | None = None
        self.slumber: Slumbers | None = None
        self.changes = Notifier()
        self.heard: Callable[[QmpEvent], None] = lambda event: None
        self.lost: Callable[[], None] = lambda: None
        self._connecting = DeferredLock()

    @property
    def alive(self) -> bool:
        """Whether the VM's process runs."""
        return self.process is not None and self.process.alive

    @property
    def asleep(self) -> bool:
        """Whether it sleeps. Its process, if it has one, executes nothing then."""
        return self.slumber is not None and self.slumber.asleep

    @property
    def state(self) -> InstanceState:
        """The state of the VM, by the table above."""
        if self.record.phase is Phase.READY and (self.record.guest is not None or self.asleep):
            return InstanceState.RUNNING
        if self.record.phase is Phase.FAILED or not (self.alive or self.launching):
            return InstanceState.ENDED
        return InstanceState.RUNNING if self.record.phase is Phase.READY else InstanceState.PENDING

    @property
    def usable(self) -> bool:
        """Whether it runs and has a QEMU that can be asked."""
        return self.alive and self.state is InstanceState.RUNNING and not self.asleep

    def instance(self) -> Instance:
        """Return the VM as IPodProvider describes it."""
        record = self.record
        state = self.state
        detail = record.detail
        if state is InstanceState.ENDED and not detail:
            detail = _GONE
        if state is InstanceState.RUNNING and record.guest is not None and record.guest.finished_at:
            detail = f"its guest has ended with {record.guest.exit_code}"
            detail += f": {record.guest.message}" if record.guest.message else ""
        return Instance(
            id=record.id,
            token=record.token,
            sandbox_id=record.sandbox_id,
            state=state,
            address=record.address,
            more_addresses=record.more_addresses,
            agent_host=record.address,
            agent_port=record.agent_port,
            created_at=record.created_at,
            detail=detail,
            asleep=self.asleep,
        )

    def explain_end(self) -> str:
        """Return why the VM has ended, as far as that is known: QEMU's reason and the console's last line."""
        reason = self.connections.shutdown_reason if self.connections is not None else ""
        if reason:
            return self._with_last_line(_SHUTDOWN_REASONS.get(reason, f"QEMU says {reason}"))
        ended = self.process.end if self.process is not None else "ended"
        return self._with_last_line(f"its process {ended}")

    def explain_missing_process(self) -> None:
        """Record why it has ended, if an earlier daemon made it and there is no process. Idempotent."""
        if not self.alive and not self.record.detail and self.state is InstanceState.ENDED:
            self.record = attrs.evolve(self.record, detail=self._with_last_line(_GONE))

    def _with_last_line(self, why: str) -> str:
        last = self.paths.last_output().rpartition("\n")[2]
        return f"{why}; last output: {last}"[:_DETAIL_CHARACTERS] if last else why

    def ended_error(self) -> Unavailable:
        """Return the error for callers that wait for the VM to run, although it has ended."""
        output = self.paths.last_output()
        tail = f"; the end of its console:\n{output}" if output else ""
        return Unavailable(f"VM {self.record.id} has ended: {self.instance().detail}{tail}")

    async def monitor(self, reactor: IReactor) -> VmConnections:
        """Return a connection to its QEMU, anew if an earlier daemon had it or it was lost.

        :raise Unavailable: QEMU does not answer."""
        async with self._connecting:  # QEMU serves one connection at a time
            if self.connections is None or self.connections.lost:
                connections = VmConnections(reactor, self.heard, self.lost)
                await connections.open_monitor(self.paths.sockets)
                self.connections = connections
            return self.connections

    def check_running(self, what: str) -> None:
        """Check that the VM runs. :raise Unavailable: it does not, and so can't be `what`."""
        if self.state is InstanceState.ENDED:
            raise self.ended_error()
        if self.asleep:
            raise Unavailable(f"VM {self.record.id} sleeps: wake it before it is {what}")
        if self.state is InstanceState.RUNNING and not self.alive:
            raise Unavailable(f"the guest of VM {self.record.id} has ended, so that it can't be {what}")
        if self.state is not InstanceState.RUNNING:
            raise Unavailable(f"VM {self.record.id} is still starting; it can be {what} once it runs")

    async def end_process(self, reactor: IReactor) -> None:
        """End its process. Idempotent. :raise Unavailable: it does not end."""
        if self.process is None:
            return
        try:
            await self.process.kill().addTimeout(_KILL_SECONDS, reactor)
        except DeferredTimeout:
            raise Unavailable(
                f"QEMU's process {self.process.pid} of VM {self.record.id} does not end "
                f"{_KILL_SECONDS:g} s after SIGKILL; it may hang in the kernel"
            ) from None

    async def release(self, reactor: IReactor) -> None:
        """Have nothing that only its process needs: the memory that it shares, its tap. Idempotent."""
        slumber, self.slumber = self.slumber, None
        if slumber is not None:
            await slumber.close(reactor)
        if self.ram is not None:
            await run_in_thread(reactor, self._thd_release_ram)

    def _thd_release_ram(self) -> None:
        self.ram = None  # frees its pages, if nobody else has it

    def detach(self) -> None:
        """Stop watching it and close the connections to it; the VM goes on. Release it before. Idempotent."""
        if self.handover is not None:
            self.handover.cancel()
        if self.connections is not None:
            self.connections.close()
            self.connections = None
        if self.process is not None:
            self.process.unwatch()


def on_bridge(vms: Iterable[Vm]) -> Sequence[Vm]:
    """Return the VMs that run, or are being made, and have an address on the bridge."""
    return [vm for vm in vms if vm.record.on_bridge and (vm.alive or vm.launching or vm.asleep)]
