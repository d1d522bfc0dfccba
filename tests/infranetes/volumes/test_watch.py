# SPDX-License-Identifier: Apache-2.0
"""When a carried volume is compared: when the node's side changes or the VM reports, until it is gone."""

from __future__ import annotations

from typing import cast

from twisted.internet.defer import Deferred, fail, succeed

from infranetes.pods.node.inventory import Sandbox
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.mounts import Source
from infranetes.volumes.sync import VolumeSync
from infranetes.volumes.volume import Volume
from infranetes.volumes.watch import AGAIN_SECONDS, RETRY_SECONDS, VolumeWatch
from infranetes_common.errors import FailedPrecondition, Unavailable
from tests.infranetes.volumes.carrying_case import BOUNDS, CarryingCase, Heard

INTERVAL = 1.0


class _Sync:
    """Notes which volumes are compared, and what is looked at. :ivar looks: what the next looks come to."""

    bounds = BOUNDS

    def __init__(self) -> None:
        self.compared: list[str] = []
        self.looked: list[str] = []
        self.looks: list[Deferred[bool]] = []
        self.busy: Deferred[None] = succeed(None)

    def at_source(self, source: Source, work: object, bounds: object) -> Deferred[bool]:
        self.looked.append(source.path)
        return self.looks.pop(0) if self.looks else succeed(False)

    async def try_sync(self, sandbox: Sandbox, volume: Volume) -> None:
        self.compared.append(volume.source.path)
        await self.busy
        volume.due = volume.unsure = False


