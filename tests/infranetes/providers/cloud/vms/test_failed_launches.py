# SPDX-License-Identifier: Apache-2.0
"""What becomes of the VMs of a launch that failed: those there at once, and those that turn up later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.annotations import Wishes
from infranetes.providers.cloud.calls.calls import Calls
from infranetes.providers.cloud.interface import Cloud, CloudError, CloudVM, ErrorKind, LaunchRequest, Offer
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vms.launch import Launcher
from infranetes.providers.cloud.vms.ledger import Ledger
from infranetes.providers.cloud.vms.watch import Watcher
from infranetes.providers.interface import InstanceSpec, InstanceState, ProviderContext
from infranetes_common.concurrency import start
from infranetes_common.identity import Identity

TOKEN, OTHER = "ab" * 16, "cd" * 16
_CERTIFICATE = "-----BEGIN CERTIFICATE-----\nYQ==\n-----END CERTIFICATE-----\n"
_KEY = "-----BEGIN PRIVATE KEY-----\nYQ==\n-----END PRIVATE KEY-----\n"
SPEC = InstanceSpec(TOKEN, "pod", "cluster", "node", Identity("pod", _CERTIFICATE, _KEY, _CERTIFICATE))


def vm(id: str, token: str = TOKEN) -> CloudVM:
    return CloudVM(id=id, token=token, sandbox_id="pod", state=InstanceState.RUNNING)


class _Cloud:
    """A cloud that shows the VMs that a test gives it.

    :ivar vms: by id. :ivar hidden: ids that neither lists nor searches show yet.
    :ivar launches: what each of the next launches comes to. :ivar numbers: of the launches so far.
    """

    name = location = "nowhere"
    looks_per_list = 0
    offers = (Offer("small", 1000, 1 << 40),)

    def __init__(self) -> None:
        self.vms: dict[str, CloudVM] = {}
        self.hidden: set[str] = set()
        self.launches: list[CloudVM | CloudError] = []
        self.numbers: list[int] = []

    def check_wishes(self, wishes: Wishes) -> None:
        pass

    def zones(self, wishes: Wishes, within: str = "") -> Sequence[str]:
        return ("",)

    def _thd_launch(self, driver: None, request: LaunchRequest) -> CloudVM:
        self.numbers.append(request.number)
        outcome = self.launches.pop(0)
        if isinstance(outcome, CloudError):
            raise outcome
        self.vms[outcome.id] = outcome
        return outcome

    def _thd_find(self, driver: None, token: str) -> list[CloudVM]:
        return [each for each in self._thd_list(driver) if each.token == token]

    def _thd_list(self, driver: None) -> list[CloudVM]:
        return [each for id, each in self.vms.items() if id not in self.hidden]


class _Calls:
    """Makes calls at once. :ivar made: what they were for. :ivar failing: the errors of the calls with these
    words. :ivar throttled: as of `Calls`."""

    throttled = 0

    def __init__(self) -> None:
        self.made: list[str] = []
        self.failing: dict[str, CloudError] = {}

    async def call(self, what: str, work: Callable[[None], Any], *_: object, **__: object) -> Any:
        self.made.append(what)
        for words, error in self.failing.items():
            if words in what:
                raise error
        return work(None)


class LaunchCase(SynchronousTestCase):
    """A launcher and a watcher of a cloud, on a virtual clock."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.settings = CloudSettings()
        self.cloud, self.calls = _Cloud(), _Calls()
        self.ledger = Ledger(self.clock.seconds, self.settings.settle_seconds)
        self.destroyed: list[str] = []
        cloud, calls = cast(Cloud[None], self.cloud), cast(Calls[None], self.calls)
        context = ProviderContext(Path("/nonexistent"), Path("/nonexistent"), "cluster", "node")
        self.watcher: Watcher[None] = Watcher(
            self.clock, cloud, self.settings, calls, self.ledger, lambda vm: cast(Any, vm), self.destroy
        )
        self.launcher: Launcher[None] = Launcher(
            self.clock, cloud, self.settings, context, calls, self.ledger, self.watcher.waiting,
            self.watcher.launching, self.watcher.unwanted, self.destroy_now,
        )  # fmt: skip
        running = start(self.watcher.run())
        running.addErrback(lambda failure: None)
        self.addCleanup(running.cancel)

    def destroy(self, vm: CloudVM, why: str) -> None:
        self.destroyed.append(vm.id)
        del self.cloud.vms[vm.id]
        self.ledger.record_destroyed(vm.id, vm.token)

    async def destroy_now(self, vm: CloudVM) -> None:
        self.destroy(vm, "its launch failed")

    def launch(self, outcome: CloudVM | CloudError) -> Deferred[CloudVM]:
        self.cloud.launches.append(outcome)
        return start(self.launcher.launch(SPEC))

    def launch_fails(self, kind: ErrorKind = ErrorKind.TRANSIENT) -> None:
        error = CloudError(kind, "no answer")
        self.assertIs(self.failureResultOf(self.launch(error), CloudError).value, error)


