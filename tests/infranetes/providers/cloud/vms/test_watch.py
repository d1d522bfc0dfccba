# SPDX-License-Identifier: Apache-2.0
"""How often VMs are listed: rarely, except while one is expected to run soon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.calls.calls import Calls
from infranetes.providers.cloud.interface import Cloud, CloudVM
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vms.ledger import Ledger
from infranetes.providers.cloud.vms.watch import Watcher
from infranetes.providers.interface import InstanceState
from infranetes_common.concurrency import start

STEP = 0.25
LAPSE = 1.5  # of the sweep's lists, until the watcher lists by itself, in `watch_seconds`


class _Cloud:
    """List its VMs. :ivar listed: when it was asked to."""

    location = "nowhere"
    looks_per_list = 0

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.vms: dict[str, CloudVM] = {}
        self.listed: list[float] = []

    def _thd_survey(self, driver: None) -> list[CloudVM]:
        return self._thd_list(driver)

    def _thd_list(self, driver: None) -> list[CloudVM]:
        self.listed.append(self._now())
        return list(self.vms.values())


class _Calls:
    """Makes calls at once. :ivar throttled: as of `Calls`."""

    throttled = 0

    async def call(self, what: str, work: Callable[[None], Any], seconds: float | None = None) -> Any:
        return work(None)


class WatcherTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.cloud = _Cloud(self.clock.seconds)
        self.settings = CloudSettings()
        self.destroyed: list[str] = []
        self.addCleanup(lambda: self.assertEqual(self.destroyed, self.lasting))
        self.lasting: list[str] = []  # VMs that are expected to exist
        self.ledger = Ledger(self.clock.seconds, self.settings.settle_seconds)
        self.watcher: Watcher[None] = Watcher(
            self.clock,
            cast(Cloud[None], self.cloud),
            self.settings,
            cast(Calls[None], _Calls()),
            self.ledger,
            lambda vm: cast(Any, vm),
            lambda vm, why: self.destroyed.append(vm.id),
        )
        running = start(self.watcher.run())
        self.addCleanup(running.cancel)
        running.addErrback(lambda failure: None)

    def booted(self, id: str, seconds: float, ended: InstanceState = InstanceState.RUNNING) -> float:
        """Boot a VM that is being waited for. Return how long it ran before that was noticed."""
        waiting = self.launched(id)
        self.pass_(seconds)
        self.change(id, ended)
        late = 0.0
        while not waiting.called:
            self.pass_(STEP)
            late += STEP
        return late

    def launched(self, id: str) -> Deferred[None]:
        """Launch a VM. The Deferred fires once it is known not to boot any more."""
        self.cloud.vms[id] = vm = CloudVM(id=id, token=id, sandbox_id="", state=InstanceState.PENDING)
        self.ledger.record_launch(vm)

        async def wait() -> None:
            with self.watcher.waiting(id) as changed:
                while self.ledger.entries[id].vm.state is InstanceState.PENDING:
                    await changed()

        return start(wait())

    def change(self, id: str, state: InstanceState) -> None:
        vm = attrs.evolve(self.cloud.vms[id], state=state, private_address="192.0.2.1")
        self.cloud.vms[id] = vm

    def pass_(self, seconds: float) -> None:
        for _ in range(int(seconds / STEP)):
            self.clock.advance(STEP)

    def lists(self) -> int:
        """Return how many lists there were since the last call of this."""
        count, self.cloud.listed = len(self.cloud.listed), []
        return count

    def test_nobody_lists_where_there_is_nothing(self) -> None:
        self.pass_(3600.0)
        self.assertEqual(self.lists(), 0)

    def test_one_that_outlives_its_end_is_destroyed_whoever_listed_it(self) -> None:
        """It is powered off; the watcher does not see the lists of the daemon's own sweep."""
        self.cloud.vms["a"] = vm = CloudVM(id="a", token="a", sandbox_id="", state=InstanceState.ENDED)
        self.ledger.record_launch(vm)
        self.ledger.record_destroyed("a", "a")
        self.pass_(self.settings.settle_seconds + STEP)
        self.ledger.record_list([vm])
        self.assertEqual((self.ledger.lasting, self.destroyed), ({"a"}, []))
        self.pass_(LAPSE * self.settings.watch_seconds)
        self.lasting = ["a"]

    def test_at_rest_the_watcher_lists_only_if_the_sweep_does_not(self) -> None:
        self.booted("a", 10.0)
        self.lists()
        self.pass_(3600.0)
        self.assertEqual(self.lists(), 3600.0 / (LAPSE * self.settings.watch_seconds))
        for _ in range(12):
            self.successResultOf(start(self.watcher.list_all()))
            self.pass_(self.settings.watch_seconds)
        self.assertEqual(self.lists(), 12)

    def test_the_first_boot_is_polled_for(self) -> None:
        self.pass_(100.0)
        self.assertLessEqual(self.booted("a", 45.0), 45.0 / 20)
        self.assertGreater(self.lists(), 20)

    def test_later_ones_once_they_may_run(self) -> None:
        self.booted("a", 45.0)
        for id in "bcd":
            self.pass_(100.0)
            self.lists()
            self.assertLessEqual(self.booted(id, 45.0), 45.0 / 20)
            self.assertLessEqual(self.lists(), 6)

    def test_one_that_is_faster_is_found_by_rare_looks_and_then_expected(self) -> None:
        self.booted("a", 60.0)
        self.pass_(100.0)
        self.assertLessEqual(self.booted("b", 20.0), self.settings.doubt_seconds)
        self.pass_(100.0)
        self.assertLessEqual(self.booted("c", 20.0), self.settings.doubt_seconds)
        self.pass_(100.0)
        self.assertLessEqual(self.booted("d", 30.0), self.settings.poll_seconds)

    def test_the_first_that_may_run_decides(self) -> None:
        self.booted("a", 45.0)
        self.pass_(100.0)
        early = self.launched("b")
        self.pass_(30.0)
        late = self.launched("c")
        self.pass_(15.0)
        self.change("b", InstanceState.RUNNING)
        self.pass_(self.settings.poll_seconds)
        self.assertTrue(early.called)
        self.assertFalse(late.called)
        self.lists()
        self.pass_(25.0)
        self.assertLessEqual(self.lists(), 2)
        self.pass_(5.0)
        self.change("c", InstanceState.RUNNING)
        self.pass_(45.0 / 20)
        self.assertTrue(late.called)

    def test_what_ends_before_it_runs_was_no_boot(self) -> None:
        self.booted("a", 45.0)
        self.pass_(100.0)
        self.assertLessEqual(self.booted("b", 5.0, InstanceState.ENDED), self.settings.doubt_seconds)
        self.pass_(100.0)
        self.lists()
        self.booted("c", 45.0)
        self.assertLessEqual(self.lists(), 10)

    def test_a_vm_that_runs_without_an_address_is_polled_for(self) -> None:
        self.booted("a", 45.0)
        vm = CloudVM(id="b", token="b", sandbox_id="", state=InstanceState.RUNNING)
        self.cloud.vms["b"] = vm
        self.ledger.record_launch(vm)
        with self.watcher.waiting("b") as changed:
            changed()
            self.pass_(100.0)
            self.lists()
            self.pass_(30.0)
            self.assertIn(self.lists(), range(6, 8))  # it is five seconds until the next

    def test_a_launch_that_fails_before_its_vm_is_seen_is_forgotten(self) -> None:
        with self.watcher.waiting("a"):
            self.pass_(20.0)
            self.assertIn("a", self.watcher._since)
        self.booted("b", 45.0)
        self.assertEqual(self.watcher._since, {})

    def test_an_hour_of_launches_is_forgotten(self) -> None:
        for number in range(30):
            id = f"vm-{number}"
            self.booted(id, 45.0)
            self.cloud.vms.pop(id)
            self.ledger.record_destroyed(id, id)
            self.pass_(20.0)
        self.assertEqual((self.watcher._since, self.watcher._changes, self.watcher._waiting), ({}, {}, []))
