# SPDX-License-Identifier: Apache-2.0
"""The end of a VM is noticed within a minute, and few looks are made while nothing is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.calls.calls import Calls
from infranetes.providers.cloud.interface import Cloud, CloudError, CloudVM, ErrorKind
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vms.ledger import Ledger
from infranetes.providers.cloud.vms.watch import Watcher
from infranetes.providers.interface import Instance, InstanceState
from infranetes_common.concurrency import start

STEP = 0.25
MINUTE = 60.0
LAG = 30.0  # how old a cloud's answers may be
KEEPALIVE = 40.0  # after which the silence of a VM that has vanished breaks its agent's connection


class _Cloud:
    """Tells of VMs as they were `lag` seconds ago.

    :ivar looks: what it was asked, and when. :ivar refusals: how many of the next looks it refuses.
    :ivar broken: whether it answers none."""

    name = location = "nowhere"

    def __init__(self, now: Callable[[], float], looks_per_list: int) -> None:
        self._now = now
        self.looks_per_list = looks_per_list
        self.lag = 0.0
        self.refusals = 0
        self.broken = False
        self.clock = 0.0  # when it says that VMs are made
        self.looks: list[tuple[str, float]] = []
        self._was: dict[str, list[tuple[float, CloudVM | None]]] = {}

    def change(self, id: str, state: InstanceState | None) -> None:
        """Have a VM be in another state from now on; None: it is gone."""
        vm = (
            None
            if state is None
            else CloudVM(id, id, id, state, private_address="192.0.2.1", created_at=self.clock)
        )
        self._was.setdefault(id, []).append((self._now(), vm))

    def _shown(self, id: str) -> CloudVM | None:
        at = self._now() - self.lag
        return next((vm for since, vm in reversed(self._was.get(id, [])) if since <= at), None)

    def _asked(self, what: str) -> None:
        self.looks.append((what, self._now()))
        if self.broken:
            raise CloudError(ErrorKind.TRANSIENT, "no answer")

    def _thd_survey(self, driver: None) -> list[CloudVM]:
        return self._thd_list(driver)

    def _thd_list(self, driver: None) -> list[CloudVM]:
        self._asked("list")
        return [vm for id in self._was if (vm := self._shown(id)) is not None]

    def _thd_get(self, driver: None, id: str) -> CloudVM | None:
        self._asked(id)
        return self._shown(id)


class _Calls:
    """Makes calls at once, after the cloud's refusals."""

    def __init__(self, cloud: _Cloud) -> None:
        self._cloud = cloud
        self.throttled = 0

    async def call(self, what: str, work: Callable[[None], Any], seconds: float | None = None) -> Any:
        self.throttled, self._cloud.refusals = self.throttled + self._cloud.refusals, 0
        return work(None)


class EndsCase(SynchronousTestCase):
    """Thirty VMs that run, and whose agents are heard."""

    looks_per_list = 0
    agentless = False

    def setUp(self) -> None:
        self.clock = Clock()
        self.cloud = _Cloud(self.clock.seconds, self.looks_per_list)
        self.settings = CloudSettings()
        self.ledger = Ledger(self.clock.seconds, self.settings.settle_seconds)
        self.watcher: Watcher[None] = Watcher(
            self.clock,
            cast(Cloud[None], self.cloud),
            self.settings,
            cast(Calls[None], _Calls(self.cloud)),
            self.ledger,
            lambda vm: cast(Any, vm),
            lambda vm, why: self.fail(f"{vm} is destroyed: {why}"),
            is_agentless=lambda vm: self.agentless,
        )
        self.ended: dict[str, float] = {}
        self.watcher.watchers.append(self._ended)
        running = start(self.watcher.run())
        running.addErrback(lambda failure: None)
        self.addCleanup(running.cancel)
        self.ids = [f"vm-{number}" for number in range(30)]
        for id in self.ids:
            self.cloud.change(id, InstanceState.RUNNING)
        self.successResultOf(start(self.watcher.list_all()))
        for id in self.ids:
            self.watcher.hear(id, True)
        self.pass_(200.0)
        self.cloud.looks.clear()

    def _ended(self, instance: Instance) -> None:
        self.assertNotIn(instance.id, self.ended)
        self.ended[instance.id] = self.clock.seconds()

    def pass_(self, seconds: float) -> None:
        for _ in range(int(seconds / STEP)):
            self.clock.advance(STEP)

    def noticed(self, id: str, silent_after: float, state: InstanceState | None) -> float:
        """End a VM, and return how long it took until that was noticed.

        :param silent_after: when its agent's connection breaks. :param state: that the cloud shows."""
        began = self.clock.seconds()
        self.cloud.change(id, state)
        self.pass_(silent_after)
        self.watcher.hear(id, False)
        self.pass_(200.0)
        self.assertEqual(list(self.ended), [id])
        return self.ended[id] - began


