# SPDX-License-Identifier: Apache-2.0
"""The ledger: what the cloud last said of our VMs. No I/O.

A cloud's answers may be older than earlier ones and may lack a VM that was just created. So a VM's state only
ever advances, and a VM launched a moment ago is listed even if the cloud's list lacks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import attrs

from infranetes.providers.cloud.interface import CloudVM
from infranetes.providers.interface import InstanceState

_STATE_ORDER = list(InstanceState)


@attrs.define(eq=False)
class LedgerEntry:
    """The ledger's entry of one VM."""

    vm: CloudVM
    launched_at: float | None = None  # when this daemon launched it; None: an earlier daemon did
    end_reported: bool = False  # its end was reported to watchers; also true if it had ended when first seen
    lists_missed: int = 0  # consecutive lists that lacked it
    stopped_at: float = 0.0  # when it was first seen STOPPED, and begun to be so


@attrs.define
class Ledger:
    """VMs by id.

    :param now: seconds. :param staleness: how many seconds old the cloud's answers may be.
    """

    now: Callable[[], float]
    staleness: float
    entries: dict[str, LedgerEntry] = attrs.field(factory=dict)
    destroyed: dict[str, str] = attrs.field(factory=dict)  # by the id of a destroyed VM: its token
    destroyed_at: dict[str, float] = attrs.field(factory=dict)  # when this daemon destroyed VMs, by id
    ending: set[str] = attrs.field(factory=set)  # ids of destroyed VMs that no list has confirmed to be gone
    lasting: set[str] = attrs.field(factory=set)  # ids of destroyed VMs that still exist
    changed: set[str] = attrs.field(factory=set)  # ids of VMs with changes that are not yet published
    stopped: set[str] = attrs.field(factory=set)  # tokens of VMs that we have stopped, or are to stop
    started: dict[str, float] = attrs.field(factory=dict)  # when VMs were started that were STOPPED, by id
    started_at: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.started_at = self.now()

    def last_said(self, id: str) -> CloudVM | None:
        """Return what the cloud said last of a VM; None: nothing, or it is destroyed."""
        entry = self.entries.get(id)
        return entry.vm if entry is not None else None

    def record_launch(self, vm: CloudVM) -> CloudVM:
        """Record a VM that was just launched."""
        recorded = self.record(vm)
        self.entries[vm.id].launched_at = self.now()
        return recorded

    def record(self, vm: CloudVM) -> CloudVM:
        """Record what the cloud says of a VM that is not destroyed. Returns what is now known of it."""
        vm = self._with_meaning(vm)
        entry = self.entries.get(vm.id)
        if entry is None:
            ended = vm.state is InstanceState.ENDED
            self.entries[vm.id] = LedgerEntry(vm, end_reported=ended, stopped_at=self.now())
            self.changed.add(vm.id)  # its launch may wait for it, and lists may first show it when it runs
            return vm
        entry.lists_missed = 0
        if entry.vm.state is not InstanceState.STOPPED and vm.state is InstanceState.STOPPED:
            entry.stopped_at = self.now()
        restarted = entry.vm.state is InstanceState.STOPPED and not self.has_just_stopped(vm.id)
        if restarted or _STATE_ORDER.index(vm.state) >= _STATE_ORDER.index(entry.vm.state):
            before = entry.vm
            after = attrs.evolve(
                vm,
                private_address=vm.private_address or before.private_address,
                public_address=vm.public_address or before.public_address,
                created_at=before.created_at or vm.created_at,
                detail=vm.detail or before.detail,
            )
            if after != before:
                entry.vm = after
                self.changed.add(vm.id)
        return entry.vm

    def _with_meaning(self, vm: CloudVM) -> CloudVM:
        """Return a VM with the state that it is in to us, if the cloud shows it as halted: it has ended,
        unless we have stopped it, or have just started it and this answer is older than that."""
        if vm.halting and vm.token in self.stopped:
            return attrs.evolve(vm, state=InstanceState.PENDING, detail="")
        if not vm.halted:
            return vm
        if vm.token in self.stopped:
            return attrs.evolve(vm, state=InstanceState.STOPPED, detail="")
        if self.now() - self.started.get(vm.id, -math.inf) < self.staleness:
            return attrs.evolve(vm, state=InstanceState.PENDING, detail="")
        return vm

    def has_just_stopped(self, id: str) -> bool:
        """Return whether a VM has stopped so recently that the cloud may answer that it runs."""
        entry = self.entries.get(id)
        if entry is None or entry.vm.state is not InstanceState.STOPPED:
            return False
        return self.now() - entry.stopped_at < self.staleness

    def record_start(self, id: str) -> CloudVM:
        """Record that the cloud has accepted to start a VM that was STOPPED."""
        entry = self.entries[id]
        self.started[id] = self.now()
        entry.vm = attrs.evolve(
            entry.vm, state=InstanceState.PENDING, private_address="", public_address="", halted=False
        )
        self.changed.add(id)
        return entry.vm

    def record_list(self, listed: Iterable[CloudVM]) -> list[CloudVM]:
        """Record the cloud's list. Returns the VMs that exist: those listed, and those too new to be."""
        vms = list(listed)
        there = {vm.id for vm in vms if not vm.gone}
        self.ending &= there
        for vm in vms:
            self._revive_if_there(vm)
        current = [self.record(vm) for vm in vms if vm.id not in self.destroyed]
        ids = {vm.id for vm in current}
        new = [entry.vm for entry in self.entries.values() if entry.vm.id not in ids and self.is_new(entry)]
        return sorted([*current, *new], key=lambda vm: (vm.created_at, vm.id))

    def _revive_if_there(self, vm: CloudVM) -> None:
        """Forget that a VM was destroyed if it is not gone for longer than the cloud's answers may be stale:
        better to destroy it again than to pay for it forever."""
        if vm.id not in self.destroyed or not (vm.id in self.ending or vm.state is not InstanceState.ENDED):
            return
        if self.now() - self.destroyed_at.get(vm.id, self.started_at) > self.staleness:
            del self.destroyed[vm.id]
            self.ending.discard(vm.id)
            self.lasting.add(vm.id)

    def is_new(self, entry: LedgerEntry) -> bool:
        """Return whether a VM was launched so recently that the cloud's answers may lack it."""
        return entry.launched_at is not None and self.now() - entry.launched_at < self.staleness

    def for_token(self, token: str) -> CloudVM | None:
        """Return the VM of a token, preferably one that has not ended."""
        vms = [entry.vm for entry in self.entries.values() if entry.vm.token == token]
        return min(vms, key=lambda vm: (_STATE_ORDER.index(vm.state), vm.created_at, vm.id), default=None)

    def duplicates(self) -> list[CloudVM]:
        """Surplus live VMs of a token, which are to be destroyed. The VM that a launch returned is kept,
        else the oldest."""
        by_token: dict[str, list[LedgerEntry]] = {}
        for entry in self.live():
            if entry.vm.token:
                by_token.setdefault(entry.vm.token, []).append(entry)
        surplus: list[CloudVM] = []
        for entries in by_token.values():
            entries.sort(key=lambda entry: (entry.launched_at is None, entry.vm.created_at, entry.vm.id))
            surplus += [entry.vm for entry in entries[1:]]
        return surplus

    def live(self) -> list[LedgerEntry]:
        """VMs that have not ended."""
        return [entry for entry in self.entries.values() if entry.vm.state is not InstanceState.ENDED]

    def record_end(self, entry: LedgerEntry, detail: str) -> None:
        """Record that the cloud no longer knows a VM."""
        entry.vm = attrs.evolve(entry.vm, state=InstanceState.ENDED, detail=detail)
        self.changed.add(entry.vm.id)

    def record_destroyed_before(self, tokens: Mapping[str, str]) -> None:
        """Record which VMs earlier daemons destroyed. :param tokens: by the VM's id."""
        self.destroyed.update(tokens)
        self.ending.update(tokens)

    def record_destroyed(self, id: str, token: str) -> None:
        """Record that a VM is destroyed: the cloud has accepted the request."""
        self.entries.pop(id, None)
        self.started.pop(id, None)
        self.lasting.discard(id)
        self.ending.add(id)
        self.changed.add(id)
        self.destroyed[id] = token
        self.destroyed_at[id] = self.now()

    def count_destroyed(self, token: str) -> int:
        """Return how many VMs of a token were destroyed."""
        return sum(each == token for each in self.destroyed.values())
