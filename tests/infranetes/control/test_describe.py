# SPDX-License-Identifier: Apache-2.0
"""What the daemon reports of a pod's life, and how the pod is found."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any, cast

from twisted.internet.defer import Deferred
from zope.interface import alsoProvides

from infranetes.control import describe
from infranetes.ctl import render
from infranetes.monitoring.gauges import node_gauges
from infranetes.pods.node.inventory import PAST_SANDBOXES
from infranetes.pods.node.meant import present_sandbox
from infranetes.providers.interface import ICountsRefusals, RefusedPackets, Share
from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError, InvalidArgument, NotFound, Unavailable
from infranetes_common.wire import control
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, box, pod


class DescribeTests(PodsTestCase):
    def setUp(self) -> None:
        self.world = FakeNode()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)
        self.calls = self.world.description

    def described(self, name: str) -> control.DescribePodResponse:
        answer: control.DescribePodResponse = self.do(
            self.calls.DescribePod(control.DescribePodRequest(pod=name), NO_CALL)
        )
        return answer

    def refused(self, kind: type[InfranetesError], name: str) -> str:
        asked = start(self.calls.DescribePod(control.DescribePodRequest(pod=name), NO_CALL))
        return str(self.failureResultOf(asked, kind).value)

    def text(self, answer: control.DescribePodResponse) -> str:
        return render.as_text("describe", answer, Namespace())

    def test_a_pod_is_found_by_its_names_and_its_id(self) -> None:
        sandbox = self.run_pod(pod("web"))
        self.run_pod(pod("other"))
        for name in ("default/web", "web", sandbox, sandbox[:10]):
            self.assertEqual(self.described(name).pod.id, sandbox, name)

    def test_the_beginning_of_a_name_is_enough_where_it_means_one_pod(self) -> None:
        web = self.run_pod(pod("web-7d4b9"))
        for name in ("web", "web-7", "default/web", "pod/web-7d4b9", "pods/default/web-7d4b9", "po/web"):
            self.assertEqual(self.described(name).pod.id, web, name)
        other = self.run_pod(pod("web-9c6f5"))
        self.assertRegex(self.refused(InvalidArgument, "web"), r"web-7d4b9.*web-9c6f5")
        whole = self.run_pod(pod("web"))
        self.assertEqual(self.described("web").pod.id, whole, "a whole name goes before a beginning")
        self.assertEqual(self.described("web-9").pod.id, other)
        self.do(self.world.sandboxes.stop(whole))
        self.do(self.world.sandboxes.remove(whole))
        self.assertEqual(self.described("web").pod.id, whole, "it is gone, and still what is meant")

    def test_what_is_acted_on_is_named_whole(self) -> None:
        inventory = self.world.node.inventory
        web = self.run_pod(pod("web-admin"))
        self.assertEqual(present_sandbox(inventory, "web-admin").id, web)
        self.assertEqual(present_sandbox(inventory, web[:8]).id, web)
        with self.assertRaises(NotFound):
            present_sandbox(inventory, "web")

    def test_a_misspelt_name_has_a_guess(self) -> None:
        self.run_pod(pod("frontend"))
        self.assertIn("did you mean default/frontend?", self.refused(NotFound, "fronted-x"))
        self.assertNotIn("did you mean", self.refused(NotFound, "nonsense"))

    def test_of_several_pods_none_is_meant(self) -> None:
        for namespace in ("a", "b"):
            config = pod("web")
            config.metadata.namespace = namespace
            self.run_pod(config)
        self.assertEqual(self.described("a/web").pod.namespace, "a")
        self.assertRegex(self.refused(InvalidArgument, "web"), r"a/web.*b/web")
        self.refused(InvalidArgument, "")
        self.refused(NotFound, "a/none")

    def test_of_a_pods_sandboxes_the_newest_is_meant(self) -> None:
        first = self.run_pod(pod("web"))
        self.do(self.world.sandboxes.stop(first))
        self.world.clock.advance(1)
        second = self.run_pod(pod("web", attempt=1))
        self.assertEqual(self.described("web").pod.id, second)
        self.assertEqual(self.described(first).pod.state, "stopped")

    def test_what_it_waits_for_is_said(self) -> None:
        self.world.provider.booting = Deferred()
        self.start(pod("web"))
        answer = self.described("web")
        self.assertEqual((answer.steps[-1].what, answer.steps[-1].ended_at), ("the VM starts", 0))
        self.assertIn("under way: the VM starts", self.text(answer))
        self.assertTrue(render.as_json("describe", answer, Namespace())["steps"])

    def test_containers_of_all_pods_are_listed(self) -> None:
        first, second = self.run_pod(pod("web")), self.run_pod(pod("other"))
        made = [self.do(self.world.containers.create(each, box())) for each in (first, second)]
        listed = self.all_of(self.calls.ListContainers(control.ListContainersRequest(), NO_CALL))
        found = [(each.pod.name, each.container.id) for part in listed for each in part.containers]
        self.assertEqual(found, list(zip(("web", "other"), made, strict=True)))

    def test_events_of_all_pods_are_listed_the_oldest_first(self) -> None:
        self.run_pod(pod("web"))
        self.world.clock.advance(10)
        self.world.provider.launch_error = Unavailable("no capacity in any zone")
        self.failureResultOf(self.start(pod("other")), Unavailable)
        events = self.events()
        times = [each.step.began_at for each in events]
        self.assertEqual(times, sorted(times))
        self.assertEqual({each.pod.name for each in events}, {"web", "other"})
        self.assertIn("no capacity in any zone", {each.step.error for each in events})
        self.assertEqual({each.pod.name for each in self.events(pod="web")}, {"web"})
        since = 1 + max(each.step.ended_at for each in events)
        late = self.events(since=since)  # with what is under way, whenever it began
        self.assertEqual({each.step.ended_at for each in late} - {0}, set())
        self.assertLess(len(late), len(events))
        asked = start(self.all_events(pod="nonsense"))
        self.failureResultOf(asked, NotFound)

    def test_of_many_events_the_newest_are_listed_some_in_each_message(self) -> None:
        self.patch(describe, "AT_ONCE", 2)
        self.patch(describe, "MAX_EVENTS", 5)
        for name in ("web", "other"):
            self.run_pod(pod(name))
            self.world.clock.advance(10)
        every = self.successResultOf(start(self.all_events()))
        self.assertEqual([len(part.events) for part in every], [2, 2, 1])
        self.assertEqual({each.pod.name for part in every for each in part.events}, {"other"})

    def events(self, **fields: Any) -> list[control.Event]:
        parts = self.successResultOf(start(self.all_events(**fields)))
        return [event for part in parts for event in part.events]

    async def all_events(self, **fields: Any) -> list[control.ListEventsResponse]:
        return [each async for each in self.calls.ListEvents(control.ListEventsRequest(**fields), NO_CALL)]

    def all_of(self, parts: Any) -> Any:
        async def all_parts() -> list[Any]:
            return [each async for each in parts]

        return self.do(all_parts())

    def test_what_was_refused_to_it_is_said(self) -> None:
        sandbox = self.run_pod(pod("web"))
        self.run_pod(pod("other"))
        refused = {Share.FRAGMENTS: RefusedPackets(12345, 7)}
        by_vm = {self.record(sandbox).instance_id: refused}
        provider = cast(Any, self.world.provider)
        provider.refusals = lambda id: by_vm.get(id, {})
        alsoProvides(provider, ICountsRefusals)
        answer = self.described("web")
        self.assertIn("12,345 packets beyond its share of fragments, 7 of them in the", self.text(answer))
        shown = render.as_json("describe", answer, Namespace())
        self.assertIn('"refused": {"fragments": {"total": 12345, "lately": 7}}', json.dumps(shown))
        self.assertNotIn("refused", self.text(self.described("other")))
        [gauge] = [one for one in node_gauges(self.world.shown) if one.name == "infranetes_refused_pods"]
        self.assertEqual({share: pods for (_, share), pods in gauge.values.items()},
                         {"connections": 0, "neighbours": 0, "fragments": 1})  # fmt: skip

    def test_those_that_are_gone_are_remembered_for_a_while(self) -> None:
        self.world.provider.launch_error = Unavailable("no capacity in any zone")
        self.failureResultOf(self.start(pod("first")), Unavailable)
        answer = self.described("first")
        self.assertEqual((answer.pod.state, answer.pod.message), ("failed", "no capacity in any zone"))
        self.assertIn("no capacity in any zone", self.text(answer))
        for number in range(PAST_SANDBOXES):
            self.failureResultOf(self.start(pod(f"pod-{number}")), Unavailable)
        self.assertEqual(self.described("pod-0").pod.name, "pod-0")
        self.refused(NotFound, "first")