class FailedLaunchTests(LaunchCase):
    def test_what_it_left_is_destroyed_at_once_and_nothing_else(self) -> None:
        self.cloud.vms = {each.id: each for each in (vm("a"), vm("b"), vm("other", OTHER))}
        self.launch_fails()
        self.assertEqual(self.destroyed, ["a", "b"])

    def test_what_turns_up_later_is_destroyed_and_nothing_else(self) -> None:
        self.cloud.vms = {each.id: each for each in (vm("late"), vm("other", OTHER))}
        self.cloud.hidden = {"late"}
        self.launch_fails()
        self.clock.advance(self.settings.settle_seconds - self.settings.doubt_seconds)
        self.assertEqual(self.destroyed, [])
        self.cloud.hidden.clear()
        self.clock.advance(self.settings.doubt_seconds)
        self.assertEqual(self.destroyed, ["late"])

    def test_what_could_not_be_found_or_destroyed_is_destroyed_by_a_later_list(self) -> None:
        self.cloud.vms["a"] = vm("a")
        self.calls.failing["find what"] = CloudError(ErrorKind.THROTTLED, "slow down")
        self.launch_fails()
        self.assertEqual(self.destroyed, [])
        self.clock.advance(self.settings.doubt_seconds)
        self.assertEqual(self.destroyed, ["a"])

    def test_nobody_looks_for_what_was_refused_as_invalid(self) -> None:
        self.launch_fails(ErrorKind.INVALID)
        self.assertEqual(self.calls.made, ["launch a small"])

    def test_the_vm_of_the_next_launch_with_its_token_is_wanted(self) -> None:
        self.launch_fails()
        launched = self.successResultOf(self.launch(vm("second")))
        self.assertEqual(launched.id, "second")
        self.clock.advance(self.settings.doubt_seconds)
        self.assertEqual(self.destroyed, [])

    def test_one_that_turned_up_and_is_then_asked_for_again_is_wanted(self) -> None:
        """A list that somebody else asked for shows it before the watcher's own does."""
        self.cloud.vms["late"] = vm("late")
        self.cloud.hidden = {"late"}
        self.launch_fails()
        self.cloud.hidden.clear()
        self.ledger.record_list(self.cloud._thd_list(None))
        launched = self.successResultOf(self.launch(vm("second")))
        self.assertEqual(launched.id, "late")
        self.clock.advance(self.settings.doubt_seconds)
        self.assertEqual(self.destroyed, [])

    def test_the_next_launch_does_not_use_the_number_of_one_that_was_destroyed(self) -> None:
        """A cloud may answer a launch with an earlier one's key with the VM that ended."""
        self.cloud.vms["a"] = vm("a")
        self.launch_fails()
        self.successResultOf(self.launch(vm("second")))
        self.assertEqual(self.cloud.numbers, [0, 1])

    def test_nothing_is_remembered_for_ever(self) -> None:
        self.launch_fails()
        self.clock.advance(self.settings.settle_seconds + 2 * self.settings.doubt_seconds)
        self.clock.advance(self.settings.doubt_seconds)
        self.assertEqual(self.watcher.unwanted, {})
        self.cloud.vms["mine"] = vm("mine")
        self.ledger.record_launch(self.cloud.vms["mine"])
        self.clock.advance(self.settings.doubt_seconds)
        self.assertEqual(self.destroyed, [])
