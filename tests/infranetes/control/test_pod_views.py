# SPDX-License-Identifier: Apache-2.0
"""What the page of a pod is made of."""

from __future__ import annotations

from typing import Any, cast

from infranetes.control.pod_views import PodViews
from infranetes.control.policies import PolicyCalls
from infranetes.monitoring.pod_page import pod_parts
from infranetes.monitoring.pod_view import Mount, PodView, Volume
from infranetes.pods.store.records import AttachmentRecord
from infranetes.policies.cluster import ClusterPolicies
from infranetes.providers.interface import Console
from infranetes_common.concurrency import start
from infranetes_common.errors import InvalidArgument, NotFound, Unavailable
from infranetes_common.wire import cri
from tests.infranetes.control.test_policies import Cluster, InForce
from tests.infranetes.control.test_service import with_consoles
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import box, pod


class PodViewsTests(PodsTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.attachments: list[AttachmentRecord] = []
        self.views = self.make_views()

    def make_views(self, policies: Any = None, firewalls: Any = None) -> PodViews:
        node = self.world.node
        return PodViews(
            node.inventory,
            self.world.control,
            self.world.description,
            PolicyCalls(node.inventory, policies, firewalls),
            lambda id: [each for each in self.attachments if each.sandbox_id == id],
        )

    def look(self, name: str = "web", *, console: bool = True) -> PodView:
        return cast(PodView, self.do(self.views.look(name, console=console)))

    def test_a_pod_with_its_containers_events_and_mounts(self) -> None:
        sandbox = self.run_pod(pod("web"))
        mounts = [cri.Mount(container_path="/data", host_path="/var/data", readonly=True)]
        self.do(self.world.containers.create(sandbox, box(mounts=mounts)))
        view = self.look()
        self.assertEqual((view.described.pod.id, len(view.described.containers)), (sandbox, 1))
        self.assertEqual(view.mounts, (Mount("main", "/data", "/var/data", True),))
        times = [each.step.began_at for each in view.events]
        self.assertEqual(times, sorted(times, reverse=True))
        self.assertEqual({each.pod.sandbox_id for each in view.events}, {sandbox})

    def test_events_are_also_those_of_the_pods_sandboxes_before(self) -> None:
        first = self.run_pod(pod("web"))
        self.do(self.world.sandboxes.stop(first))
        self.do(self.world.sandboxes.remove(first))
        second = self.run_pod(pod("web", attempt=1))
        self.assertEqual({each.pod.sandbox_id for each in self.look().events}, {first, second})

    def test_one_that_is_gone_and_remembered(self) -> None:
        sandbox = self.run_pod(pod("web"))
        self.do(self.world.sandboxes.stop(sandbox))
        self.do(self.world.sandboxes.remove(sandbox))
        view = self.look()
        self.assertEqual((view.described.pod.state, view.mounts), ("removed", ()))

    def test_what_is_not_known_or_not_one_pod(self) -> None:
        self.run_pod(pod("web-1"))
        self.run_pod(pod("web-2"))
        for name, kind in (("nonsense", NotFound), ("web", InvalidArgument)):
            self.failureResultOf(start(self.views.look(name, console=True)), kind)

    def test_its_volumes_and_no_others(self) -> None:
        sandbox = self.run_pod(pod("web"))
        self.attachments = [
            AttachmentRecord("vol-1", "fake", sandbox, "vm-1", "disk1"),
            AttachmentRecord("vol-2", "fake", "other", "vm-2"),
        ]
        self.assertEqual(self.look().volumes, (Volume("vol-1", "fake", "disk1"),))

    def test_its_console_unless_everybody_may_see_it(self) -> None:
        sandbox = self.run_pod(pod("web"))
        self.assertIn("keeps no consoles", self.look().no_console)
        self.world.node_provider.provider = with_consoles(Console("vm-1", sandbox, 0.0, "", "login:", ""))
        self.assertEqual((self.look().console, self.look().no_console), ("login:", ""))
        view = self.look(console=False)
        self.assertEqual(view.console, "")
        self.assertIn("metrics.token_file", view.no_console)

    def test_a_console_that_can_not_be_read_leaves_the_rest(self) -> None:
        self.run_pod(pod("web"))
        self.world.node_provider.provider = with_consoles(error=Unavailable("the disk is slow"))
        view = self.look()
        self.assertEqual((view.no_console, view.described.pod.name), ("the disk is slow", "web"))

    def test_its_policies(self) -> None:
        sandbox = self.run_pod(pod("web"))
        self.assertIn("kubernetes.network_policies is off", self.look().no_policies)
        cluster = Cluster(self.world.node.reactor)
        cluster.have(sandbox)
        self.views = self.make_views(cast(ClusterPolicies, cluster), InForce())
        view = self.look()
        self.assertIs(view.policies is not None and view.policies.known, False)
        self.do(self.world.sandboxes.stop(sandbox))
        self.assertIn("has a VM", self.look().no_policies)

    def test_environments_and_annotations_are_not_in_it(self) -> None:
        """They may hold secrets."""
        config = pod("web", labels={"app": "shop"}, annotations={"last-applied": "hunter2"})
        sandbox = self.run_pod(config)
        secret = [cri.KeyValue(key="PASSWORD", value=b"hunter2")]
        container = box(envs=secret, annotations={"note": "hunter2"}, command=["sh", "-c", "echo hunter2"])
        self.do(self.world.containers.create(sandbox, container))
        html = "".join(part.html(id) for id, part in pod_parts(self.look()).items())
        self.assertIn("app=shop", html)
        self.assertNotIn("hunter2", html)