class ListedEndsTests(EndsCase):
    """Where a list costs no more than a look at one VM."""

    def test_while_all_agents_are_heard_there_are_no_looks_but_the_lists_at_rest(self) -> None:
        self.pass_(3600.0)
        self.assertLessEqual(len(self.cloud.looks), 8)

    def test_one_that_is_switched_off(self) -> None:
        self.assertLessEqual(self.noticed("vm-3", 1.0, InstanceState.ENDED), 5.0)

    def test_one_that_vanishes_without_a_word(self) -> None:
        self.assertLessEqual(self.noticed("vm-3", KEEPALIVE, InstanceState.ENDED), MINUTE)

    def test_one_that_the_cloud_forgets(self) -> None:
        self.assertLessEqual(self.noticed("vm-3", 1.0, None), MINUTE)

    def test_answers_that_lag(self) -> None:
        self.cloud.lag = LAG
        self.assertLessEqual(self.noticed("vm-3", 1.0, InstanceState.ENDED), MINUTE)

    def test_answers_that_lag_about_one_that_vanishes(self) -> None:
        self.cloud.lag = LAG
        self.assertLessEqual(self.noticed("vm-3", KEEPALIVE, InstanceState.ENDED), MINUTE)

    def test_one_whose_agent_alone_has_ended_lives_on_and_its_end_is_noticed_later(self) -> None:
        self.watcher.hear("vm-3", False)
        self.pass_(3600.0)
        self.assertEqual(self.ended, {})
        self.assertLessEqual(len(self.cloud.looks), 3600.0 / self.settings.doubt_seconds + 15)
        self.assertLessEqual(self.noticed("vm-3", 0.0, InstanceState.ENDED), MINUTE)

    def test_an_agent_that_is_heard_again_ends_the_looks(self) -> None:
        self.watcher.hear("vm-3", False)
        self.pass_(2.0)
        self.watcher.hear("vm-3", True)
        self.pass_(100.0)
        self.assertEqual(self.cloud.looks, [])

    def test_silence_before_the_first_list_is_remembered(self) -> None:
        """After a restart the daemon asks the agents while the provider starts."""
        self.cloud.change("other", InstanceState.RUNNING)
        self.watcher.hear("other", False)
        self.watcher.hear("gone", False)
        self.successResultOf(start(self.watcher.list_all()))
        self.assertEqual(("other" in self.watcher.doubts, "gone" in self.watcher.doubts), (True, False))
        self.watcher.hear("other", True)
        self.successResultOf(start(self.watcher.list_all()))
        self.assertNotIn("other", self.watcher.doubts)

    def test_clocks_apart_change_nothing(self) -> None:
        """The cloud's clock is an hour ahead, or behind, and says when a VM was made."""
        for id, ahead in (("early", -3600.0), ("late", 3600.0)):
            self.ended.clear()
            self.cloud.clock = self.clock.seconds() + ahead
            self.cloud.change(id, InstanceState.RUNNING)
            self.successResultOf(start(self.watcher.list_all()))
            self.watcher.hear(id, True)
            self.pass_(30.0)
            self.assertLessEqual(self.noticed(id, 1.0, InstanceState.ENDED), 5.0)

    def test_all_at_once_are_noticed_by_a_few_lists(self) -> None:
        for id in self.ids:
            self.cloud.change(id, InstanceState.ENDED)
            self.watcher.hear(id, False)
        self.pass_(5.0)
        self.assertEqual(set(self.ended), set(self.ids))
        self.assertEqual([what for what, _ in self.cloud.looks], ["list"])

    def test_silence_of_a_vm_that_is_not_known_or_has_ended_is_ignored(self) -> None:
        self.noticed("vm-3", 0.0, InstanceState.ENDED)
        self.cloud.looks.clear()
        for id in ("vm-3", "another's", "../etc"):
            self.watcher.hear(id, False)
        self.pass_(100.0)
        self.assertIn([what for what, _ in self.cloud.looks], ([], ["list"]))  # the list is at rest

    def test_while_the_cloud_does_not_answer_it_is_asked_again_but_not_all_the_time(self) -> None:
        self.cloud.broken = True
        self.cloud.change("vm-3", InstanceState.ENDED)
        self.watcher.hear("vm-3", False)
        self.pass_(600.0)
        self.assertEqual(self.ended, {})
        self.assertLessEqual(len(self.cloud.looks), 30)
        self.cloud.broken = False
        self.pass_(MINUTE)
        self.assertEqual(list(self.ended), ["vm-3"])

    def test_refusals_make_looks_rarer_and_the_end_is_noticed_all_the_same(self) -> None:
        self.watcher.hear("vm-3", False)
        self.pass_(100.0)
        self.cloud.looks.clear()
        for _ in range(20):
            self.cloud.refusals = 1
            self.pass_(MINUTE)
        self.assertLessEqual(len(self.cloud.looks), 20)
        self.cloud.change("vm-3", InstanceState.ENDED)
        self.pass_(300.0)
        self.assertEqual(list(self.ended), ["vm-3"])


