# SPDX-License-Identifier: Apache-2.0
"""The calls of `ISleeps` for a provider's VMs: one at a time for each VM, until it is destroyed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from twisted.internet.defer import CancelledError

from infranetes.providers.qemu.sleep.activity import thd_activity
from infranetes.providers.qemu.sleep.sleeper import Node, Sleeper
from infranetes.providers.qemu.vm.vm import Vm
from infranetes.providers.sleeping import Activity, Slept
from infranetes_common.concurrency import Coro, Flight, KeyedLock, run_in_thread
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import IReactor

_T = TypeVar("_T")


class SleepCalls:
    """Lets a provider's VMs sleep, and wakes them. :ivar sleeper: does it.

    :param find: returns a VM by its instance's id. :param tokens_in_work: the VMs that are being changed.
    :param seconds: for a VM's process to load its state."""

    def __init__(
        self,
        reactor: IReactor,
        node: Node,
        find: Callable[[str], Vm],
        tokens_in_work: KeyedLock[str],
        seconds: float,
    ) -> None:
        self._reactor = reactor
        self._find = find
        self._tokens_in_work = tokens_in_work
        self._under_way: dict[str, Flight[object]] = {}  # by token
        self._called: list[Callable[[str], None]] = []
        self.sleeper = Sleeper(reactor, node, self._tell, seconds)

    async def sleep(self, instance_id: str) -> Slept:
        return await self._one_at_a_time(instance_id, self.sleeper.sleep)

    async def wake(self, instance_id: str) -> None:
        await self._one_at_a_time(instance_id, self.sleeper.wake)

    async def activity(self, instance_id: str) -> Activity:
        vm = self._find(instance_id)
        if vm.process is None or not vm.usable:
            raise Unavailable(f"VM {instance_id} does not execute")
        return await run_in_thread(self._reactor, thd_activity, vm.record, vm.process.pid)

    def when_called(self, called: Callable[[str], None]) -> None:
        self._called.append(called)

    def cancel(self, token: str) -> None:
        """End what is under way for a VM. Idempotent."""
        if (flight := self._under_way.get(token)) is not None:
            flight.cancel()

    def stop(self) -> None:
        """End all that is under way: VMs execute, or sleep on."""
        for flight in (*self._under_way.values(),):  # one that is cancelled may be over at once
            flight.cancel()

    async def _one_at_a_time(self, instance_id: str, work: Callable[[Vm], Coro[_T]]) -> _T:
        token = self._find(instance_id).record.token
        async with self._tokens_in_work.held(token):
            flight = self._under_way[token] = Flight(work(self._find(instance_id)))
            try:
                return cast(_T, await flight.join())
            except CancelledError:
                raise Unavailable(f"VM {instance_id} is being ended, or the daemon stops") from None
            finally:
                del self._under_way[token]

    def _tell(self, vm: Vm) -> None:
        for called in (*self._called,):
            called(vm.record.id)
