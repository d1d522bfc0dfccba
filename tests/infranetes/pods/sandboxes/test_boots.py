# SPDX-License-Identifier: Apache-2.0
"""What the VM of a pod whose image it is boots with: its disk, its root, its names, its hardware."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred

from infranetes.pods.features.guests import Guests
from infranetes.pods.node.handlers import AnnotationRule
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.sandboxes.machine_images import BootSources
from infranetes.providers.hypervisor import IBootsGuests
from infranetes.providers.machine_images import BaseDisk, BootDisk, DiskFormat, GuestBoot, ImageBoot, Names
from infranetes_common.concurrency import start, until_ended
from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, box, pod
from tests.infranetes.pods.features.test_guests import GuestNode
from tests.infranetes.pods.sandboxes.test_machine_images import MachineImageNode

ROOT = BootDisk("serial", Path("/nonexistent"), DiskFormat.QCOW2, volume="vol")


class Roots:
    """Volumes that are roots.

    :ivar asked: whether each may be replaced. :ivar refusal: why none can be one."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self.refusal: Exception | None = None

    async def root(
        self, sandbox: Sandbox, config: cri.ContainerConfig, base: BaseDisk, *, replace: bool
    ) -> BootDisk | None:
        self.asked.append(replace)
        return ROOT

    def check_no_root(self, sandbox: Sandbox, config: cri.ContainerConfig) -> None:
        if self.refusal is not None:
            raise self.refusal


class RootedNode(GuestNode):
    """A node whose pods' roots are volumes."""

    def __init__(self, directory: Path) -> None:
        self.roots = Roots()
        super().__init__(directory)

    def make_sources(self, inventory: Inventory, providers: Providers, guests: Guests | None) -> BootSources:
        return BootSources(self.disks, self.roots, guests)


class BootTests(PodsTestCase):
    """A node that has the images."""

    world: RootedNode

    def make_world(self) -> FakeNode:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        return RootedNode(Path(directory.name) / "guests")

    def create(self, sandbox: str) -> Deferred[str]:
        return start(self.world.containers.create(sandbox, box()))

    def create_another(self, sandbox: str) -> Deferred[str]:
        return start(self.world.containers.create(sandbox, box("another")))

    def booted(self, config: Any = None) -> ImageBoot:
        """Return what the VM of a new pod is booted with."""
        self.successResultOf(self.create(self.run_pod(config)))
        boot = self.world.provider.specs[-1].request.boot
        assert boot is not None
        return boot

    def asking(self, **annotations: str) -> ImageBoot:
        said = {f"infranetes.io/{name.replace('_', '-')}": value for name, value in annotations.items()}
        return self.booted(pod(str(said), annotations=said))

    def test_a_guest_is_told_the_pods_dns_or_else_the_nodes(self) -> None:
        self.world.dns = cri.DNSConfig(servers=["10.0.0.53"], searches=["node.example"])
        names = self.booted(pod(hostname="web-0")).names
        self.assertEqual(names, Names("web-0", ("10.0.0.53",), ("node.example",)))
        own = cri.DNSConfig(servers=["10.96.0.10"], searches=["svc.cluster.local", "cluster.local"])
        names = self.booted(pod("other", dns_config=own)).names
        self.assertEqual(names, Names("", ("10.96.0.10",), ("svc.cluster.local", "cluster.local")))

    def test_whether_our_agent_is_in_it_is_what_the_image_says_or_else_the_pod(self) -> None:
        self.assertFalse(self.booted().base.has_agent)
        for way, has_agent in (("agent", True), ("ssh", False)):
            self.world.disks.base_disk = attrs.evolve(self.world.disks.base_disk, has_agent=not has_agent)
            self.assertEqual(self.asking(guest=way).base.has_agent, has_agent)

    def test_its_root_is_a_volume_which_is_replaced_if_the_pod_says_so(self) -> None:
        self.assertEqual(self.booted().root, ROOT)
        self.asking(root="replace")
        self.assertEqual(self.world.roots.asked, [False, True])

    def test_what_its_handler_sets_holds_for_its_disk(self) -> None:
        self.assertEqual(self.asking(disk="20Gi").root_bytes, 20 << 30)
        by_name = self.world.node.handlers.by_name
        rule = AnnotationRule("", {"infranetes.io/disk": "30Gi"})
        by_name[""] = attrs.evolve(by_name[""], annotations=rule)
        self.assertEqual(self.booted(pod("other")).root_bytes, 30 << 30)

    def test_one_that_is_given_up_while_its_disk_is_made_is_over_before_the_next_begins(self) -> None:
        making: Deferred[None] = Deferred()
        made = self.world.disks.base

        async def whole(image: Any) -> BaseDisk:
            await until_ended(making)  # a thread is at it
            return await made(image)

        self.patch(self.world.disks, "base", whole)
        id = self.run_pod()
        first = self.create(id)
        (container,) = self.world.node.inventory.containers
        removing = start(self.world.containers.remove(container))
        self.assertNoResult(removing)
        self.failureResultOf(self.create_another(id), FailedPrecondition)
        making.callback(None)
        self.successResultOf(removing)
        self.failureResultOf(first, Unavailable)
        self.successResultOf(self.create_another(id))
        self.assertEqual(len(self.world.provider.instances), 1)


class NoCloud:
    """Makes nothing for guests of clouds. :ivar asked: how often it was asked to."""

    def __init__(self) -> None:
        self.asked = 0

    async def boot(self, sandbox: Sandbox, provider: IBootsGuests) -> GuestBoot | None:
        self.asked += 1
        return None


class CloudNode(MachineImageNode):
    """A node whose images are a cloud's, all of them with our agent."""

    def make_sources(self, inventory: Inventory, providers: Providers, guests: Guests | None) -> BootSources:
        self.roots, self.cloud = Roots(), NoCloud()
        return BootSources(roots=self.roots, guests=self.cloud)


class CloudTests(PodsTestCase):
    """A node whose cloud has the images."""

    world: CloudNode

    def make_world(self) -> FakeNode:
        return CloudNode()

    def test_its_root_can_be_no_volume(self) -> None:
        self.world.roots.refusal = FailedPrecondition("the root of a cloud's image is no volume")
        creating = start(self.world.containers.create(self.run_pod(), box()))
        self.assertIn("is no volume", str(self.failureResultOf(creating, FailedPrecondition).value))
        self.assertEqual(self.world.provider.specs, [])

    def test_a_cloud_whose_images_have_our_agent_is_told_nothing(self) -> None:
        self.do(self.world.containers.create(self.run_pod(), box()))
        self.assertEqual(self.world.cloud.asked, 0)
