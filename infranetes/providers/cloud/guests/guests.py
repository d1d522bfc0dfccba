# SPDX-License-Identifier: Apache-2.0
"""The guests without our agent of one provider of a cloud."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import attrs
from twisted.internet.defer import Deferred, TimeoutError
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.providers.cloud.calls.calls import Calls
from infranetes.providers.cloud.guests.console import CloudConsole
from infranetes.providers.cloud.guests.hypervisor import CloudHypervisor
from infranetes.providers.cloud.guests.kept import KeptConsole
from infranetes.providers.cloud.guests.records import GuestRecord, GuestRecords
from infranetes.providers.cloud.interface import (
    Action,
    BillsStoppedVms,
    CloudError,
    CloudVM,
    D,
    ErrorKind,
    GuestCloud,
)
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vms.ledger import Ledger
from infranetes.providers.interface import InstanceState
from infranetes_common.concurrency import Coro, run_in_thread
from infranetes_common.errors import NotFound, ResourceExhausted
from infranetes_common.reactors import IReactor

_log = Logger()

OFF_SECONDS = 120.0  # for which the end of a guest that was asked to power off is looked for more often

T = TypeVar("T")


class RunTask(Protocol):
    """Runs a task of the provider's, whose errors are Infranetes' errors."""

    def __call__(self, work: Coro[T]) -> Deferred[T]: ...


@attrs.frozen
class Surroundings(Generic[D]):
    """What the guests need of their provider.

    :ivar waiting: as `Watcher.waiting`. :ivar get: looks at a VM. :ivar destroy: destroys one by its id.
    :ivar refusals_noted: as of `Watcher`. :ivar stretch: by how much pauses between looks are longer.
    """

    reactor: IReactor
    cloud: GuestCloud[D]
    settings: CloudSettings
    calls: Calls[D]
    ledger: Ledger
    waiting: Callable[[str], AbstractContextManager[Callable[[], Deferred[None]]]]
    get: Callable[[str], Awaitable[CloudVM]]
    destroy: Callable[[str], Awaitable[None]]
    task: RunTask
    refusals_noted: Callable[[], AbstractContextManager[None]]
    stretch: Callable[[], float]


class CloudGuests(Generic[D]):
    """The guests, by the tokens of their VMs' launches. :param directory: for what is remembered of them."""

    def __init__(self, around: Surroundings[D], directory: Path) -> None:
        self._around = around
        self._records = GuestRecords(directory)
        self._guests: dict[str, CloudHypervisor] = {}

    def __contains__(self, token: str) -> bool:
        return token in self._guests

    async def load(self) -> None:
        """Find the guests of earlier daemons. Idempotent.

        :raise FailedPrecondition: the directory can't be used."""
        found = await run_in_thread(self._around.reactor, self._records._thd_load)
        for token, (record, kept) in found.items():
            if not record.instance_id or record.instance_id in self._around.ledger.destroyed:
                await run_in_thread(self._around.reactor, self._records._thd_remove, token)
            elif token not in self._guests:
                self._guests[token] = self._made(record, kept)

    def stop(self) -> None:
        """Ask the cloud for no more consoles."""
        for guest in self._guests.values():
            guest.console.stop()

    def hypervisor(self, instance_id: str) -> CloudHypervisor:
        """Return a VM's. :raise NotFound: there is no such VM, or it has our agent."""
        guest = self._found(instance_id)
        if guest is None:
            raise NotFound(f"no VM without our agent is called {instance_id[:64]!r} here")
        return guest

    def _found(self, instance_id: str) -> CloudHypervisor | None:
        guests = self._guests.values()
        return next((each for each in guests if each.record.instance_id == instance_id), None)

    async def begin(self, token: str) -> None:
        """Remember that the VM of this token, which is to be launched, has no agent. Idempotent.

        :raise ResourceExhausted: there is no room for that."""
        if token not in self._guests:
            record = GuestRecord(token)
            await self._save(record)
            self._guests[token] = self._made(record, KeptConsole())

    async def launched(self, vm: CloudVM) -> None:
        """Remember the VM of a guest. :raise ResourceExhausted: there is no room for that."""
        await self._guests[vm.token].launched(vm.id)

    async def failed(self, token: str) -> None:
        """Forget a guest whose VM could not be launched, unless there is one from before."""
        guest = self._guests.get(token)
        if guest is not None and not guest.record.instance_id:
            await self._forget(guest)

    async def destroyed(self, instance_id: str) -> None:
        """Forget the guest of a VM that a caller had destroyed, if it is one."""
        if (guest := self._found(instance_id)) is not None:
            await self._forget(guest)

    async def _forget(self, guest: CloudHypervisor) -> None:
        guest.destroy()
        del self._guests[guest.record.token]
        with suppress(OSError):
            await run_in_thread(self._around.reactor, self._records._thd_remove, guest.record.token)

    def takes_end(self, vm: CloudVM) -> bool:
        """Note that a VM has ended, if it is a guest's, whose end is told by its hypervisor."""
        guest = self._guests.get(vm.token)
        if guest is None:
            return False
        self._around.task(_awaited(guest.ended(vm))).addErrback(lambda _: None)
        return True

    def _made(self, record: GuestRecord, kept: KeptConsole) -> CloudHypervisor:
        around, token = self._around, record.token
        vm = _Vm(around, self._save)

        async def ask() -> bytes:
            return await around.task(vm.console())

        async def save(content: bytes) -> None:
            await self._written(self._records._thd_save_console, token, content)

        console = CloudConsole(around.reactor, token, kept, ask, save, around.stretch)
        vm.guest = guest = CloudHypervisor(around.reactor, record, vm, console)
        return guest

    async def _save(self, record: GuestRecord) -> None:
        await self._written(self._records._thd_save, record)

    async def _written(self, write: Callable[..., None], *what: object) -> None:
        try:
            await run_in_thread(self._around.reactor, write, *what)
        except OSError as error:
            raise ResourceExhausted(f"a guest's record can't be written: {error.strerror}") from None


