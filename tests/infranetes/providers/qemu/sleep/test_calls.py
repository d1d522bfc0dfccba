# SPDX-License-Identifier: Apache-2.0
"""The calls for VMs that sleep: one at a time for each VM, until it is destroyed or the daemon stops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.sleep.calls import SleepCalls
from infranetes.providers.qemu.sleep.sleeper import Node
from infranetes.providers.qemu.vm.vm import Vm
from infranetes.providers.sleeping import Slept
from infranetes_common.concurrency import KeyedLock, start
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import IReactor


class Sleeper:
    """Falls asleep, or wakes, when the test says so. :ivar steps: what was begun."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.waiting: list[Deferred[None]] = []

    async def _step(self, name: str, vm: Vm) -> None:
        self.steps.append(f"{name} {vm.record.id}")
        self.waiting.append(Deferred())
        await self.waiting[-1]

    async def sleep(self, vm: Vm) -> Slept:
        await self._step("sleep", vm)
        return Slept(7, 0.0)

    async def wake(self, vm: Vm) -> None:
        await self._step("wake", vm)


class CallsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.lock: KeyedLock[str] = KeyedLock()
        self.sleeper = Sleeper()
        self.vms = {name: self.vm(name) for name in ("one", "other")}
        node: Any = None  # of no interest
        self.calls = SleepCalls(
            cast(IReactor, Clock()), cast(Node, node), self.vms.__getitem__, self.lock, 30.0
        )
        self.calls.sleeper = cast(Any, self.sleeper)

    def vm(self, name: str) -> Vm:
        record = SimpleNamespace(id=name, token=f"token of {name}")
        return cast(Vm, SimpleNamespace(record=record, process=None, usable=False))

    def test_those_of_one_vm_come_one_after_the_other_and_those_of_two_at_once(self) -> None:
        sleeping = start(self.calls.sleep("one"))
        waking = start(self.calls.wake("one"))
        start(self.calls.sleep("other")).addErrback(lambda _: None)
        self.assertEqual(self.sleeper.steps, ["sleep one", "sleep other"])
        self.sleeper.waiting[0].callback(None)
        self.assertEqual(self.successResultOf(sleeping), Slept(7, 0.0))
        self.assertEqual(self.sleeper.steps[2:], ["wake one"])
        self.sleeper.waiting[2].callback(None)
        self.successResultOf(waking)
        self.calls.stop()

    def test_nothing_is_begun_while_the_vm_is_being_changed(self) -> None:
        changing = self.lock.held("token of one")
        self.successResultOf(start(changing.__aenter__()))
        sleeping = start(self.calls.sleep("one"))
        self.assertEqual(self.sleeper.steps, [])
        self.successResultOf(start(changing.__aexit__(None, None, None)))
        self.assertEqual(self.sleeper.steps, ["sleep one"])
        self.sleeper.waiting[0].callback(None)
        self.successResultOf(sleeping)

    def test_the_end_of_a_vm_ends_what_is_under_way_for_it_alone(self) -> None:
        one, other = start(self.calls.sleep("one")), start(self.calls.wake("other"))
        for _ in range(2):
            self.calls.cancel("token of one")
        self.assertIn("is being ended", str(self.failureResultOf(one, Unavailable).value))
        self.calls.cancel("token of one")
        self.assertNoResult(other)
        self.calls.stop()
        self.failureResultOf(other, Unavailable)
        self.assertEqual(self.lock.busy(), [])

    def test_what_has_ended_is_not_cancelled_later(self) -> None:
        sleeping = start(self.calls.sleep("one"))
        self.sleeper.waiting[0].callback(None)
        self.successResultOf(sleeping)
        self.assertEqual(self.calls._under_way, {})

    def test_all_who_want_to_know_are_told_of_a_call(self) -> None:
        first: list[str] = []
        second: list[str] = []
        for heard in (first, second):
            self.calls.when_called(heard.append)
        self.calls._tell(self.vms["one"])
        self.assertEqual((first, second), (["one"], ["one"]))

    def test_of_a_vm_that_does_not_execute_nothing_is_asked(self) -> None:
        for process in (None, SimpleNamespace(pid=1)):
            cast(Any, self.vms["one"]).process = process
            self.failureResultOf(start(self.calls.activity("one")), Unavailable)
