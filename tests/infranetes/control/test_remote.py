# SPDX-License-Identifier: Apache-2.0
"""What `kubectl infranetes` is answered by a node, to whom, and that nothing else is."""

from __future__ import annotations

from typing import Any, cast

from google.protobuf.message import Message

from infranetes.control.remote import RemotePods
from infranetes.control.usage import UsageCalls
from infranetes.kubernetes.reviews import Reviewer
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unauthenticated,
)
from infranetes_common.wire import control
from tests.infranetes.kubernetes.test_reviews import ApiServer, token
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, pod

BEARER = f"Bearer {token('infranetes')}"


class _Usage:
    """What two pods use."""

    async def ListUsage(self, request: object, call: object) -> control.ListUsageResponse:
        pods = [control.PodUsage(id=id, namespace=where) for id, where in (("a", "default"), ("b", "other"))]
        return control.ListUsageResponse(pods=pods)


class RemoteTests(PodsTestCase):
    def setUp(self) -> None:
        self.world = FakeNode()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)
        node, world, self.server = self.world.node, self.world, ApiServer()
        self.remote = RemotePods(
            Reviewer(world.clock, self.server.ask, "infranetes"),
            node.inventory,
            world.control,
            world.description,
            cast(UsageCalls, _Usage()),
        )
        self.web = self.run_pod(pod("web"))
        other = pod("web")
        other.metadata.namespace = "other"
        self.run_pod(other)
        self.server.allowed = [("list", ""), ("list", "default"), ("get", "default")]

    def ask(self, *path: str, namespace: str = "", authorization: str = BEARER) -> Any:
        return start(self.remote.answer(authorization, [*path], [namespace] if namespace else []))

    def answered(self, *path: str, **query: str) -> Any:
        answer = self.successResultOf(self.ask(*path, **query))
        self.assertIsInstance(answer, Message)
        return answer

    def refused(self, kind: type[InfranetesError], *path: str, **query: str) -> str:
        return str(self.failureResultOf(self.ask(*path, **query), kind).value)

    def test_pods_of_one_namespace_or_all(self) -> None:
        self.assertEqual([each.namespace for each in self.answered("pods").pods], ["default", "other"])
        (found,) = self.answered("pods", namespace="default").pods
        self.assertEqual(found.id, self.web)

    def test_one_pod(self) -> None:
        answer = self.answered("pods", "default", "web")
        self.assertIsInstance(answer, control.DescribePodResponse)
        self.assertEqual((answer.pod.id, answer.pod.namespace), (self.web, "default"))
        self.assertTrue(answer.steps)

    def test_what_they_use(self) -> None:
        answer = self.answered("usage", namespace="default")
        self.assertEqual([each.id for each in answer.pods], ["a"])

    def test_its_console_takes_the_right_to_its_log(self) -> None:
        # The fakes keep no consoles: that is what the node says to whom it may say anything.
        self.refused(FailedPrecondition, "pods", "default", "web", "console")
        review = self.server.asked[-1][1]["spec"]["resourceAttributes"]
        self.assertEqual(
            (review["verb"], review["namespace"], review["name"], review["subresource"]),
            ("get", "default", "web", "log"),
        )

    def test_nothing_to_those_who_may_not(self) -> None:
        for path, namespace in (
            (("pods",), "other"),
            (("usage",), "other"),
            (("pods", "other", "web"), ""),
            (("pods", "other", "web", "console"), ""),
            (("pods", "other", "none"), ""),  # nor whether there is such a pod
        ):
            self.refused(PermissionDenied, *path, namespace=namespace)

    def test_nothing_to_nobody(self) -> None:
        for shown in ("", "Bearer", "Bearer x", f"Basic {token('infranetes')}", token("infranetes")):
            for path in (("pods",), ("pods", "default", "web"), ("nothing",)):
                self.refused(Unauthenticated, *path, authorization=shown)
        self.assertEqual(self.server.asked, [])

    def test_a_pod_is_meant_by_its_whole_name_alone(self) -> None:
        self.refused(NotFound, "pods", "default", "we")
        self.refused(NotFound, "pods", "default", self.web[:12])
        self.server.allowed.append(("get", "pod"))  # `pod/other/web` means another pod elsewhere
        self.refused(NotFound, "pods", "pod", "web")

    def test_names_that_are_none(self) -> None:
        for name in ("", "..", "other/web", "a" * 300, "We"):
            self.refused(InvalidArgument, "pods", "default", name)
        self.refused(InvalidArgument, "pods", namespace="../x")

    def test_nothing_else(self) -> None:
        for path in ("", "pool", "pods/default", "pods/default/web/exec", "pods/a/b/console/x"):
            self.refused(NotFound, *path.split("/"))

    def test_one_that_is_gone_is_still_told_of(self) -> None:
        self.do(self.world.sandboxes.stop(self.web))
        self.do(self.world.sandboxes.remove(self.web))
        self.assertEqual(self.answered("pods", "default", "web").pod.state, "removed")
