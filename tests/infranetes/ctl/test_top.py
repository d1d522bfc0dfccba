# SPDX-License-Identifier: Apache-2.0
"""What pods use, computed from samples."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.control.usage import UsageCalls
from infranetes.ctl.cli import read
from infranetes.ctl.top import Top, size
from infranetes.stats.gather import Gatherer
from infranetes_common.wire import control, vmserver
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, pod

SECOND = 10**9


def usage(name: str, at: int, **fields: Any) -> control.PodUsage:  # Any: of the message
    return control.PodUsage(
        id=name, namespace="default", name=name, vm_id=f"vm-{name}", measured_at=at * SECOND, **fields
    )


class TopTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.top = Top()

    def add(self, *pods: control.PodUsage) -> None:
        self.top.add(control.ListUsageResponse(pods=pods))

    def test_what_is_used_is_what_counters_have_grown_by_in_a_second(self) -> None:
        self.add(usage("a", 10, cpu_nanos=SECOND, received_bytes=1000, sent_bytes=0))
        self.add(usage("a", 12, cpu_nanos=4 * SECOND, received_bytes=5000, sent_bytes=10))
        (used,) = self.top.uses
        self.assertEqual((used.cpu, used.received, used.sent), (1.5, 2000.0, 5.0))

    def test_the_busiest_is_the_first_and_what_says_nothing_the_last(self) -> None:
        silent = usage("silent", 0, agent="unreachable")
        idle, busy = usage("idle", 1, nano_cores=0), usage("busy", 1, nano_cores=SECOND)
        self.add(silent, idle, busy)
        self.assertEqual([each.pod.name for each in self.top.uses], ["busy", "idle", "silent"])
        words = self.top.as_text(read(["top"]))
        self.assertIn("it is unreachable", words)
        self.assertIn("2 pods: 1.00 CPUs", words)

    def test_a_vm_that_was_rebooted_begins_anew(self) -> None:
        self.add(usage("a", 10, cpu_nanos=900 * SECOND, received_bytes=10**9, sent_bytes=10**9))
        self.add(usage("a", 11, cpu_nanos=SECOND, received_bytes=7, sent_bytes=8))
        (used,) = self.top.uses
        self.assertEqual((used.cpu, used.received, used.sent), (1.0, 7.0, 8.0))

    def test_the_same_sample_again_changes_nothing(self) -> None:
        self.add(usage("a", 10, cpu_nanos=0))
        self.add(usage("a", 11, cpu_nanos=SECOND))
        before = self.top.as_json()
        self.add(usage("a", 11, cpu_nanos=SECOND))
        self.assertEqual(self.top.as_json(), before)

    def test_without_pods_there_is_a_sentence(self) -> None:
        self.add()
        self.assertIn("no pod has figures", self.top.as_text(read(["top"])))
        self.assertEqual(self.top.as_json(), {"pods": []})

    def test_sizes_are_short(self) -> None:
        given = (0, 1023, 1024, 1536 * 1024, 5 << 30, 7 << 40, 9 << 60)
        self.assertEqual(
            [size(each) for each in given],
            ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5.0 GiB", "7.0 TiB", "9437184.0 TiB"],
        )


class UsageTests(PodsTestCase):
    def setUp(self) -> None:
        self.world = FakeNode()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)
        self.calls = UsageCalls(
            self.world.clock,
            self.world.node.inventory,
            self.world.node.providers,
            Gatherer(self.world.clock, self.world.listing),
        )

    def used(self) -> list[control.PodUsage]:
        return list(self.do(self.calls.ListUsage(control.ListUsageRequest(), NO_CALL)).pods)

    def test_pods_that_are_ready_are_told_with_their_figures(self) -> None:
        sandbox = self.run_pod(pod("web"))
        self.do(self.world.sandboxes.stop(self.run_pod(pod("stopped"))))
        most = (1 << 64) - 1  # agents may send any value
        cards = [vmserver.NetworkCard(received_bytes=most, sent_bytes=1) for _ in range(2)]
        machine = vmserver.Usage(time_nanos=5, cpu=vmserver.Cpu(total_nanos=7))

        async def stats(within: float) -> vmserver.StatsResponse:
            return vmserver.StatsResponse(machine=machine, cards=cards)

        vars(self.world.agents[sandbox])["stats"] = stats
        (one,) = self.used()
        self.assertEqual((one.id, one.name, one.measured_at, one.cpu_nanos), (sandbox, "web", 5, 7))
        self.assertEqual((one.received_bytes, one.sent_bytes), (most, 2))