class SingleLooksTests(ListedEndsTests):
    """Where a list costs as much as three looks at one VM."""

    looks_per_list = 3

    def test_only_the_silent_one_is_looked_at(self) -> None:
        self.noticed("vm-3", 1.0, InstanceState.ENDED)
        self.assertEqual({what for what, _ in self.cloud.looks} - {"list"}, {"vm-3"})

    def test_one_that_boots_is_looked_at_alone_and_less_and_less_often(self) -> None:
        self.cloud.change("new", InstanceState.PENDING)
        vm = cast(CloudVM, self.cloud._thd_get(None, "new"))
        self.ledger.record_launch(vm)
        self.cloud.looks.clear()
        with self.watcher.waiting("new") as changed:
            changed()
            self.pass_(MINUTE)
            looks = [at for what, at in self.cloud.looks if what == "new"]
            self.cloud.change("new", InstanceState.RUNNING)
            self.pass_(MINUTE / 10)
        self.assertIs(self.ledger.entries["new"].vm.state, InstanceState.RUNNING)
        self.assertLessEqual(len(looks), 27)
        self.assertGreater(looks[-1] - looks[-2], 4.0)

    def test_one_that_cannot_be_told_of_is_told_of_later(self) -> None:
        """Nova's answer for a VM in a cell that is out of reach."""
        told = self.cloud._thd_get

        def untold(driver: None, id: str) -> CloudVM | None:
            told(driver, id)
            raise CloudError(ErrorKind.STATE, "its cell is out of reach")

        self.cloud._thd_get = untold  # type: ignore[method-assign]
        self.cloud.change("vm-3", None)
        self.watcher.hear("vm-3", False)
        self.pass_(MINUTE)
        self.assertEqual(self.ended, {})
        self.cloud._thd_get = told  # type: ignore[method-assign]
        self.pass_(2 * self.settings.doubt_seconds + 5.0)
        self.assertEqual(list(self.ended), ["vm-3"])


class AgentlessEndsTests(EndsCase):
    """Of VMs without an agent, whose silence says nothing."""

    agentless = True

    def test_they_are_noticed_by_lists(self) -> None:
        began = self.clock.seconds()
        self.cloud.lag = LAG
        self.cloud.change("vm-3", InstanceState.ENDED)
        self.pass_(MINUTE + 5.0)
        self.assertEqual(list(self.ended), ["vm-3"])
        self.assertLessEqual(self.ended["vm-3"] - began, MINUTE)

    def test_refusals_stretch_the_lists(self) -> None:
        self.pass_(600.0)
        at_first = len(self.cloud.looks)
        self.cloud.looks.clear()
        for _ in range(10):
            self.cloud.refusals = 2
            self.pass_(MINUTE)
        self.assertLess(len(self.cloud.looks), at_first / 2)
