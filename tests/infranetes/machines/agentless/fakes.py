# SPDX-License-Identifier: Apache-2.0
"""A hypervisor and ways into a guest that do what a test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IStreamClientEndpoint
from zope.interface import implementer

from infranetes.machines.agentless.access import GuestFile, IGuestAccess, IPowersOff
from infranetes.machines.sessions import SessionCall
from infranetes.providers.hypervisor import (
    GuestState,
    GuestStatus,
    GuestUsage,
    IConsole,
    IHypervisor,
)
from infranetes.providers.machine_images import DRIVES, Cd
from infranetes_common.concurrency import Notifier, deferred
from infranetes_common.errors import InvalidArgument, NotFound, NotOffered, Unavailable
from infranetes_common.identity import Network
from infranetes_common.wire import vmserver


@implementer(IConsole)
class FakeConsole:
    """A console to which a test writes. It keeps `kept` bytes.

    :ivar sizes: of what was typed at once. :ivar refusal: raised instead of taking it; None: it is taken.
    """

    def __init__(self, kept: int = 1 << 20) -> None:
        self.begin = 0
        self.end = 0
        self.ended = False
        self.writable = True
        self.typed = b""
        self.sizes: list[int] = []
        self.refusal: Exception | None = None
        self._kept = kept
        self._data = b""
        self._changed = Notifier()

    def say(self, data: bytes) -> None:
        """Have the guest write."""
        self._data += data
        self.end += len(data)
        if len(self._data) > self._kept:
            self.begin += len(self._data) - self._kept
            self._data = self._data[-self._kept :]
        self._changed.notify()

    def finish(self) -> None:
        """Have the console end with the VM."""
        self.ended = True
        self._changed.notify()

    @deferred
    async def read(self, offset: int, size: int) -> bytes:
        if not self.begin <= offset <= self.end:
            raise InvalidArgument(f"{offset} is not between {self.begin} and {self.end}")
        at = offset - self.begin
        return self._data[at : at + size]

    def changed(self) -> Deferred[None]:
        return self._changed.wait()

    @deferred
    async def write(self, data: bytes) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.sizes.append(len(data))
        self.typed += data


@implementer(IHypervisor)
class FakeHypervisor:
    """A hypervisor's VM, whose guest answers as the test sets it.

    :ivar obeys: whether the guest powers off when its power button is pressed.
    :ivar calls: what was asked of it. :ivar picture: what its screen shows; None: it has no screen.
    :ivar viewed: where its screen and keyboard are; None: there are none.
    """

    def __init__(self, state: GuestState = GuestState.PREPARED, drives: int = DRIVES) -> None:
        self.drives = drives
        self.console = FakeConsole()
        self.calls: list[str] = []
        self.cds: list[tuple[Cd, ...]] = []
        self.obeys = True
        self.destroyed = False
        self.silent = False
        self.addressed: bool | None = True
        self.picture: Deferred[bytes] | bytes | None = None
        self.viewed: IStreamClientEndpoint | None = None
        self._status = GuestStatus(state)
        self._watchers: list[Callable[[GuestStatus], None]] = []

    @property
    def watched(self) -> int:
        """How many watch it."""
        return len(self._watchers)

    def become(self, status: GuestStatus) -> GuestStatus:
        """Change the guest's state, and tell all who watch."""
        self._status = status
        for changed in list(self._watchers):
            changed(status)
        return status

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.destroyed:
            raise NotFound("there is no such VM")
        if self.silent:
            raise Unavailable("the hypervisor does not answer")

    @deferred
    async def status(self) -> GuestStatus:
        if self.destroyed:
            raise NotFound("there is no such VM")
        if self.silent:
            raise Unavailable("the hypervisor does not answer")
        return self._status

    def watch(self, changed: Callable[[GuestStatus], None]) -> Callable[[], None]:
        self._watchers.append(changed)
        return lambda: self._watchers.remove(changed)

    @deferred
    async def execute(self) -> GuestStatus:
        self._called("execute")
        if self._status.state is GuestState.PREPARED:
            self.become(GuestStatus(GuestState.RUNNING, started_at=5))
        return self._status

    @deferred
    async def network(self) -> Network:
        return Network(mac="0a:58:0a:00:00:02", address="10.0.0.2/24", gateway="10.0.0.1", mtu=1500)

    @deferred
    async def insert_cds(self, cds: Sequence[Cd]) -> None:
        self._called("insert_cds")
        self.cds.append(tuple(cds))

    @deferred
    async def press_power_button(self) -> None:
        self._called("press_power_button")
        if self.obeys:
            self.become(GuestStatus(GuestState.OFF, 5, 9))

    @deferred
    async def switch_off(self) -> GuestStatus:
        self._called("switch_off")
        if self._status.state is not GuestState.OFF:
            self.become(GuestStatus(GuestState.OFF, 5, 9, 137))
        return self._status

    @deferred
    async def usage(self) -> GuestUsage:
        return GuestUsage(cpu_nanos=7, memory_bytes=100, rx_bytes=3, tx_bytes=4, disk_bytes=50)

    def has_address(self) -> bool | None:
        return self.addressed

    def guest_agent(self) -> IStreamClientEndpoint | None:
        return None

    def screenshot(self) -> Deferred[bytes]:
        if self.picture is None:
            raise NotOffered("it has no screen")
        return succeed(self.picture) if isinstance(self.picture, bytes) else self.picture

    def screen(self) -> IStreamClientEndpoint:
        if self.viewed is None:
            raise NotOffered("it has no screen")
        return self.viewed


@implementer(IGuestAccess)
class FakeWay:
    """A way into a guest.

    :ivar answer: its answer to `answers`: None, an error, or a Deferred that is waited for.
    :ivar files: what was put into the guest, by directory."""

    def __init__(self, name: str = "ssh") -> None:
        self.name = name
        self.answer: Exception | Deferred[None] | None = None
        self.asked = 0
        self.ran: list[tuple[str, ...]] = []
        self.run_error: Exception | None = None
        self.files: dict[str, dict[str, bytes]] = {}
        self.closed = False

    async def answers(self, within: float) -> None:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        await (self.answer or succeed(None))

    async def run(
        self, command: Sequence[str], seconds: int, limit: float, max_output: int, stdin: bytes = b""
    ) -> vmserver.ExecSyncResponse:
        self.ran.append(tuple(command))
        if self.run_error is not None:
            raise self.run_error
        return vmserver.ExecSyncResponse(stdout=self.name.encode())

    def session(self) -> SessionCall:
        raise NotOffered("no sessions here")

    async def put_files(self, directory: str, files: Mapping[str, GuestFile]) -> None:
        if self.run_error is not None:
            raise self.run_error
        self.files[directory] = {name: each.content for name, each in files.items()}

    async def usage(self) -> vmserver.StatsResponse:
        if self.run_error is not None:
            raise self.run_error
        return vmserver.StatsResponse(machine=vmserver.Usage(processes=3))

    async def close(self) -> None:
        self.closed = True


@implementer(IPowersOff)
class PoweringWay(FakeWay):
    """A way that can have its guest power off: it calls `off`."""

    def __init__(self, off: Callable[[], object]) -> None:
        super().__init__("guest-agent")
        self._off = off

    async def power_off(self) -> None:
        self._off()
