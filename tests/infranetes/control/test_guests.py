# SPDX-License-Identifier: Apache-2.0
"""What is told of guests without our agent: by which way they are reached, and their state."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any, cast

from twisted.internet.defer import Deferred

from infranetes.control.service import shown_pod
from infranetes.control.usage import UsageCalls
from infranetes.cri.sandboxes import SandboxCalls
from infranetes.ctl import render
from infranetes.ctl.top import Top
from infranetes.machines.agentless.ways import PROBE_SECONDS
from infranetes.monitoring.gauges import ShownNode
from infranetes.monitoring.overview import overview
from infranetes.monitoring.page import thd_node_page
from infranetes.pods.vm.guest_view import STATUS_SECONDS
from infranetes.providers.hypervisor import GuestState, GuestStatus
from infranetes.stats.gather import Gatherer
from infranetes_common.concurrency import start
from infranetes_common.errors import Unavailable
from infranetes_common.wire import control, cri
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.machines.agentless.fakes import FakeWay
from tests.infranetes.pods.fakes import pod
from tests.infranetes.pods.features.test_guests import GuestCase, Makers

CRASHED = GuestStatus(GuestState.CRASHED, 5, 9, 134, "GuestPanicked", "the kernel has panicked")


class TwoWays(Makers):
    """Guests with two ways into them, SSH the better one."""

    def __init__(self) -> None:
        super().__init__()
        self.better, self.way = FakeWay("ssh"), FakeWay("guest-agent")

    def ways(self, *args: Any) -> Any:
        return [self.better, self.way]


class Case(GuestCase):
    def setUp(self) -> None:
        super().setUp()
        self.makers = self.world.makers = TwoWays()
        self.world.guests._makers = self.makers
        self.sandbox, self.container = self.running()

    def asked(self) -> Deferred[control.DescribePodResponse]:
        calls = self.world.description
        return start(calls.DescribePod(control.DescribePodRequest(pod=self.sandbox), NO_CALL))

    def described(self) -> control.DescribePodResponse:
        found: control.DescribePodResponse = self.successResultOf(self.asked())
        return found

    def text(self, answer: control.DescribePodResponse) -> str:
        return render.as_text("describe", answer, Namespace())

    def document(self, answer: control.DescribePodResponse) -> Any:
        return render.as_json("describe", answer, Namespace())["guest"]


class DescribeTests(Case):
    def test_the_way_that_answers_now_and_why_a_better_one_does_not(self) -> None:
        self.makers.better.answer = Unavailable("the connection is refused")
        answer = self.described()
        self.assertEqual((answer.guest.way, answer.guest.state), ("guest-agent", "running"))
        document = self.document(answer)
        self.assertEqual(document["troubles"], {"ssh": "the connection is refused"})
        self.assertEqual((document["state"], document["exit_code"]), ("running", None))
        text = self.text(answer)
        self.assertRegex(text, r"guest +running since ")
        self.assertRegex(text, r"reached +by guest-agent\n")
        self.assertRegex(text, r"not by +ssh: the connection is refused\n")
        self.assertNotIn("\nagent ", text)

    def test_where_no_way_answers_the_console_is_left(self) -> None:
        self.makers.better.answer = self.makers.way.answer = Unavailable("no answer")
        answer = self.described()
        self.assertEqual((answer.guest.way, len(answer.guest.troubles)), ("none", 2))
        self.assertIn("console alone: `kubectl attach -it`", self.text(answer))

    def test_ways_that_never_answer_are_not_waited_for_long(self) -> None:
        self.makers.better.answer, self.makers.way.answer = Deferred(), Deferred()
        asked = self.asked()
        self.assertNoResult(asked)
        self.world.clock.advance(PROBE_SECONDS + 1)
        self.assertEqual(self.successResultOf(asked).guest.way, "none")

    def test_a_guest_that_has_ended_is_not_asked(self) -> None:
        self.hypervisor.become(CRASHED)
        answer = self.described()
        self.assertEqual((self.makers.better.asked, self.makers.way.asked), (0, 0))
        document = self.document(answer)
        self.assertEqual(
            (document["state"], document["exit_code"], document["reason"]), ("crashed", 134, "GuestPanicked")
        )
        self.assertRegex(
            self.text(answer), "guest +crashed with exit code 134 since .*: GuestPanicked; the kernel has"
        )
        self.assertNotIn("reached", self.text(answer))

    def test_a_hypervisor_that_does_not_answer_is_told_in_place_of_a_state(self) -> None:
        self.hypervisor.silent = True
        answer = self.described()
        self.assertIsNone(self.document(answer)["state"])
        self.assertIn("not known: the hypervisor does not answer", self.text(answer))

    def test_nor_is_it_waited_for_long(self) -> None:
        cast(Any, self.hypervisor).status = Deferred
        asked = self.asked()
        self.assertNoResult(asked)
        self.world.clock.advance(STATUS_SECONDS)
        self.assertIn("hypervisor", self.successResultOf(asked).guest.trouble)

    def test_pods_without_a_vm_have_none(self) -> None:
        self.do(self.world.sandboxes.stop(self.sandbox))
        answer = self.described()
        self.assertFalse(answer.HasField("guest"))
        self.assertIsNone(self.document(answer))


class ListTests(Case):
    def column(self) -> str:
        calls = self.world.control
        answer = self.do(calls.ListPods(control.ListPodsRequest(), NO_CALL))
        head, row = render.as_text("pods", answer, Namespace()).splitlines()[:2]
        return row[head.index("AGENT") :].split()[0]

    def test_the_agents_column_has_the_way_that_answered_last(self) -> None:
        self.assertEqual(self.column(), "console")
        self.described()
        self.assertEqual(self.column(), "ssh")
        pod = shown_pod(
            self.world.node.providers,
            self.world.node.handlers,
            self.world.node.inventory.sandbox(self.sandbox),
        )
        self.assertEqual((pod.agent, pod.way), ("live", "ssh"))

    def test_so_has_the_nodes_page(self) -> None:
        self.described()
        shown = overview(cast(ShownNode, self.world.node), 0.0, [], [])
        self.assertIn(b">ssh</span>", thd_node_page(shown))

    def test_crictl_sees_what_is_known(self) -> None:
        node, world = self.world.node, self.world
        calls = SandboxCalls(world.clock, world.listing, node.providers, cast(Any, None), world.sandboxes, ())
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=self.sandbox, verbose=True)
        self.hypervisor.become(CRASHED)
        info = json.loads(self.do(calls.PodSandboxStatus(request, NO_CALL)).info["info"])
        self.assertEqual(
            (info["guest"]["way"], info["guest"]["state"], info["guest"]["reason"]),
            ("none", "crashed", "GuestPanicked"),
        )
        self.assertEqual(self.makers.better.asked, 0)


class TopTests(Case):
    def used(self) -> control.PodUsage:
        world = self.world
        gatherer = Gatherer(world.clock, world.listing)
        calls = UsageCalls(world.clock, world.node.inventory, world.node.providers, gatherer)
        [found] = self.do(calls.ListUsage(control.ListUsageRequest(), NO_CALL)).pods
        return cast(control.PodUsage, found)

    def row(self, used: control.PodUsage) -> str:
        top = Top()
        top.add(control.ListUsageResponse(pods=[used]))
        return top.as_text(Namespace())

    def test_what_the_hypervisor_counts_is_told(self) -> None:
        used = self.used()
        self.assertEqual((used.cpu_nanos, used.memory_bytes, used.why), (7, 100, ""))

    def test_a_guest_without_figures_says_why(self) -> None:
        async def nothing() -> None:
            raise Unavailable("it can't be measured")

        cast(Any, self.hypervisor).usage = lambda: start(nothing())
        self.world.clock.advance(1)
        self.assertIn("its hypervisor does not tell them", self.row(self.used()))
        self.hypervisor.become(GuestStatus(GuestState.PREPARED))
        self.assertIn("its guest does not execute yet", self.row(self.used()))
        self.hypervisor.silent = True
        self.assertIn("the hypervisor does not answer", self.row(self.used()))


class OwnAgentTests(GuestCase):
    """Guests with our agent, and VMs that are no guests."""

    def test_containers_pods_have_no_guest(self) -> None:
        sandbox = self.run_pod(pod("vacant"))
        calls = self.world.description
        answer = self.do(calls.DescribePod(control.DescribePodRequest(pod=sandbox), NO_CALL))
        self.assertFalse(answer.HasField("guest"))
        self.assertEqual(answer.pod.way, "")
