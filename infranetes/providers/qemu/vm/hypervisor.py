# SPDX-License-Identifier: Apache-2.0
"""The hypervisor of one VM that boots an image: its power, and what has become of its guest.

QEMU's run state    is               once it is learned
prelaunch           PREPARED
running, and other  RUNNING
shutdown            OFF              recorded, then QEMU is ended
guest-panicked      CRASHED          recorded, then QEMU is ended
internal-error      CRASHED          recorded, then QEMU is ended
(no process)        as recorded, or CRASHED, and recorded

QEMU waits in the state in which its guest ended, for as long as no daemon runs. The end is told to those who
watch when it is recorded and QEMU is gone: from then on the console has no more bytes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredLock, TimeoutError
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.logger import Logger
from zope.interface import implementer

from infranetes.providers.hypervisor import GuestState, GuestStatus, GuestUsage, IHypervisor
from infranetes.providers.machine_images import DRIVES, Cd
from infranetes.providers.qemu.host.os_errors import as_infranetes_error
from infranetes.providers.qemu.program.qmp import QmpEvent
from infranetes.providers.qemu.program.sockets import GUEST_AGENT
from infranetes.providers.qemu.vm import screen, usage
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.console import Console
from infranetes.providers.qemu.vm.drives import Drives
from infranetes.providers.qemu.vm.introduction import Introduction
from infranetes.providers.qemu.vm.record import Guest, Phase, VmRecord
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.commands import shell_code
from infranetes_common.concurrency import (
    Coro,
    Flight,
    backoff,
    deferred,
    run_in_thread,
    settled,
    sleep,
    start,
)
from infranetes_common.errors import DeadlineExceeded, InfranetesError, NotFound, Unavailable
from infranetes_common.identity import Network
from infranetes_common.reactors import IReactor

_SECONDS = 10.0  # for an answer of QEMU's
_SEEN_SECONDS = 0.5  # in which the end of a process is seen
_QUIT_SECONDS = 3.0  # for QEMU to say that it ends, and to end
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 15.0
_SWITCHED_OFF = 137  # as of a process that is killed
_PANICKED = 134  # as of a process that aborts
_UNKNOWN = 255
_log = Logger()

T = TypeVar("T")
Save = Callable[[VmRecord], Awaitable[None]]
"""Saves a VM's record, or fails with OSError."""
NetworkOf = Callable[[Vm], Awaitable[Network]]


