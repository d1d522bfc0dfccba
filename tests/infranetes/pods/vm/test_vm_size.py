# SPDX-License-Identifier: Apache-2.0
"""How large a pod's VM is, according to its annotations, the API server and the CRI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from twisted.internet.defer import Deferred

from infranetes.kubernetes.pod_needs import PodNeeds
from infranetes.pods.vm.vm_size import SOURCE
from infranetes.providers.interface import Size
from infranetes_common.concurrency import start
from infranetes_common.errors import InvalidArgument, ResourceExhausted
from infranetes_common.quantities import Needs
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, pod
from tests.infranetes.pods.vm.test_resize import resources
from txgrpc import Call

GIB = 1 << 30
OF_API = {SOURCE: "api"}
CPU, MEMORY = "infranetes.io/cpu", "infranetes.io/memory"


class FakeNeeds:
    """A PodNeeds. :ivar known: its answer; None: it has none. :ivar asked: the pods it was asked about."""

    def __init__(self) -> None:
        self.known: Needs | None = Needs()
        self.asked: list[tuple[str, str, str]] = []
        self.waiting: Deferred[None] | None = None

    async def of(self, namespace: str, name: str, uid: str) -> Needs | None:
        self.asked.append((namespace, name, uid))
        if self.waiting is not None:
            await self.waiting
        return self.known


class AskingNode(FakeNode):
    """A node that knows what pods request."""

    def __init__(self, needs: PodNeeds) -> None:
        self.pod_needs = needs
        super().__init__()


class AskingCase(PodsTestCase):
    def make_world(self) -> FakeNode:
        self.needs = FakeNeeds()
        return AskingNode(self.needs)

    def config(
        self, cpu: int = 0, memory: int = 0, shares: int = 2, given: Mapping[str, str] | None = None
    ) -> Any:
        linux = cri.LinuxPodSandboxConfig(resources=resources(cpu, memory, shares))
        return pod(linux=linux, annotations={**OF_API, **(given or {})})

    def size(self, config: Any) -> Size:
        """Run a pod and remove it. Return the size of its VM."""
        id = self.run_pod(config)
        size: Size = self.world.provider.specs[-1].request.size
        record = self.record(id)
        self.assertEqual((record.cpu_millis, record.memory_bytes), (size.cpu_millis, size.memory_bytes))
        self.do(self.world.sandboxes.remove(id))
        return size


class SizeTests(AskingCase):
    def test_each_resource_is_the_larger_of_what_is_requested_and_what_the_cri_says(self) -> None:
        for known, cpu, memory, expected in (
            (Needs(), 0, 0, Size()),
            (Needs(0, 8 * GIB), 0, 0, Size(0, 8 * GIB)),
            (Needs(500, 8 * GIB), 2000, GIB, Size(2000, 8 * GIB)),
            (Needs(4000, GIB), 2000, 2 * GIB, Size(4000, 2 * GIB)),
        ):
            self.needs.known = known
            self.assertEqual(self.size(self.config(cpu, memory)), expected)
        self.assertEqual(self.needs.asked, [("default", "web", "u1")] * 4)

    def test_a_request_of_cpu_beyond_the_limit_of_some_containers_counts(self) -> None:
        self.assertEqual(self.size(self.config(500, shares=2048)), Size(2000))

    def test_annotations_stand_in_the_place_of_the_pods_requests(self) -> None:
        self.needs.known = Needs(4000, 8 * GIB)
        self.assertEqual(self.size(self.config(given={MEMORY: "3Gi"})), Size(4000, 3 * GIB))
        self.assertEqual(self.size(self.config(given={CPU: "1500m"})), Size(1500, 8 * GIB))
        self.assertEqual(self.size(self.config(memory=4 * GIB, given={MEMORY: "3Gi"})), Size(4000, 4 * GIB))
        del self.needs.asked[:]
        self.assertEqual(self.size(self.config(given={CPU: "1", MEMORY: "3Gi"})), Size(1000, 3 * GIB))
        self.assertEqual(self.needs.asked, [], "nothing is left to ask for")

    def test_annotations_that_are_wrong_are_refused_before_there_is_anything(self) -> None:
        for name, value in ((CPU, "0"), (CPU, "1025"), (MEMORY, "8"), (MEMORY, "65Ti"), (MEMORY, "8GB")):
            error = self.failureResultOf(self.start(self.config(given={name: value})), InvalidArgument)
            self.assertIn(name, str(error.value))
            self.assertNothingLeft()

    def test_a_request_is_not_taken_for_a_limit(self) -> None:
        self.needs.known = Needs(0, 8 * GIB)
        self.assertFalse(self.size(self.config()).memory_limited)
        self.assertFalse(self.size(self.config(given={MEMORY: "3Gi"})).memory_limited)
        self.assertTrue(self.size(self.config(memory=GIB)).memory_limited)

    def test_pods_that_the_api_server_does_not_have_are_not_asked_for(self) -> None:
        for source in ({}, {SOURCE: "file"}):
            self.size(pod(annotations=source))
        self.assertEqual(self.needs.asked, [])

    def test_an_api_server_that_does_not_tell_leaves_the_cris_word(self) -> None:
        self.needs.known = None
        self.assertEqual(self.size(self.config(1000, GIB)), Size(1000, GIB))
        self.assertEqual(self.size(self.config(given={MEMORY: "3Gi"})), Size(0, 3 * GIB))

    def test_a_launch_that_another_daemon_goes_on_with_asks_for_the_same(self) -> None:
        self.needs.known = Needs(0, 8 * GIB)
        self.world.provider.booting = Deferred()
        self.start(self.config())
        self.world.pod_needs = None
        self.world.restart()
        self.world.provider_ready()
        self.assertEqual([spec.request.size for spec in self.world.provider.specs], [Size(0, 8 * GIB)] * 2)

    def test_nothing_is_left_of_a_pod_that_is_given_up_while_it_is_asked_for(self) -> None:
        self.needs.waiting = Deferred()
        launch = self.start(self.config())
        (sandbox,) = self.world.node.inventory
        removing = start(self.world.sandboxes.remove(sandbox.id))
        self.needs.waiting.callback(None)
        self.successResultOf(removing)
        self.failureResultOf(launch)
        self.assertNothingLeft()

    def test_nothing_is_left_where_the_provider_has_no_such_vm(self) -> None:
        self.needs.known = Needs(0, 8 * GIB)
        self.world.provider.launch_error = ResourceExhausted("not so large")
        self.failureResultOf(self.start(self.config()), ResourceExhausted)
        self.assertNothingLeft()


class ResizeTests(AskingCase):
    """On a resize, the pod's current requests are looked up again."""

    def resize(self, memory: int) -> int:
        calls = self.world.sandbox_calls
        request = cri.UpdatePodSandboxResourcesRequest(
            pod_sandbox_id=self.sandbox, resources=resources(0, memory)
        )
        self.successResultOf(start(calls.UpdatePodSandboxResources(request, cast(Call, None))))
        return int(self.record(self.sandbox).memory_bytes)

    def test_a_smaller_limit_takes_nothing_from_what_is_requested(self) -> None:
        self.needs.known = Needs(0, 5 * GIB)
        self.sandbox = self.run_pod(self.config(memory=2 * GIB))
        self.needs.known = Needs(0, 4 * GIB)
        self.assertEqual(self.resize(GIB), 4 * GIB)
        self.needs.known = None
        self.assertEqual(self.resize(GIB), 4 * GIB, "nor while it is not known")
        self.needs.known = Needs()
        self.assertEqual(self.resize(GIB), GIB)
