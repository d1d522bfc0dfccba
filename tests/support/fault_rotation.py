# SPDX-License-Identifier: Apache-2.0
"""Faults of a simulated cloud while a soak test runs: one kind after another, again and again.

Throughout, 30% of the calls are throttled, and some running VMs are ended from outside.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from twisted.internet.interfaces import IReactorTime

from infranetes_common.concurrency import sleep
from tests.support.clouds.faults import NEVER, NO_AGENT, NORMAL, Fault, FaultKind
from tests.support.clouds.soap import LIST

THROTTLED = "30% of calls throttled"
LOST = "connection broken after the effect"
SILENT = "silent after the effect"
STALE = "stale answers"
NO_BOOT = "never boots"
NO_ANSWER = "no agent"
QUOTA = "quota full"
REVOKED = "credentials revoked"
TAKEN = "ended outside"
PREEMPTED = "preempted"
ALL = (THROTTLED, LOST, SILENT, STALE, NO_BOOT, NO_ANSWER, QUOTA, REVOKED, TAKEN, PREEMPTED)

# Of every TURNS pods, the one whose number modulo TURNS is one of the others loses its VM while it runs.
TURNS, TAKEN_TURN, PREEMPTED_TURN = 4, 1, 3
SECONDS = 1.0  # each fault lasts at least that long, and a pause with only throttling follows it


@attrs.frozen
class Actions:
    """The names of a cloud's calls in `Faults`."""

    launch: tuple[str, ...]
    destroy: tuple[str, ...]
    list: str
    is_list: Callable[[Mapping[str, str]], bool] = lambda call: True

    @property
    def boot(self) -> str:
        """The last call of a launch, after which the VM boots."""
        return self.launch[-1]


ACTIONS = {
    "aws": Actions(
        ("RunInstances",),
        ("TerminateInstances",),
        "DescribeInstances",
        lambda call: "InstanceId.1" not in call,
    ),
    "azure": Actions(("launch",), ("destroy",), "list VMs"),
    "gcp": Actions(("launch",), ("destroy",), "list instances"),
    "libcloud": Actions(("launch",), ("destroy",), "list"),
    "openstack": Actions(("launch",), ("destroy",), "list servers"),
    "vsphere": Actions(("CloneVM_Task",), ("PowerOffVM_Task", "Destroy_Task"), LIST),
}


class FaultRotation:
    """The faults of one cloud.

    :ivar happened: how often each of `ALL` happened.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        world: Any,  # Any: one of the simulators
        actions: Actions,
    ) -> None:
        self.happened: Counter[str] = Counter()
        self._reactor = reactor
        self._world = world
        self._actions = actions

    async def run(self, over: Callable[[], bool]) -> None:
        """Inject faults until `over` is true, then none."""
        throttling = self._world.faults.add(FaultKind.THROTTLE, share=0.3)
        try:
            for inject in itertools.cycle(
                (self._lost, self._silent, self._stale, self._quota, self._revoked, self._boots)
            ):
                await inject(over)
                await self._while(lambda: True, over, SECONDS)
                if over():
                    return
        finally:
            self.happened[THROTTLED] += throttling.happened
            self._world.faults.clear()
            self._world.behaviour = NORMAL

    def end_vm(self, sandbox: str, number: int) -> bool:
        """End the VM of pod `number` from outside if it is its turn. Return whether a VM was ended."""
        fault = {TAKEN_TURN: TAKEN, PREEMPTED_TURN: PREEMPTED}.get(number % TURNS)
        ids = [vm.id for vm in self._world.seen() if vm.sandbox == sandbox] if fault else []
        for id in ids:
            self._world.end(id)
            self.happened[str(fault)] += 1
        return bool(ids)

    # ---- faults that last for a while

    async def _lost(self, over: Callable[[], bool]) -> None:
        await self._unanswered(over, LOST, FaultKind.LOST)

    async def _silent(self, over: Callable[[], bool]) -> None:
        await self._unanswered(over, SILENT, FaultKind.SILENT)

    async def _unanswered(self, over: Callable[[], bool], name: str, kind: FaultKind) -> None:
        actions = (*self._actions.launch, *self._actions.destroy)
        await self._last(over, name, [self._world.faults.add(kind, each, times=1) for each in actions])

    async def _stale(self, over: Callable[[], bool]) -> None:
        fault = self._world.faults.add(
            FaultKind.STALE, self._actions.list, only=self._actions.is_list, share=0.5
        )
        await self._last(over, STALE, [fault])

    async def _quota(self, over: Callable[[], bool]) -> None:
        await self._last(
            over, QUOTA, [self._world.faults.add(FaultKind.QUOTA, self._actions.launch[0], times=2)]
        )

    async def _revoked(self, over: Callable[[], bool]) -> None:
        await self._last(over, REVOKED, [self._world.faults.add(FaultKind.REVOKED)])

    async def _boots(self, over: Callable[[], bool]) -> None:
        for behaviour, kind in ((NEVER, NO_BOOT), (NO_AGENT, NO_ANSWER)):
            self._world.behaviour = behaviour
            before = self._boots_asked()
            while self._boots_asked() == before and not over():
                await self._while(lambda: False, over)
            self.happened[kind] += self._boots_asked() - before
            self._world.behaviour = NORMAL

    def _boots_asked(self) -> int:
        return int(self._world.faults.calls.get(self._actions.boot, 0))

    async def _last(self, over: Callable[[], bool], kind: str, faults: list[Fault]) -> None:
        """Wait until each of the faults has happened, then remove them."""
        await self._while(lambda: True, over, SECONDS)
        await self._while(lambda: not all(each.happened for each in faults), over)
        for each in faults:
            self._world.faults.rules.remove(each)
            self.happened[kind] += each.happened

    async def _while(
        self, condition: Callable[[], bool], over: Callable[[], bool], seconds: float = 1e9
    ) -> None:
        """Wait while the condition holds, for at least 10 ms and at most `seconds`, or until `over`."""
        until = self._reactor.seconds() + seconds
        while True:
            await sleep(self._reactor, 0.01)
            if not condition() or over() or self._reactor.seconds() > until:
                return
