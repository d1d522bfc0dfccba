# SPDX-License-Identifier: Apache-2.0
"""The CSI driver passes csi-sanity, the suite of kubernetes-csi/csi-test."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from twisted.internet.utils import getProcessOutputAndValue

from infranetes.csi.config import CsiConfig
from infranetes.providers.cloud.aws import factory as aws
from infranetes.providers.cloud.aws.bundled import offers
from infranetes.providers.cloud.azure import factory as azure
from infranetes.providers.cloud.gcp import factory as gcp
from infranetes.providers.cloud.gcp.sizes import prices
from infranetes.providers.cloud.openstack import factory as openstack
from infranetes.providers.cloud.vsphere import factory as vsphere
from infranetes.providers.interface import IPodProvider, ProviderContext
from infranetes.providers.volumes import IHasVolumes, IVolumes
from infranetes_common.reactors import IReactor
from tests.harness.durations import slow
from tests.harness.needs import needs_mounts, needs_tools
from tests.infranetes.csi.case import MIB, NODE, CsiCase, Pods, reactor
from tests.support.clouds.aws import SimulatedAws
from tests.support.clouds.azure import SimulatedAzure
from tests.support.clouds.gce import SimulatedGce
from tests.support.clouds.moto import REGION
from tests.support.clouds.openstack import SimulatedOpenStack
from tests.support.clouds.vsphere import SimulatedVcenter
from tests.support.clouds.world import World

if TYPE_CHECKING:
    _Base = CsiCase
else:
    _Base = object

offers(REGION)  # libcloud's large files, which the daemon reads before its reactor runs
prices()
GIB = 1 << 30
Create = Callable[[IReactor, Mapping[str, object], ProviderContext], IPodProvider]
"""What makes a provider, of its table and its context."""
CSI_SANITY = Path(__file__).resolve().parents[2] / "build" / "tools" / "csi-sanity"

# Specs that are skipped, by a part of their names, and why. One that is skipped for no reason fails the test.
SKIPPED = {
    "ControllerPublishVolume": "attachRequired: false: a disk is attached to the pod's VM, not to the node",
    "ControllerUnpublishVolume": "as above",
    "volume lifecycle should": "as above: it is of these two calls",
    "NodeStageVolume": "the node itself never mounts a volume",
    "NodeUnstageVolume": "as above",
    "GroupController": "snapshots are of one volume each",
    "ModifyVolume": "volumes have no parameters",
    "volume attribute class": "as above",
    "ListVolumes pagination": "disabled in the suite itself",
    "Health": "CSI 1.13 has these calls for monitors, which Kubernetes 1.36 does not make",
    "with accessibility requirements": "CSI 1.13 has them of snapshots; Kubernetes 1.36 asks for no place",
}
NO_CLONES = {
    "volume from an existing source volume": "the provider makes volumes of snapshots alone",
    "volume source volume": "as above",
}


class Sanity(_Base):
    """The suite, on one provider's volumes.

    :ivar unit: the size of a volume that is no trouble to make. :ivar skipped: besides `SKIPPED`."""

    timeout = 600
    unit = 4 * MIB
    skipped: ClassVar[dict[str, str]] = {}

    def setUp(self) -> object:  # type: ignore[override]
        self.pods = Pods()
        return super().setUp()

    async def run_suite(self, access_type: str) -> list[dict[str, Any]]:  # Any: JSON
        report = self.root / "report.json"
        arguments = [
            f"--csi.endpoint={CsiConfig(str(self.root)).socket}",
            f"--csi.mountdir={self.root / 'mount'}",
            f"--csi.stagingdir={self.root / 'staging'}",
            f"--csi.testvolumeaccesstype={access_type}",
            f"--csi.testvolumesize={self.unit}",
            f"--csi.testvolumeexpandsize={2 * self.unit}",
            f"--ginkgo.json-report={report}",
            "--ginkgo.no-color",
        ]
        out, errors, code = await getProcessOutputAndValue(
            str(CSI_SANITY), arguments, env=dict(os.environ), reactor=reactor
        )
        self.assertEqual(code, 0, (out + errors).decode(errors="replace")[-20_000:])
        found: list[dict[str, Any]] = json.loads(report.read_text())[0]["SpecReports"]
        return found

    async def test_all_that_is_offered_is_as_it_has_to_be(self) -> None:
        await self.check_suite("mount")

    async def test_raw_volumes_are_too(self) -> None:
        await self.check_suite("block")
        self.assertEqual(self.loop_devices(), [])

    async def check_suite(self, access_type: str) -> None:
        specs = [each for each in await self.run_suite(access_type) if each["LeafNodeType"] == "It"]
        names: dict[str, list[str]] = {}
        for each in specs:
            words = [*(each["ContainerHierarchyTexts"] or ()), each["LeafNodeText"]]
            names.setdefault(each["State"], []).append(" ".join(words))
        self.assertEqual(names.keys() - {"passed", "skipped", "pending"}, set())
        left = [*names.get("skipped", ()), *names.get("pending", ())]
        skipped = SKIPPED | self.skipped
        unexplained = [name for name in left if not any(part in name for part in skipped)]
        self.assertEqual(unexplained, [])
        unused = [part for part in skipped if not any(part in name for name in left)]
        self.assertEqual(unused, [])
        self.assertGreaterEqual(len(names["passed"]), 40)
        self.assertEqual(await self.volumes.list(), [])


@needs_tools("csi-sanity")
@needs_mounts
class QemuSanityTests(Sanity, CsiCase):
    """Volumes that are files."""

    async def check_suite(self, access_type: str) -> None:
        await super().check_suite(access_type)
        self.assertEqual(os.listdir(self.root / "volumes"), ["snapshots"])
        self.assertEqual(os.listdir(self.root / "volumes" / "snapshots"), [])


@slow(18, "somebody else's suite makes and deletes a hundred volumes at a simulated cloud")
class CloudSanity(Sanity):
    """The suite, on a simulated cloud's disks."""

    unit = GIB

    async def make_volumes(self) -> IVolumes:
        self.cluster = f"sanity-{secrets.token_hex(4)}"  # clouds may be shared by tests
        world, factory = self.make_world(self.root / "cloud")
        world.start()
        self.addCleanup(world.stop)
        state = self.root / "state"
        state.mkdir()
        provider = factory(reactor, world.table(), ProviderContext(state, state, self.cluster, NODE))
        self.addCleanup(provider.stop)
        await provider.start(lambda words: None)
        return IHasVolumes(provider).volumes

    def make_world(self, directory: Path) -> tuple[World, Create]:
        """Return a cloud that is not started yet, and the factory of its provider."""
        raise NotImplementedError


