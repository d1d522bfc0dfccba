# SPDX-License-Identifier: Apache-2.0
"""VMs that are processes of the node are put into the control groups that kubelet made for their pods."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import alsoProvides

from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.providers.interface import IPlacesVms, Size
from infranetes_common.errors import Unavailable
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, pod

PARENT = "/kubepods/burstable/pod1"


class PlacementTests(PodsTestCase):
    """A pool of one VM."""

    def setUp(self) -> None:
        self.world = FakeNode(pool=PoolConfig(sizes=(PoolSize(count=1),), per_minute=100))
        self.provider = cast(Any, self.world.provider)  # Any: a method is added to it
        self.placed: list[tuple[str, str]] = []
        self.trouble: Exception | None = None
        self.provider.place = self.place
        self.world.provider_ready()
        self.addCleanup(self.world.kill)

    def place(self, instance_id: str, parent: str, size: Size) -> Deferred[None]:
        self.placed.append((instance_id, parent))
        return fail(self.trouble) if self.trouble is not None else succeed(None)

    def placed_pod(self, name: str) -> str:
        linux = cri.LinuxPodSandboxConfig(cgroup_parent=PARENT)
        return self.run_pod(pod(name, uid=name, linux=linux))

    def test_a_vm_that_is_launched_is_there_from_the_beginning(self) -> None:
        self.world = FakeNode()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)
        self.placed_pod("web")
        self.assertEqual([spec.request.cgroup_parent for spec in self.world.provider.specs], [PARENT])

    def test_a_vm_of_the_pool_is_put_there_when_a_pod_has_it(self) -> None:
        alsoProvides(self.provider, IPlacesVms)
        self.assertEqual([spec.request.cgroup_parent for spec in self.provider.specs], [""])
        claimed = self.placed_pod("web")
        self.assertEqual(self.placed, [(self.record(claimed).instance_id, PARENT)])

    def test_one_that_can_not_be_put_there_is_no_pods(self) -> None:
        alsoProvides(self.provider, IPlacesVms)
        self.trouble = Unavailable("kubelet has removed it")
        (first,) = self.provider.instances
        linux = cri.LinuxPodSandboxConfig(cgroup_parent=PARENT)
        error = self.failureResultOf(self.start(pod(linux=linux)), Unavailable)
        self.assertIn("kubelet has removed it", str(error.value))
        self.assertNotIn(first, self.provider.instances)
        self.assertEqual(self.world.store.contents().sandboxes, ())

    def test_a_pod_without_a_group_of_its_own_is_put_nowhere(self) -> None:
        alsoProvides(self.provider, IPlacesVms)
        self.run_pod()
        self.assertEqual(self.placed, [])

    def test_a_clouds_vms_are_left_alone(self) -> None:
        self.placed_pod("web")
        self.assertEqual(self.placed, [])