class WatchTests(CarryingCase):
    def setUp(self) -> None:
        super().setUp()
        self.sync = _Sync()
        self.volumes: dict[str, dict[str, Volume]] = {"s1": {}}
        self.a, self.b = self.new("/a"), self.new("/b")
        self.watch = VolumeWatch(self.clock, cast(VolumeSync, self.sync), self.volumes, INTERVAL)
        self.addCleanup(self.watch.stop)

    def new(self, path: str, *, writable: bool = False) -> Volume:
        made = Volume(Source(path, False, False), MountTable())
        made.writable, made.due, made.containers = writable, False, {"c1"}
        self.volumes["s1"][made.source.id] = made
        return made

    def compared(self) -> list[str]:
        """Return which volumes were compared since the last call of this."""
        found, self.sync.compared = self.sync.compared, []
        return found

    def pass_(self, seconds: float = INTERVAL) -> None:
        self.clock.advance(seconds)

    # The node's side

    def test_each_is_looked_at_in_each_interval_and_compared_if_it_has_changed(self) -> None:
        for _ in range(2):
            self.watch.watch(self.sandbox)
        self.pass_(INTERVAL - 0.1)
        self.assertEqual(self.sync.looked, [])
        self.pass_(0.1)
        self.assertEqual((self.sync.looked, self.compared()), (["/a", "/b"], []))
        self.sync.looks = [succeed(True)]
        self.pass_()
        self.assertEqual(self.compared(), ["/a"])
        self.pass_()
        self.assertEqual((len(self.sync.looked), self.compared()), (6, []))

    def test_one_that_is_due_or_may_be_lost_is_compared_without_a_look(self) -> None:
        self.watch.watch(self.sandbox)
        self.a.due, self.b.unsure = True, True
        self.pass_()
        self.assertEqual((self.sync.looked, self.compared()), ([], ["/a", "/b"]))

    def test_one_that_can_not_be_looked_at_is_compared_which_tells_why(self) -> None:
        self.watch.watch(self.sandbox)
        for error in (FailedPrecondition("gone"), OSError(5, "Input/output error")):
            self.sync.looks = [fail(error)]
            self.pass_()
            self.assertEqual(self.compared(), ["/a"])

    def test_none_is_looked_at_while_the_agent_is_away(self) -> None:
        self.watch.watch(self.sandbox)
        self.a.due = True
        for heard in (Heard(live=False), None):
            self.fake.watch = heard
            self.pass_()
            self.assertEqual((self.sync.looked, self.compared()), ([], []))
        self.fake.watch = Heard()
        self.pass_()
        self.assertEqual(self.compared(), ["/a"])

    def test_one_that_is_being_looked_at_or_compared_is_left_alone_and_holds_up_no_other(self) -> None:
        self.watch.watch(self.sandbox)
        hanging: Deferred[bool] = Deferred()
        self.sync.looks = [hanging]
        for _ in range(3):
            self.pass_()
        self.assertEqual(self.sync.looked, ["/a", "/b", "/b", "/b"])
        hanging.callback(False)
        self.successResultOf(self.b.lock.acquire())
        self.pass_()
        self.assertEqual(self.sync.looked[4:], ["/a"])
        self.b.lock.release()
        self.pass_()
        self.assertEqual(self.sync.looked[5:], ["/a", "/b"])

    def test_one_that_no_container_has_any_more_is_not_compared(self) -> None:
        self.watch.watch(self.sandbox)
        self.a.due, self.a.containers = True, set()
        self.pass_()
        self.assertEqual(self.compared(), [])

    # The VM's side

    def test_the_vm_reports_those_that_may_be_written_to(self) -> None:
        self.a.writable = True
        self.watch.watch(self.sandbox)
        self.assertEqual(self.agent.watched, (self.a.source.id,))
        for told, compared in ((self.a.source.id, ["/a"]), ("unknown", []), (self.a.source.id, ["/a"])):
            self.agent.reports.put(told)
            self.pass_(AGAIN_SECONDS)
            self.assertEqual(self.compared(), compared)

    def test_one_that_reports_without_end_is_compared_now_and_then(self) -> None:
        self.a.writable = True
        self.watch.watch(self.sandbox)
        self.pass_(100.0)
        for _ in range(40):
            self.agent.reports.put(self.a.source.id)
        self.assertEqual(self.compared(), ["/a"], "the first one at once")
        for _ in range(100):
            self.pass_(AGAIN_SECONDS / 10)
        self.assertEqual(self.compared(), ["/a"] * 10)

    def test_without_any_the_vm_is_not_asked(self) -> None:
        self.watch.watch(self.sandbox)
        self.pass_(10.0)
        self.assertEqual(self.agent.calls, [])

    def test_a_call_that_ends_is_made_again(self) -> None:
        self.a.writable = True
        self.fake.watch = None
        self.watch.watch(self.sandbox)
        for heard, client in ((None, self.agent), (Heard(live=False), self.agent), (Heard(), None)):
            self.fake.watch, self.fake.client = heard, client
            self.pass_(RETRY_SECONDS)
            self.assertEqual(self.agent.calls, [])
        self.fake.client = self.agent
        self.pass_(RETRY_SECONDS)
        self.assertEqual(self.agent.calls, ["watch"])
        self.agent.reports.put(Unavailable("the connection is lost"))
        self.assertIsNone(self.agent.watched)
        self.pass_(RETRY_SECONDS)
        self.assertEqual((self.agent.calls, self.agent.watched), (["watch"] * 2, (self.a.source.id,)))

    def test_one_that_comes_later_is_reported_too(self) -> None:
        self.watch.watch(self.sandbox)
        self.a.writable = True
        self.watch.watch(self.sandbox)
        self.assertEqual(self.agent.watched, (self.a.source.id,))
        self.watch.watch(self.sandbox)
        self.assertEqual(self.agent.calls, ["watch"])
        self.b.writable = True
        self.watch.watch(self.sandbox)
        self.assertEqual(self.agent.watched, tuple(sorted((self.a.source.id, self.b.source.id))))
        self.assertEqual(self.agent.watching, 1, "the call that watched fewer is over")
        self.pass_()
        self.assertEqual(self.sync.looked, ["/a", "/b"], "and the node's side is looked at as before")

    # The end

    def test_nothing_goes_on_once_the_sandbox_is_forgotten(self) -> None:
        self.a.writable = True
        self.watch.watch(self.sandbox)
        hanging: Deferred[bool] = Deferred()
        self.sync.looks = [hanging]
        self.pass_()
        self.sync.busy = Deferred()
        comparing = self.watch.compare(self.sandbox, self.b)
        for _ in range(2):
            self.watch.forget("s1")
        self.assertTrue(hanging.called, "the look is given up")
        self.successResultOf(comparing)
        self.assertFalse(self.a.being_checked)
        self.assertIsNone(self.agent.watched)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertEqual(self.flushLoggedErrors(), [])
        self.watch.watch(self.sandbox)
        self.assertEqual(self.agent.watched, (self.a.source.id,), "it may be watched again")

    def test_the_vms_call_ends_while_a_volume_that_it_reported_is_compared(self) -> None:
        self.a.writable = True
        self.watch.watch(self.sandbox)
        self.sync.busy = Deferred()
        self.agent.reports.put(self.a.source.id)
        self.pass_(AGAIN_SECONDS)
        self.assertEqual(self.compared(), ["/a"])
        self.watch.forget("s1")
        self.assertEqual((self.agent.watching, self.watch._watched, self.watch._loops), (0, {}, {}))

    def test_nothing_begins_once_the_daemon_stops(self) -> None:
        self.a.writable = True
        self.watch.watch(self.sandbox)
        self.watch.stop()
        self.watch.watch(self.sandbox)
        self.assertEqual((self.clock.getDelayedCalls(), self.agent.watched), ([], None))

    def test_a_sandbox_without_volumes_costs_nothing(self) -> None:
        self.volumes["s1"].clear()
        self.watch.watch(self.sandbox)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_comparison_that_is_asked_for_ends_when_it_is_done_and_is_kept_no_longer(self) -> None:
        self.sync.busy = Deferred()
        comparing = self.watch.compare(self.sandbox, self.a)
        self.assertNoResult(comparing)
        self.sync.busy.callback(None)
        self.successResultOf(comparing)
        self.assertEqual((self.compared(), self.watch._checks), (["/a"], {"s1": set()}))