@needs_tools("csi-sanity")
@needs_mounts
class AwsSanityTests(CloudSanity, CsiCase):
    """Volumes that are EBS'."""

    skipped = NO_CLONES

    def make_world(self, directory: Path) -> tuple[World, Create]:
        return SimulatedAws(reactor, directory, self.cluster), aws.create


@needs_tools("csi-sanity")
@needs_mounts
class GcpSanityTests(CloudSanity, CsiCase):
    """Volumes that are Google's disks."""

    def make_world(self, directory: Path) -> tuple[World, Create]:
        world = SimulatedGce(reactor, directory)
        world.operation_seconds = 0.02
        return world, gcp.create


@needs_tools("csi-sanity", "wheels")
@needs_mounts
class AzureSanityTests(CloudSanity, CsiCase):
    """Volumes that are Azure's disks."""

    def make_world(self, directory: Path) -> tuple[World, Create]:
        world = SimulatedAzure(reactor, directory)
        world.operation_seconds = 0.02
        return world, azure.create


@needs_tools("csi-sanity", "wheels")
@needs_mounts
class OpenStackSanityTests(CloudSanity, CsiCase):
    """Volumes that are Cinder's."""

    def make_world(self, directory: Path) -> tuple[World, Create]:
        return SimulatedOpenStack(reactor, directory), openstack.create


@needs_tools("vcsim")
@needs_mounts
class VsphereSanityTests(CloudSanity, CsiCase):
    """Volumes that are first class disks of a vCenter."""

    unit = 4 * MIB
    skipped = NO_CLONES

    def make_world(self, directory: Path) -> tuple[World, Create]:
        world = SimulatedVcenter(reactor, directory)
        self.cluster = f"sanity-{world.folder}"
        return world, vsphere.create
