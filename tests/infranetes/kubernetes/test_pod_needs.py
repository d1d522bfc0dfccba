# SPDX-License-Identifier: Apache-2.0
"""What a pod requests: the scheduler's rule, and answers that are missing or can't be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.kubernetes.api_server import ApiServer
from infranetes.kubernetes.fields import Fields
from infranetes.kubernetes.pod_needs import ANSWER_SECONDS, MAX_POD, ApiServerNeeds, needs
from infranetes_common.concurrency import deferred, start
from infranetes_common.errors import InvalidArgument
from infranetes_common.quantities import Needs
from infranetes_common.reactors import installed
from tests.infranetes.kubernetes.api_server import Json, SimulatedApiServer
from tests.support.waiting import until

reactor = installed()
GIB = 1 << 30
PATH = "/api/v1/namespaces/shop/pods/web"


def container(request: int = 0, limit: int = 0, sidecar: bool = False) -> Json:
    """Return a container of a Pod object, with this memory request and limit; 0 leaves one out."""
    said = {key: {"memory": str(value)} for key, value in (("requests", request), ("limits", limit)) if value}
    return {"resources": said, **({"restartPolicy": "Always"} if sidecar else {})}


def pod(*containers: Json, before: tuple[Json, ...] = (), whole: Json | None = None) -> Json:
    """Return a Pod. :param before: its init containers. :param whole: the resources at pod level."""
    about = {"namespace": "shop", "name": "web", "uid": "u-1"}
    spec = {"containers": list(containers), "initContainers": list(before), "resources": whole or {}}
    return {"metadata": about, "spec": spec}


def memory(item: Json) -> int:
    return needs(Fields(item, "Pod")).memory_bytes


ONE = st.builds(
    lambda request, more: (request, request + more if more else 0), st.integers(0, 9), st.integers(0, 9)
)
INIT = st.tuples(ONE, st.booleans())


class RuleTests(SynchronousTestCase):
    def test_containers_are_summed_each_by_the_larger_of_request_and_limit(self) -> None:
        self.assertEqual(memory(pod(container(GIB, 2 * GIB), container(3 * GIB))), 5 * GIB)
        self.assertEqual(memory(pod(container(), container(limit=GIB))), GIB)
        self.assertEqual(needs(Fields(pod(container()), "Pod")), Needs())

    def test_quantities_and_resources_are_told_apart(self) -> None:
        item = pod({"resources": {"requests": {"cpu": "1500m", "memory": "8Gi", "example.org/gpu": "1"}}})
        self.assertEqual(needs(Fields(item, "Pod")), Needs(1500, 8 * GIB))

    def test_the_largest_init_container_counts_with_the_sidecars_before_it(self) -> None:
        large, sidecar = container(4), container(1, sidecar=True)
        self.assertEqual(memory(pod(container(2), before=(large,))), 4)
        self.assertEqual(memory(pod(container(2), before=(large, sidecar))), 4)
        self.assertEqual(memory(pod(container(2), before=(sidecar, large))), 5)
        self.assertEqual(memory(pod(container(4), before=(sidecar, large))), 5)
        self.assertEqual(memory(pod(container(5), before=(sidecar, large))), 6)

    def test_what_is_said_of_the_pod_as_a_whole(self) -> None:
        cases: tuple[tuple[Json, int], ...] = (
            ({"requests": {"memory": "9"}}, 9),
            ({"requests": {"memory": "2"}}, 5),  # a container's limit may be above the pod's request
            ({"limits": {"memory": "4"}}, 4),  # all of them together may not exceed it
            ({"requests": {"memory": "2"}, "limits": {"memory": "7"}}, 7),
            ({"limits": {"cpu": "1"}}, 5),
        )
        for resources, expected in cases:
            self.assertEqual(memory(pod(container(1, 3), container(2), whole=resources)), expected, resources)

    @given(st.lists(ONE, min_size=1, max_size=4), st.lists(INIT, max_size=4))
    def test_it_is_the_most_that_runs_at_any_time(
        self, containers: list[tuple[int, int]], inits: list[tuple[tuple[int, int], bool]]
    ) -> None:
        """Simulate the pod's life step by step."""
        running, most = 0, 0
        for its, sidecar in inits:
            most = max(most, running + max(its))
            running += max(its) if sidecar else 0
        most = max(most, running + sum(map(max, containers)))
        before = tuple(container(*its, sidecar=sidecar) for its, sidecar in inits)
        self.assertEqual(memory(pod(*(container(*its) for its in containers), before=before)), most)

    def test_what_is_no_quantity_is_named(self) -> None:
        wrong: tuple[Any, ...] = ("lots", "-1", 5, ["1Gi"])  # Any: JSON
        for value in wrong:
            item = pod({"resources": {"requests": {"memory": value}}})
            self.assertIn("memory", str(self.assertRaises(InvalidArgument, memory, item)))
        self.assertRaises(InvalidArgument, memory, {"spec": {"containers": {"a": 1}}})


class AskingTests(TestCase):
    def setUp(self) -> None:
        self.server = SimulatedApiServer(reactor)
        self.server.start()
        self.addCleanup(self.server.stop)
        kubeconfig = self.server.kubeconfig(Path(self.mktemp()))
        self.clock = Clock()
        self.needs = ApiServerNeeds(self.clock, ApiServer(reactor, kubeconfig))
        self.server.pods[PATH] = pod(container(8 * GIB))

    @deferred
    async def test_one_request_tells(self) -> None:
        for _ in range(2):
            self.assertEqual(await self.needs.of("shop", "web", "u-1"), Needs(0, 8 * GIB))
        self.assertEqual([asked["path"] for asked in self.server.asked], [PATH] * 2)

    @deferred
    async def test_names_stay_names(self) -> None:
        self.assertIsNone(await self.needs.of("shop/pods/web?", "../web", "u-1"))
        self.assertNotIn(PATH, [asked["path"] for asked in self.server.asked])

    @deferred
    async def test_what_can_not_be_used_is_not_known(self) -> None:
        secret = {"name": "PASSWORD", "value": "hunter2"}
        wrong = pod({**container(), "env": [secret], "resources": {"requests": {"memory": "lots"}}})
        for each in (wrong, {"kind": "Status"}, {"metadata": {"name": "web", "uid": "another"}}):
            self.server.pods[PATH] = each
            self.assertIsNone(await self.needs.of("shop", "web", "u-1"))
        self.server.pods[PATH] = {**pod(container()), "filling": "x" * MAX_POD}
        self.assertIsNone(await self.needs.of("shop", "web", "u-1"))
        self.server.pods.clear()
        self.assertIsNone(await self.needs.of("shop", "web", "u-1"))
        for self.server.status in (401, 403, 500):
            self.assertIsNone(await self.needs.of("shop", "web", "u-1"))

    @deferred
    async def test_an_answer_that_does_not_come_is_given_up(self) -> None:
        self.server.silent.add(PATH)
        asking = start(self.needs.of("shop", "web", "u-1"))
        await until(lambda: bool(self.server.asked), "it is asked")
        self.clock.advance(ANSWER_SECONDS)
        self.assertIsNone(await asking)