@implementer(IHypervisor)
class Hypervisor:
    """See `IHypervisor`. Its VM's record has a `guest`.

    :param why_ended: tells why the node has ended a VM's process; "": it has not.
    :param network_of: returns the network of a VM's card.
    :param has_address: returns whether a VM's guest was given its address.
    """

    drives = DRIVES

    def __init__(
        self,
        reactor: IReactor,
        vm: Vm,
        save: Save,
        why_ended: Callable[[VmRecord], str],
        network_of: NetworkOf,
        has_address: Callable[[Vm], bool],
    ) -> None:
        self._reactor = reactor
        self._vm = vm
        self._save = save
        self._why_ended = why_ended
        self._network_of = network_of
        self._has_address = has_address
        self._introduction = Introduction(
            reactor, vm.record.id, vm.paths.sockets, lambda: vm.alive and not self._ended
        )
        self._drives = Drives(reactor, vm.paths.directory, self._monitor)
        self._watchers: list[Callable[[GuestStatus], None]] = []
        self._changing = DeferredLock()
        self._under_way: list[Flight[Any]] = []  # Any: of different results
        self._following: Deferred[None] | None = None
        self._destroyed = False
        self._closed = False
        self.console = Console(reactor, vm, lambda: self._ended and self._gone)
        vm.heard = self._heard
        vm.lost = self.follow

    # ---- IHypervisor

    @deferred
    async def status(self) -> GuestStatus:
        """See `IHypervisor`."""
        self._check()
        return await self._look()

    def watch(self, changed: Callable[[GuestStatus], None]) -> Callable[[], None]:
        """See `IHypervisor`."""
        entry = [changed]  # the same function may watch twice
        watcher = entry[0]
        self._watchers.append(watcher)

        def end() -> None:
            if entry:
                entry.clear()
                self._watchers.remove(watcher)

        return end

    def execute(self) -> Deferred[GuestStatus]:
        """See `IHypervisor`."""
        return self._start(self._execute()).join()

    async def _execute(self) -> GuestStatus:
        self._check()
        async with self._changing:
            status = await self._asked()
            if status.state is not GuestState.PREPARED:
                began = False
            else:
                began = True
                await self._record(attrs.evolve(self._guest, started_at=time.time_ns()))
                await self._command("cont")
                status = self._as_status(GuestState.RUNNING)
        if began:
            self._tell(status)
            return status
        return await self._look()

    @deferred
    async def network(self) -> Network:
        """See `IHypervisor`."""
        self._check()
        return await self._network_of(self._vm)

    def insert_cds(self, cds: Sequence[Cd]) -> Deferred[None]:
        """See `IHypervisor`."""
        return self._start(self._insert_cds(cds)).join()

    async def _insert_cds(self, cds: Sequence[Cd]) -> None:
        self._check()
        try:
            await self._drives.insert(cds)
        except DeadlineExceeded as error:
            raise Unavailable(f"VM {self._vm.record.id}: {error}") from error

    def has_address(self) -> bool | None:
        """See `IHypervisor`."""
        self._check()
        return self._has_address(self._vm)

    @deferred
    async def press_power_button(self) -> None:
        """See `IHypervisor`."""
        self._check()
        if (await self._look()).state is not GuestState.RUNNING:
            raise Unavailable(f"the guest of VM {self._vm.record.id} does not run")
        await self._command("system_powerdown")

    def switch_off(self) -> Deferred[GuestStatus]:
        """See `IHypervisor`."""
        return self._start(self._switch_off()).join()

    async def _switch_off(self) -> GuestStatus:
        self._check()
        await self._finish(exit_code=_SWITCHED_OFF, message="it was switched off")
        if not self._gone:
            raise Unavailable(f"QEMU of VM {self._vm.record.id} does not end; try again")
        return self._as_status(GuestState.OFF)

    @deferred
    async def usage(self) -> GuestUsage:
        """See `IHypervisor`."""
        self._check()
        if not self._vm.alive or self._vm.process is None:
            raise Unavailable(f"the guest of VM {self._vm.record.id} has ended and uses nothing")
        record, paths, pid = self._vm.record, self._vm.paths, self._vm.process.pid
        return await run_in_thread(self._reactor, usage.thd_measure, record, paths, pid)

    def guest_agent(self) -> IStreamClientEndpoint | None:
        """See `IHypervisor`."""
        self._check()
        return UNIXClientEndpoint(self._reactor, str(self._vm.paths.sockets / GUEST_AGENT))

    @deferred
    async def screenshot(self) -> bytes:
        """See `IHypervisor`."""
        self._check()
        return await screen.screenshot(self._reactor, self._monitor)

    def screen(self) -> IStreamClientEndpoint:
        """See `IHypervisor`."""
        self._check()
        return screen.ScreenEndpoint(self._reactor, self._monitor)

    # ---- What has become of the guest

    @property
    def _guest(self) -> Guest:
        guest = self._vm.record.guest
        assert guest is not None
        return guest

    @property
    def _ended(self) -> bool:
        return self._guest.finished_at > 0

    @property
    def _gone(self) -> bool:
        """Whether QEMU is known to have ended: one that this daemon no longer watches has not."""
        return self._vm.process is None or self._vm.process.gone

    async def _look(self) -> GuestStatus:
        """Ask for the state, and see to the end of what has ended. :raise Unavailable: QEMU is silent."""
        status = await self._asked()
        if status.state in (GuestState.OFF, GuestState.CRASHED) and not self._ended:
            await self._finish(
                status.state is GuestState.CRASHED, status.exit_code, status.reason, status.message
            )
            status = self._as_status(GuestState.RUNNING)
        return status

    async def _asked(self) -> GuestStatus:
        if not self._ended and not self._gone:
            try:
                return self._understood(await self._command("query-status"))
            except InfranetesError:
                await self._end_in_sight()
                if not self._gone and not self._ended:
                    raise
        if not self._ended:
            return self._crashed_hypervisor()
        return self._as_status(GuestState.RUNNING)

    async def _end_in_sight(self) -> None:
        """Wait a moment for the end of a QEMU that does not answer: its sockets close before that is seen."""
        if self._vm.process is not None and not self._gone:
            with contextlib.suppress(TimeoutError):
                await self._vm.process.ended().addTimeout(_SEEN_SECONDS, self._reactor)

    def _understood(self, answer: object) -> GuestStatus:
        state = str(answer.get("status")) if isinstance(answer, dict) else ""
        if state == "prelaunch":
            return GuestStatus(GuestState.PREPARED)
        if state == "shutdown":
            return GuestStatus(GuestState.OFF)
        if state == "guest-panicked":
            return GuestStatus(
                GuestState.CRASHED, exit_code=_PANICKED, reason="GuestPanicked", message="its kernel panicked"
            )
        if state == "internal-error":
            return GuestStatus(
                GuestState.CRASHED,
                exit_code=_UNKNOWN,
                reason="HypervisorFailed",
                message="its processor got into a state from which QEMU can't go on",
            )
        return self._as_status(GuestState.RUNNING)

    def _crashed_hypervisor(self) -> GuestStatus:
        vm = self._vm
        why = self._why_ended(vm.record)
        code = shell_code(vm.process.code) if vm.process is not None and vm.process.code else _UNKNOWN
        return GuestStatus(
            GuestState.CRASHED,
            exit_code=_SWITCHED_OFF if why else code,
            reason="OOMKilled" if why else "HypervisorFailed",
            message=why or vm.explain_end(),
        )

    def _as_status(self, otherwise: GuestState) -> GuestStatus:
        """Return the status of a guest that has ended as it is recorded, or else this."""
        guest = self._guest
        state = otherwise
        if guest.finished_at:
            state = GuestState.CRASHED if guest.crashed else GuestState.OFF
        return GuestStatus(
            state, guest.started_at, guest.finished_at, guest.exit_code, guest.reason, guest.message
        )

    async def _finish(
        self, crashed: bool = False, exit_code: int = 0, reason: str = "", message: str = ""
    ) -> None:
        """Record the end, end QEMU, and tell those who watch. Idempotent."""
        async with self._changing:
            first = not self._ended
            if first:
                end = attrs.evolve(
                    self._guest,
                    finished_at=time.time_ns(),
                    crashed=crashed,
                    exit_code=exit_code,
                    reason=reason,
                    message=message,
                )
                try:
                    await self._record(end)
                except InfranetesError as error:
                    # The next daemon finds QEMU gone. It is ended all the same: its guest executes no more.
                    _log.error("the end of the guest of VM {vm} is not recorded: {error}",
                               vm=self._vm.record.id, error=str(error))  # fmt: skip
                _log.info("sandbox {sandbox}: the guest of VM {vm} has ended with {code}{message}",
                          sandbox=self._vm.record.sandbox_id, vm=self._vm.record.id, code=exit_code,
                          message=f": {message}" if message else "")  # fmt: skip
            await self._end_qemu()
        if first:
            self.console.tell()
            self._tell(self._as_status(GuestState.OFF))

    async def _record(self, guest: Guest) -> None:
        self._vm.record = attrs.evolve(self._vm.record, guest=guest)
        try:
            await self._save(self._vm.record)
        except OSError as error:
            raise as_infranetes_error(error) from error

    async def _end_qemu(self) -> None:
        """End QEMU, by itself if it can. What it had cached of a disk that is kept is then written."""
        vm = self._vm
        if vm.process is None or not vm.alive:
            return
        ended = vm.process.ended()
        with contextlib.suppress(InfranetesError):
            await self._command("quit", _QUIT_SECONDS)
        try:
            await ended.addTimeout(_QUIT_SECONDS, self._reactor)
        except Exception:
            try:
                await vm.end_process(self._reactor)
            except Unavailable as error:
                _log.error("{error}", error=str(error))

    def _tell(self, status: GuestStatus) -> None:
        for watcher in (*self._watchers,):
            try:
                watcher(status)
            except Exception:
                _log.failure("a watcher of VM {vm} failed", vm=self._vm.record.id)

    # ---- QEMU

    async def _monitor(self) -> VmConnections:
        if not self._vm.alive:
            raise Unavailable(f"the guest of VM {self._vm.record.id} has ended")
        return await self._vm.monitor(self._reactor)

    async def _command(self, name: str, seconds: float = 0.0) -> object:
        """Have QEMU do something. :raise Unavailable: it does not answer, or refuses."""
        try:
            answer: object = await (await self._monitor()).qmp.execute(name, seconds or _SECONDS)
            return answer
        except Unavailable:
            raise
        except InfranetesError as error:
            raise Unavailable(f"VM {self._vm.record.id}: {error}") from error

    def _heard(self, event: QmpEvent) -> None:
        if not self._follows:
            return
        if event.name == "SHUTDOWN" and event.data.get("guest") is True:
            self._start(self._finish())
        elif event.name in ("GUEST_PANICKED", "STOP"):
            self._start(self._look_quietly())

    async def _look_quietly(self) -> None:
        try:
            await self._look()
        except InfranetesError as error:
            _log.warn("VM {vm}: {error}", vm=self._vm.record.id, error=str(error))

    def process_ended(self) -> None:
        """Handle the end of QEMU's process, whoever ended it."""
        self.console.tell()
        if self._follows and not self._ended:
            self._start(self._look_quietly())

    def follow(self) -> None:
        """Follow what becomes of the guest, also of one that an earlier daemon had. Idempotent."""
        if self._follows and self._vm.record.agent_port and not self._ended:
            self._introduction.begin()
        if self._following is None and self._follows:
            self._following = start(self._follow())
            self._following.addErrback(lambda failure: failure.trap(CancelledError))

    @property
    def _follows(self) -> bool:
        gone = self._vm.destroying or self._destroyed or self._closed
        return self._vm.record.phase is Phase.READY and not gone

    async def _follow(self) -> None:
        pauses = backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        try:
            while self._follows:
                try:
                    if self._ended:
                        await self._finish()  # an earlier daemon was killed before it had ended QEMU
                    else:
                        await self._look()
                    return
                except InfranetesError as error:
                    _log.warn("VM {vm}: {error}", vm=self._vm.record.id, error=str(error))
                await sleep(self._reactor, next(pauses))
        finally:
            self._following = None

    def _start(self, work: Coro[T]) -> Flight[T]:
        """Start work that goes on when its caller is cancelled."""
        flight = Flight(work)
        self._under_way = [*(running for running in self._under_way if not running.done), flight]
        return flight

    # ---- Its end

    def _check(self) -> None:
        if self._destroyed:
            raise NotFound(f"there is no VM {self._vm.record.id} any more")

    def destroyed(self) -> None:
        """Handle the end of the VM."""
        self._destroyed = True
        self._introduction.end()
        self.console.close(destroyed=True)
        if self._following is not None:
            self._following.cancel()

    async def close(self) -> None:
        """Release what is held; the VM goes on."""
        self._closed = True
        self._introduction.end()
        if self._following is not None:
            self._following.cancel()
        await settled(running.join() for running in self._under_way)
        self.console.close(destroyed=False)
