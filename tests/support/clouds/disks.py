# SPDX-License-Identifier: Apache-2.0
"""A simulated cloud's disks in memory, with states that take time, and answers that get lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs

from infranetes.providers.cloud.interface import Action, CloudError, ErrorKind
from infranetes.providers.cloud.volumes.disks import CloudDisk, DiskRequest, DiskState, Hold, HoldState

T = TypeVar("T")
GIB = 1 << 30
_RETRIES = 3  # of calls whose answer is lost, as `calls.Calls` makes them


class NoDriver:
    """A stand-in for a driver, which calls do not need here."""


@attrs.define
class MemoryDisks:
    """See `CloudDisks`.

    :ivar looks: the number of looks at a disk after which it has reached its next state.
    :ivar calls: the names of the calls made. :ivar lost: how many of the next answers are lost, by call.
    :ivar cut: the name of the call after which the cloud answers nothing until this is "" again.
    :ivar blind: whether existing disks are hidden.
    :ivar age: the age of the disks in answers."""

    looks: int = 0
    blind: bool = False
    age: float = 0.0
    has_modes: bool = False
    in_turns: bool = False
    zone: str = "zone-a"
    unit: int = GIB
    max_size: int = 1 << 44
    at_once: int = 100
    disks: dict[str, CloudDisk] = attrs.field(factory=dict)
    tokens: dict[tuple[str, int], tuple[DiskRequest, str]] = attrs.field(factory=dict)
    pending: dict[str, tuple[int, CloudDisk | None]] = attrs.field(factory=dict)
    calls: list[str] = attrs.field(factory=list)
    lost: dict[str, int] = attrs.field(factory=dict)
    cut: str = ""
    is_cut: bool = False
    refused: dict[str, CloudError] = attrs.field(factory=dict)
    most_holds: int = 0  # the most that one disk had at any time

    def is_id(self, text: str) -> bool:
        return text.startswith("disk-") and text[5:].isdigit()

    def _thd_find(self, driver: NoDriver, names: Sequence[str]) -> list[CloudDisk]:
        self.calls.append("find")
        return [disk for disk in self._seen() if disk.name in names]

    def _thd_get(self, driver: NoDriver, ids: Sequence[str]) -> list[CloudDisk]:
        self.calls.append("get")
        return [disk for disk in self._seen(ids) if disk.id in ids]

    def _thd_list(self, driver: NoDriver) -> list[CloudDisk]:
        self.calls.append("list")
        return [disk for disk in self._seen() if disk.ours]

    def _thd_create(self, driver: NoDriver, request: DiskRequest) -> tuple[CloudDisk, str]:
        self._begin("create")
        key = (request.name, request.number)
        if key in self.tokens:
            asked, id = self.tokens[key]
            if asked != request:
                raise CloudError(ErrorKind.CONFLICT, "this token was used for another size")
            self._answer("create")
            return attrs.evolve(self.disks.get(id, CloudDisk(id, 0, DiskState.READY)), age=self.age), ""
        id = f"disk-{len(self.tokens):04}"
        self.tokens[key] = (request, id)
        made = CloudDisk(id, request.size, DiskState.CREATING, f"serial{id}", True, request.name)
        self._change(made, attrs.evolve(made, state=DiskState.READY))
        self._answer("create")
        return attrs.evolve(made, age=self.age), ""

    def _thd_delete(self, driver: NoDriver, disk: CloudDisk) -> str:
        self._begin("delete")
        now = self.disks.get(disk.id)
        if now is None:
            return ""
        if now.holds:
            raise CloudError(ErrorKind.STATE, f"{disk.id} is in use")
        self._change(attrs.evolve(now, state=DiskState.DELETING), None)
        return self._answer("delete")

    def _thd_grow(self, driver: NoDriver, disk: CloudDisk, size: int) -> str:
        self._begin("grow")
        now = self.disks[disk.id]
        self._change(now, attrs.evolve(now, size=size))
        return self._answer("grow")

    def _thd_attach(self, driver: NoDriver, disk: CloudDisk, vm_id: str, read_only: bool) -> str:
        self._begin("attach")
        now = self.disks[disk.id]
        if now.holds or now.state is not DiskState.READY:
            raise CloudError(ErrorKind.STATE, f"{disk.id} is in use")
        held = Hold(vm_id, HoldState.ATTACHING, read_only and self.has_modes)
        done = attrs.evolve(held, state=HoldState.ATTACHED)
        self._change(attrs.evolve(now, holds=(held,)), attrs.evolve(now, holds=(done,)))
        return self._answer("attach")

    def _thd_detach(self, driver: NoDriver, disk: CloudDisk, vm_id: str, force: bool) -> str:
        self._begin("force" if force else "detach")
        now = self.disks[disk.id]
        if [hold.vm_id for hold in now.holds] != [vm_id]:
            raise CloudError(ErrorKind.STATE, f"{disk.id} is not attached to {vm_id}")
        leaving = attrs.evolve(now.holds[0], state=HoldState.DETACHING)
        self._change(attrs.evolve(now, holds=(leaving,)), attrs.evolve(now, holds=()))
        return self._answer("detach")

    def _thd_is_done(self, driver: NoDriver, operation: str) -> bool:
        raise AssertionError("there are no operations here")

    # ---- The cloud from inside

    def left(self) -> list[CloudDisk]:
        """The disks that are not being deleted."""
        return [disk for disk in self.disks.values() if disk.state is not DiskState.DELETING]

    def put(self, disk: CloudDisk) -> CloudDisk:
        """Add a disk, as if somebody else had made it."""
        self.pending.pop(disk.id, None)
        self.disks[disk.id] = disk
        return disk

    def _begin(self, call: str) -> None:
        self.calls.append(call)
        self.is_cut = self.is_cut and bool(self.cut)
        if self.is_cut:
            raise CloudError(ErrorKind.TRANSIENT, "there is no answer")
        if call in self.refused:
            raise self.refused[call]

    def _answer(self, call: str) -> str:
        if call == self.cut:
            self.is_cut = True
            raise CloudError(ErrorKind.TRANSIENT, "there is no answer")
        if self.lost.get(call):
            self.lost[call] -= 1
            raise CloudError(ErrorKind.TRANSIENT, "the answer is lost")
        return ""

    def _change(self, now: CloudDisk, then: CloudDisk | None) -> None:
        self.disks[now.id] = now
        self.pending[now.id] = (self.looks, then)
        self.most_holds = max(self.most_holds, len(now.holds))
        self._seen([])

    def _seen(self, ids: Sequence[str] | None = None) -> list[CloudDisk]:
        for id, (left, then) in list(self.pending.items()):
            if left > 0:
                self.pending[id] = (left - (ids is None or id in ids), then)
                continue
            del self.pending[id]
            if then is None:
                del self.disks[id]
            else:
                self.disks[id] = then
        return [] if self.blind else list(self.disks.values())


class MemoryCalls:
    """See `disk_calls.CloudCaller`: calls are made at once, and again if their answer is lost."""

    async def call(
        self,
        what: str,
        work: Callable[[NoDriver], T],
        seconds: float | None = None,
        circuit: str = "",
        action: Action = Action.LOOK,
    ) -> T:
        for left in reversed(range(_RETRIES)):
            try:
                return work(NoDriver())
            except CloudError as error:
                if error.kind is not ErrorKind.TRANSIENT or not left:
                    raise
        raise AssertionError
