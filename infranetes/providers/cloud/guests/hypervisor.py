# SPDX-License-Identifier: Apache-2.0
"""The hypervisor of one VM of a cloud, as far as the cloud's API is one.

GuestState   at the cloud
PREPARED     it executes from its launch on; nobody has called `execute` yet
RUNNING      it executes
OFF          it was powered off, and is kept until it is destroyed; or it was switched off, and is destroyed
CRASHED      the cloud says that it has failed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint
from twisted.logger import Logger
from zope.interface import implementer

from infranetes.providers.cloud.guests.console import CloudConsole
from infranetes.providers.cloud.guests.records import GuestRecord
from infranetes.providers.cloud.interface import CloudVM
from infranetes.providers.hypervisor import GuestState, GuestStatus, GuestUsage, IHypervisor
from infranetes.providers.interface import InstanceState
from infranetes.providers.machine_images import Cd
from infranetes_common.concurrency import Coro, Flight, deferred
from infranetes_common.errors import InfranetesError, NotFound, NotOffered, Unavailable
from infranetes_common.identity import Network

T = TypeVar("T")

SWITCHED_OFF, FAILED = 137, 1  # exit codes
OVER = (GuestState.OFF, GuestState.CRASHED)

_log = Logger()


class GuestVm(Protocol):
    """One VM at its cloud. Its methods fail with InfranetesError."""

    async def look(self) -> CloudVM:
        """Return what the cloud said last of the VM. :raise NotFound: there is no such VM."""

    async def power_off(self) -> None:
        """Ask its guest to power off, and have its end noticed soon."""

    def spare(self) -> None:
        """Have the VM, which is off and kept, cost as little as it can. Never fails."""

    async def destroy(self) -> None:
        """End the VM at once."""

    async def save(self, record: GuestRecord) -> None:
        """Remember a record. :raise ResourceExhausted: there is no room."""

    def task(self, work: Coro[T]) -> Deferred[T]:
        """Run `work`, which goes on when its caller goes away."""


@implementer(IHypervisor)
class CloudHypervisor:
    """See `IHypervisor`. :ivar record: as it was saved last."""

    drives = 0

    def __init__(self, clock: IReactorTime, record: GuestRecord, vm: GuestVm, console: CloudConsole) -> None:
        self.record = record
        self.console = console
        self._clock = clock
        self._vm = vm
        self._watchers: list[Callable[[GuestStatus], None]] = []
        self._ending: Flight[None] | None = None
        self._destroyed = False
        if record.status.state in OVER:
            console.finish()

    def status(self) -> Deferred[GuestStatus]:
        return self._vm.task(self._status())

    async def _status(self) -> GuestStatus:
        self._check()
        if self.record.status.state not in OVER:
            vm = await self._vm.look()
            if vm.state is InstanceState.ENDED:
                await self.ended(vm)
        self._check()
        return self.record.status

    def watch(self, changed: Callable[[GuestStatus], None]) -> Callable[[], None]:
        self._watchers.append(changed)

        def end() -> None:
            if changed in self._watchers:
                self._watchers.remove(changed)

        return end

    def execute(self) -> Deferred[GuestStatus]:
        return self._vm.task(self._execute())

    async def _execute(self) -> GuestStatus:
        status = await self._status()
        if status.state is GuestState.PREPARED:
            await self._become(GuestStatus(GuestState.RUNNING, started_at=self._now()))
        return self.record.status

    @deferred
    async def network(self) -> Network:
        self._check()
        raise NotOffered(f"the network of VM {self.record.instance_id} is its cloud's")

    def has_address(self) -> bool | None:
        return None

    @deferred
    async def insert_cds(self, cds: Sequence[Cd]) -> None:
        self._check()
        if cds:
            raise NotOffered(f"VM {self.record.instance_id} has no CD drives: it is its cloud's")

    def press_power_button(self) -> Deferred[None]:
        return self._vm.task(self._press())

    async def _press(self) -> None:
        await self._check_runs()
        await self._vm.power_off()

    def switch_off(self) -> Deferred[GuestStatus]:
        return self._vm.task(self._switch_off())

    async def _switch_off(self) -> GuestStatus:
        status = await self._status()
        if status.state not in OVER:
            await self.console.look()
            await self._vm.destroy()
            await self._end(
                GuestState.OFF, exit_code=SWITCHED_OFF, message="it was switched off, and so destroyed"
            )
        return self.record.status

    @deferred
    async def usage(self) -> GuestUsage:
        await self._check_runs()
        return GuestUsage()

    def guest_agent(self) -> IStreamClientEndpoint | None:
        self._check()
        return None

    @deferred
    async def screenshot(self) -> bytes:
        await self._check_runs()
        raise self._no_screen()

    def screen(self) -> IStreamClientEndpoint:
        self._check()
        raise self._no_screen()

    def _no_screen(self) -> NotOffered:
        return NotOffered(
            f"VM {self.record.instance_id} shows no screen here: its cloud's own pages may show it"
        )

    # ---- for the provider

    def ended(self, vm: CloudVM) -> Deferred[None]:
        """Record and tell that the cloud no longer runs the VM. Idempotent; never fails."""
        if self._ending is None or self._ending.done:
            self._ending = Flight(self._ended(vm))
        return self._ending.join()

    async def _ended(self, vm: CloudVM) -> None:
        if self.record.status.state in OVER:
            return
        await self.console.look()
        if vm.failed:
            await self._end(GuestState.CRASHED, exit_code=FAILED, reason="VMFailed", message=vm.detail)
        else:
            await self._end(GuestState.OFF)
            self._vm.spare()

    async def _end(
        self, state: GuestState, *, exit_code: int = 0, reason: str = "", message: str = ""
    ) -> None:
        """Record and tell the end. :raise Nothing: an end that can't be saved is found again later."""
        if self.record.status.state in OVER:
            return
        self.console.finish()
        before = self.record.status
        ended = attrs.evolve(
            before,
            state=state,
            finished_at=max(self._now(), before.started_at),
            exit_code=exit_code,
            reason=reason,
            message=message,
        )
        try:
            await self._become(ended)
        except InfranetesError as error:
            _log.warn("the end of VM {vm} is not recorded: {error}",
                      vm=self.record.instance_id, error=error)  # fmt: skip
            self._tell(ended)

    def destroy(self) -> None:
        """Fail with NotFound from now on. Idempotent."""
        self._destroyed = True
        self.console.destroy()

    async def launched(self, instance_id: str) -> None:
        """Record the id of the VM. Idempotent."""
        if self.record.instance_id != instance_id:
            record = attrs.evolve(self.record, instance_id=instance_id)
            await self._vm.save(record)
            self.record = record

    async def _become(self, status: GuestStatus) -> None:
        await self._vm.save(attrs.evolve(self.record, status=status))
        self._tell(status)

    def _tell(self, status: GuestStatus) -> None:
        self.record = attrs.evolve(self.record, status=status)
        for changed in list(self._watchers):
            try:
                changed(status)
            except Exception:
                _log.failure("a watcher failed on the state of VM {vm}", vm=self.record.instance_id)

    async def _check_runs(self) -> None:
        if (await self._status()).state is not GuestState.RUNNING:
            raise Unavailable(f"VM {self.record.instance_id} does not run")

    def _check(self) -> None:
        if self._destroyed:
            raise NotFound(f"there is no VM {self.record.instance_id} any more")

    def _now(self) -> int:
        return int(self._clock.seconds() * 1e9)
