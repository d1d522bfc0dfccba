# SPDX-License-Identifier: Apache-2.0
"""The instant at which a VM is kept: QEMU's migration, to a pipe, of a VM that goes on here.

With KVM, QEMU writes the memory while the VM executes, and again what that has changed. When little is left
it stops the VM, the disk gets its layer, the rest is written, and the VM goes on. A VM that changes its
memory faster than it is written is stopped earlier.

An emulated VM is stopped from the beginning: QEMU 7.2 misses some of what it changes meanwhile, and the guest
panics where that is loaded.

status of the migration     the VM                  what comes next
setup, active               executes, with KVM      wait; if it takes long, `stop`
pre-switchover              is stopped              insert the layer, `migrate-continue`
device                      is stopped              wait: this is short, and `migrate_cancel` would
                                                    leave the VM without its disk (7.2)
completed                   is stopped              `cont`
failed, cancelled           goes on, or is stopped  `cont`
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import attrs
from twisted.internet.interfaces import IReactorTime

from infranetes.providers.qemu.program.qmp import QmpConnection, QmpError, QmpEvent
from infranetes_common.concurrency import sleep
from infranetes_common.errors import Unavailable

_NAME = "keep"  # of the descriptor
_LOOK_SECONDS = 0.01
_LOOKS = 10
_SETTLE_SECONDS = 30.0
_PASSES = 3  # over the memory, while the VM executes
_END_SECONDS = 10.0
_UNBOUNDED = 1 << 40  # bytes a second
_DOWNTIME_MILLISECONDS = 100  # how long the VM may be stopped for the rest, as QEMU reckons
_RUNS = ("setup", "active", "pre-switchover", "device", "wait-unplug", "cancelling")
_CAPABILITIES = {"pause-before-switchover": True, "events": True, "x-ignore-shared": False}


class Pause:
    """The time for which a VM does not execute, by QEMU's events.

    :ivar began: by the clock; None: it has not. :ivar ended: likewise."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self.began: float | None = None
        self.ended: float | None = None

    def heard(self, event: QmpEvent) -> None:
        """Take in one of QEMU's events."""
        if event.name == "STOP" and self.began is None:
            self.began = self._clock.seconds()
        elif event.name == "RESUME" and self.began is not None:
            self.ended = self._clock.seconds()

    @property
    def seconds(self) -> float:
        """How long it was; 0.0: it is not over."""
        return self.ended - self.began if self.began is not None and self.ended is not None else 0.0


@attrs.frozen
class Capture:
    """The capture of one VM's memory and devices. :ivar qmp: its monitor, which has answered before."""

    _clock: IReactorTime
    qmp: QmpConnection

    async def take(
        self, writer: int, at_the_instant: Callable[[], Awaitable[object]], emulated: bool
    ) -> None:
        """Write the VM's state, and leave the VM stopped.

        :param writer: the descriptor that QEMU gets. :param at_the_instant: called when the VM is stopped.
        :raise InfranetesError: QEMU could not; `let_go_on` is to be called in any case."""
        await self._set_up(writer)
        if emulated:
            await self.qmp.execute("stop")
        await self.qmp.execute("migrate", uri=f"fd:{_NAME}")
        await self._until("pre-switchover")
        await at_the_instant()
        await self.qmp.execute("migrate-continue", state="pre-switchover")
        await self._until("completed")

    async def let_go_on(self) -> None:
        """End a migration that goes on, and let the VM execute. Idempotent.

        Whoever reads the pipe sees its end: QEMU keeps no descriptor of it.

        :raise InfranetesError: QEMU does not."""
        deadline = self._clock.seconds() + _END_SECONDS
        looks = 0  # at a VM that is stopped, and may have been told to go on with the migration just before
        while (status := await self._status()) in _RUNS:
            looks += status == "pre-switchover"
            if status in ("setup", "active") or looks > _LOOKS:
                await self.qmp.execute("migrate_cancel")  # it may have ended meanwhile, which is no error
            await self._look_again(deadline)
        while not (status := await self.qmp.execute("query-status"))["running"]:
            if status["status"] == "finish-migrate":  # for a moment longer than the migration
                await self._look_again(deadline)
            else:
                await self.qmp.execute("cont")
        with suppress(QmpError):  # there is none
            await self.qmp.execute("closefd", fdname=_NAME)

    async def _look_again(self, deadline: float) -> None:
        if self._clock.seconds() > deadline:
            raise Unavailable("QEMU does not end the keeping of a VM")
        await sleep(self._clock, _LOOK_SECONDS)

    async def _set_up(self, writer: int) -> None:
        await self.qmp.pass_file(_NAME, writer)
        capabilities = [{"capability": name, "state": state} for name, state in _CAPABILITIES.items()]
        await self.qmp.execute("migrate-set-capabilities", capabilities=capabilities)
        await self.qmp.execute(
            "migrate-set-parameters", max_bandwidth=_UNBOUNDED, downtime_limit=_DOWNTIME_MILLISECONDS
        )

    async def _until(self, wanted: str) -> None:
        deadline = self._clock.seconds() + _SETTLE_SECONDS
        stopped = wanted == "completed"  # by QEMU itself
        while (status := (answer := await self._query()).get("status")) != wanted:
            if status not in _RUNS:
                why = str(answer.get("error-desc") or status)
                raise Unavailable(f"QEMU could not write a VM's state: {why:.200}")
            if not stopped and (_written_enough(answer) or self._clock.seconds() > deadline):
                stopped = True
                await self.qmp.execute("stop")
            await sleep(self._clock, _LOOK_SECONDS)

    async def _status(self) -> str:
        return str((await self._query()).get("status", "none"))

    async def _query(self) -> Mapping[str, object]:
        answer = await self.qmp.execute("query-migrate")
        return answer if isinstance(answer, dict) else {}


def _written_enough(answer: Mapping[str, object]) -> bool:
    """Return whether a VM that executes changes its memory as fast as it is written."""
    ram = answer.get("ram")
    if not isinstance(ram, dict):
        return False
    transferred, total = ram.get("transferred"), ram.get("total")
    passes = ram.get("dirty-sync-count")
    much = isinstance(transferred, int) and isinstance(total, int) and transferred * 2 > total * 3 > 0
    return much or (isinstance(passes, int) and passes > _PASSES)