class _Vm(Generic[D]):
    """A `GuestVm`. :ivar guest: whose VM it is."""

    guest: CloudHypervisor

    def __init__(self, around: Surroundings[D], save: Callable[[GuestRecord], Awaitable[None]]) -> None:
        self._around = around
        self._save = save

    @property
    def _id(self) -> str:
        return self.guest.record.instance_id

    async def look(self) -> CloudVM:
        return self._around.ledger.last_said(self._id) or await self._around.get(self._id)

    async def power_off(self) -> None:
        around, id = self._around, self._id
        try:
            await around.calls.call(
                f"ask VM {id} to power off", partial(around.cloud._thd_power_off, id=id), action=Action.CHANGE
            )
        except CloudError as error:
            if error.kind is not ErrorKind.STATE:  # it is already powering off, or has
                raise
        around.task(self._seen_off(id)).addErrback(lambda _: None)

    async def _seen_off(self, id: str) -> None:
        """Have lists show the VM's end soon."""
        around = self._around
        until = around.reactor.seconds() + OFF_SECONDS
        with around.waiting(id) as changed:
            while (left := until - around.reactor.seconds()) > 0:
                vm = around.ledger.last_said(id)
                if vm is None or vm.state is InstanceState.ENDED:
                    return
                with suppress(TimeoutError):
                    await changed().addTimeout(left, around.reactor)

    def spare(self) -> None:
        around, id = self._around, self._id
        if isinstance(around.cloud, BillsStoppedVms):
            work = around.calls.call(
                f"deallocate VM {id}", partial(around.cloud._thd_deallocate, id=id), action=Action.CHANGE
            )
            around.task(work).addErrback(self._is_not_spared)

    def _is_not_spared(self, failure: Failure) -> None:
        _log.warn("VM {vm} is off, and billed until its pod goes: {error}", vm=self._id, error=failure.value)

    async def destroy(self) -> None:
        await self._around.destroy(self._id)

    async def console(self) -> bytes:
        """Return what the VM wrote to its console last."""
        around, id = self._around, self._id
        if not id:
            return b""
        what, work = f"read the console of VM {id}", partial(around.cloud._thd_console_log, id=id)
        with around.refusals_noted():
            return await around.calls.call(what, work, around.settings.call_seconds)

    async def save(self, record: GuestRecord) -> None:
        await self._save(record)

    def task(self, work: Coro[T]) -> Deferred[T]:
        return self._around.task(work)


async def _awaited(waiting: Deferred[T]) -> T:
    return await waiting
