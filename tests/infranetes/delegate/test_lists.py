# SPDX-License-Identifier: Apache-2.0
"""Lists that join both runtimes', and abbreviated ids."""

from __future__ import annotations

from infranetes.cri.owners import InventoryOwners
from infranetes.delegate import hidden, lists
from infranetes.delegate.owners import Owned, Owners
from infranetes_common.errors import ResourceExhausted
from infranetes_common.wire import cri
from tests.infranetes.delegate.case import OURS, RUNTIME, RouterCase
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import box
from tests.support.delegate import UNKNOWN
from tests.support.waiting import until
from tests.txgrpc.support import drain_iterator, status_of
from txgrpc import Code, GrpcError

SHADOW = {"infranetes.io__shadow_of": OURS}


class ListTests(RouterCase):
    """Both are asked at once, and if one fails, the list fails."""

    async def test_a_list_has_ours_and_theirs_with_what_nobody_knows(self) -> None:
        theirs = self.theirs.add_sandbox()
        self.ours.answers["ListPodSandbox"] = cri.ListPodSandboxResponse(items=[cri.PodSandbox(id=OURS)])
        request = cri.ListPodSandboxRequest(filter=cri.PodSandboxFilter(label_selector={"a": "b"}))
        listed = await self.raw.call(f"{RUNTIME}/ListPodSandbox", request.SerializeToString(), timeout=60)
        ids = [each.id for each in cri.ListPodSandboxResponse.FromString(listed).items]
        self.assertEqual((ids, listed.count(UNKNOWN)), ([OURS, theirs], 1))
        self.assertEqual(self.theirs.requests, [("ListPodSandbox", request.SerializeToString())])
        self.assertEqual(self.ours.requests, [("ListPodSandbox", request)])

    async def test_the_delegates_failure_is_the_lists(self) -> None:
        self.theirs.errors["ListContainers"] = GrpcError(Code.UNAVAILABLE, "not initialized yet")
        error = await status_of(self.stub.ListContainers(cri.ListContainersRequest(), timeout=60))
        self.assertEqual((error.code, error.message), (Code.UNAVAILABLE, "not initialized yet"))

    async def test_our_failure_is_the_lists(self) -> None:
        self.ours.answers["ListContainers"] = GrpcError(Code.INTERNAL, "ours")
        error = await status_of(self.stub.ListContainers(cri.ListContainersRequest(), timeout=60))
        self.assertEqual((error.code, error.message), (Code.INTERNAL, "ours"))

    async def test_of_metrics_of_the_same_name_theirs_is_listed(self) -> None:
        descriptors = [
            cri.MetricDescriptor(name=name, help="ours")
            for name in ("container_cpu_usage_seconds_total", "infranetes_vm_starts")
        ]
        self.ours.answers["ListMetricDescriptors"] = cri.ListMetricDescriptorsResponse(
            descriptors=descriptors
        )
        listed = await self.stub.ListMetricDescriptors(cri.ListMetricDescriptorsRequest(), timeout=60)
        self.assertEqual(
            [(each.name, each.help) for each in listed.descriptors],
            [("infranetes_vm_starts", "ours"), ("container_cpu_usage_seconds_total", "theirs")],
        )

    def test_a_list_that_kubelet_could_not_take_is_refused_by_its_parts(self) -> None:
        half = b"x" * (lists.MAX_LIST // 2)
        self.assertEqual(len(lists.joined(half, half)), lists.MAX_LIST)
        error = self.assertRaises(ResourceExhausted, lists.joined, half + b"y", half)
        self.assertIn(f"{len(half) + 1} of pods in VMs and {len(half)} of the delegate's", str(error))

    async def test_pages_are_ours_and_then_theirs(self) -> None:
        theirs = [self.theirs.add_sandbox(name) for name in ("a", "b")]
        page = cri.StreamPodSandboxesResponse(pod_sandboxes=[cri.PodSandbox(id=OURS)])
        self.ours.answers["StreamPodSandboxes"] = [page, [page, page]]
        pages = await drain_iterator(
            self.stub.StreamPodSandboxes(cri.StreamPodSandboxesRequest(), timeout=60)
        )
        self.assertEqual([each.id for page in pages for each in page.pod_sandboxes], [OURS] * 3 + theirs)

    async def test_pages_without_the_delegates_are_none(self) -> None:
        self.theirs.errors["StreamPodSandboxes"] = GrpcError(Code.UNIMPLEMENTED, "not here")
        self.ours.answers["StreamPodSandboxes"] = [cri.StreamPodSandboxesResponse()]
        call = self.stub.StreamPodSandboxes(cri.StreamPodSandboxesRequest(), timeout=60)
        self.assertEqual((await status_of(call.__anext__())).code, Code.UNIMPLEMENTED)
        self.assertEqual(self.ours.requests, [])

    async def test_a_reader_of_pages_that_leaves_ends_both(self) -> None:
        self.theirs.hang("StreamContainers")
        call = self.stub.StreamContainers(cri.StreamContainersRequest(), timeout=60)
        await until(lambda: bool(self.theirs.hanging["StreamContainers"]), "the delegate is asked")
        call.cancel()
        await until(lambda: self.theirs.cancelled == ["StreamContainers"], "it is given up")

    async def test_shadow_sandboxes_are_in_no_list(self) -> None:
        theirs = self.theirs.add_sandbox()
        self.theirs.add_sandbox("shadow", **SHADOW)
        # A filter that only mentions the label does not make a sandbox a shadow.
        innocent = self.theirs.add_sandbox("innocent", about="infranetes.io/shadow-of")
        listed = await self.raw.call(f"{RUNTIME}/ListPodSandbox", b"", timeout=60)
        ids = [each.id for each in cri.ListPodSandboxResponse.FromString(listed).items]
        self.assertEqual((ids, listed.count(UNKNOWN)), ([theirs, innocent], 1))
        stats = await self.stub.ListPodSandboxStats(cri.ListPodSandboxStatsRequest(), timeout=60)
        self.assertEqual([each.attributes.id for each in stats.stats], [theirs, innocent])
        pages = await drain_iterator(
            self.stub.StreamPodSandboxes(cri.StreamPodSandboxesRequest(), timeout=60)
        )
        self.assertEqual([each.id for page in pages for each in page.pod_sandboxes], [theirs, innocent])

    async def test_a_list_that_can_not_be_read_is_the_delegates_fault(self) -> None:
        self.theirs.answers["ListPodSandbox"] = lambda _: b"\x0a\x40infranetes.io/shadow-of"
        error = await status_of(self.stub.ListPodSandbox(cri.ListPodSandboxRequest(), timeout=60))
        words = "the delegate's answer to ListPodSandbox can't be read"
        self.assertEqual((error.code, error.message), (Code.UNAVAILABLE, words))

    async def test_shadow_sandboxes_have_no_metrics(self) -> None:
        """Metrics have no labels, so the sandboxes are listed, and one that has ended is remembered."""
        theirs, shadow = self.theirs.add_sandbox(), self.theirs.add_sandbox("shadow", **SHADOW)
        gone = self.theirs.add_sandbox("gone", **SHADOW)
        await self.stub.ListPodSandbox(cri.ListPodSandboxRequest(), timeout=60)
        metrics = [cri.PodSandboxMetrics(pod_sandbox_id=id) for id in (shadow, theirs, gone)]
        answers = cri.ListPodSandboxMetricsResponse(pod_metrics=metrics).SerializeToString() + UNKNOWN
        self.theirs.answers["ListPodSandboxMetrics"] = lambda _: answers
        del self.theirs.sandboxes[gone]
        listed = await self.raw.call(f"{RUNTIME}/ListPodSandboxMetrics", b"", timeout=60)
        ids = [
            each.pod_sandbox_id for each in cri.ListPodSandboxMetricsResponse.FromString(listed).pod_metrics
        ]
        self.assertEqual((ids, listed.count(UNKNOWN)), ([theirs], 1))
        self.theirs.pages["StreamPodSandboxMetrics"] = [answers]
        pages = await drain_iterator(
            self.stub.StreamPodSandboxMetrics(cri.StreamPodSandboxMetricsRequest(), timeout=60)
        )
        self.assertEqual(
            [each.pod_sandbox_id for page in pages for each in page.pod_sandbox_metrics], [theirs]
        )
        self.theirs.errors["ListPodSandbox"] = GrpcError(Code.UNAVAILABLE, "not now")
        error = await status_of(
            self.stub.ListPodSandboxMetrics(cri.ListPodSandboxMetricsRequest(), timeout=60)
        )
        self.assertIs(error.code, Code.UNAVAILABLE)

    def test_ids_that_were_seen_long_ago_are_forgotten(self) -> None:
        known = hidden.Hidden()
        for number in range(hidden.MAX_IDS):
            known.note(str(number))
        known.note("0")
        known.note("new")
        for id, expected in (("0", True), ("1", False), ("new", True)):
            event = cri.ContainerEventResponse(container_id=id).SerializeToString()
            self.assertEqual(known.is_shadow(event), expected, id)


class IdTests(RouterCase):
    """Prefixes of ids are looked up in both runtimes."""

    async def test_a_beginning_that_only_ours_has(self) -> None:
        self.own.ids["555"] = Owned.MAYBE
        await self.stub.StopPodSandbox(cri.StopPodSandboxRequest(pod_sandbox_id="555"), timeout=60)
        self.assertEqual(self.theirs.names(), ["PodSandboxStatus"])
        self.assertEqual([name for name, _ in self.ours.requests], ["StopPodSandbox"])

    async def test_a_beginning_that_both_have(self) -> None:
        theirs = self.theirs.add_sandbox()
        self.own.ids[theirs[:4]] = Owned.MAYBE
        error = await status_of(
            self.stub.StopPodSandbox(cri.StopPodSandboxRequest(pod_sandbox_id=theirs[:4]), timeout=60)
        )
        self.assertIs(error.code, Code.INVALID_ARGUMENT)
        self.assertIn("give more characters", error.message)
        self.assertEqual(self.ours.requests, [])

    async def test_a_beginning_that_may_be_theirs_needs_the_delegate(self) -> None:
        self.own.ids["555"] = Owned.MAYBE
        await self.theirs.down()
        error = await status_of(
            self.stub.ContainerStatus(cri.ContainerStatusRequest(container_id="555"), timeout=60)
        )
        self.assertIs(error.code, Code.UNAVAILABLE)

    async def test_what_neither_has_is_the_delegates_to_say(self) -> None:
        error = await status_of(
            self.stub.ContainerStatus(cri.ContainerStatusRequest(container_id="abc"), timeout=60)
        )
        self.assertEqual((error.code, error.message[:16]), (Code.NOT_FOUND, "an error occurre"))
        await self.stub.RemovePodSandbox(cri.RemovePodSandboxRequest(pod_sandbox_id="f" * 32), timeout=60)


class OwnerTests(PodsTestCase):
    """The ids in the inventory are ours; nothing is cached."""

    def test_ids(self) -> None:
        sandbox = self.run_pod()
        container = self.do(self.world.containers.create(sandbox, box()))
        handlers = {"infranetes": True, "machines": False}
        owners: Owners = InventoryOwners(self.world.node.inventory, handlers, "image".__eq__)
        self.assertIs(owners.sandbox(sandbox), Owned.OURS)
        self.assertIs(owners.container(container), Owned.OURS)
        self.assertIs(owners.sandbox(sandbox[:5]), Owned.MAYBE)
        self.assertIs(owners.container(container[:5]), Owned.MAYBE)
        for id in ("", "x", sandbox + "0", sandbox * 2, sandbox[:-1] + "x"):
            self.assertIs(owners.sandbox(id), Owned.THEIRS, id)
        self.assertEqual((owners.handler("infranetes"), owners.handler("")), (True, False))
        self.assertEqual(owners.needs("infranetes"), ("runtime handler infranetes", "images"))
        self.assertEqual(owners.needs("machines"), ("runtime handler machines",))
        self.assertEqual((owners.image("image"), owners.image("other")), (True, False))
        self.do(self.world.sandboxes.remove(sandbox))
        self.assertIs(owners.sandbox(sandbox), Owned.THEIRS)
