# SPDX-License-Identifier: Apache-2.0
"""A cloud's machine images as pods' images: their names, and EC2's owners and tags."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface.verify import verifyObject

from infranetes.images.interface import CatalogueImage, IImageCatalogue
from infranetes.images.reference import is_digest
from infranetes.providers.cloud.aws.settings import Settings
from infranetes.providers.cloud.vms.catalogue import parse
from infranetes.providers.interface import IHasCatalogue
from infranetes_common.config import structure
from infranetes_common.errors import (
    ConfigError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from tests.harness.needs import needs_systemd
from tests.infranetes.providers.cloud.case import AwsCase
from tests.support.clouds.aws import IMAGE
from tests.support.clouds.faults import FaultKind

DIGEST = "sha256:" + "a" * 64
ARM_IMAGE = "ami-0e9271c829888680e"  # one of moto's
ACCOUNT = "123456789012"  # moto's


class ReferenceTests(SynchronousTestCase):
    """Names of machine images as Docker references."""

    def test_several_references_mean_one_image(self) -> None:
        for reference, meant in (
            ("web:1.0", ("web", "1.0", "")),
            ("web", ("web", "latest", "")),
            ("docker.io/library/web:1.0", ("web", "1.0", "")),
            ("aws.infranetes.io/web:1.0", ("web", "1.0", "")),
            ("team/web:V_1", ("team/web", "V_1", "")),
            ("docker.io/team/web:V_1", ("team/web", "V_1", "")),
            (f"web:1.0@{DIGEST}", ("web", "1.0", DIGEST)),
            (f"aws.infranetes.io/web@{DIGEST}", ("web", "latest", DIGEST)),
        ):
            self.assertEqual(parse(reference, "aws"), meant)

    def test_an_invalid_reference_is_refused_with_the_valid_form(self) -> None:
        for reference in (
            "", "Web:1.0", "web:", "web:1*", "quay.io/web:1.0", "gcp.infranetes.io/web:1.0",
            "web:1.0@sha256:ab", "web@", "a" * 300, "ami-0123456789abcdef0:", "web:1.0\n", "wéb:1.0",
        ):  # fmt: skip
            with self.assertRaises(InvalidArgument) as caught:
                parse(reference, "aws")
            self.assertIn("aws.infranetes.io/NAME:VERSION", str(caught.exception))

    @given(st.text(max_size=80))
    def test_only_valid_names_reach_a_cloud(self, text: str) -> None:
        try:
            name, version, digest = parse(text, "aws")
        except InvalidArgument:
            return
        self.assertRegex(name, r"\A[a-z0-9._/-]+\Z")
        self.assertRegex(version, r"\A[A-Za-z0-9_.-]{1,128}\Z")
        self.assertTrue(not digest or is_digest(digest))


class OwnerTests(SynchronousTestCase):
    """The key `image_owners`."""

    def settings(self, **fields: Any) -> Settings:
        table = {"region": "eu-west-1", "image": IMAGE, **fields}
        return structure(table, Settings, source="configuration", prefix="providers.aws")

    def test_the_default_is_our_own_account(self) -> None:
        self.assertEqual(self.settings().image_owners, ("self",))
        self.assertEqual(self.settings(image_owners=["self", ACCOUNT]).image_owners, ("self", ACCOUNT))

    def test_an_invalid_owner_is_named(self) -> None:
        for owners in ([], ["me"], ["self", "12345"], ["*"], ["self"] * 21):
            with self.assertRaises(ConfigError) as caught:
                self.settings(image_owners=owners)
            self.assertIn("image_owners", str(caught.exception))


@needs_systemd
class AwsCatalogueTests(AwsCase, TestCase):
    """EC2's images."""

    async def catalogue(self) -> Any:
        provider = await self.started()
        self.assertTrue(IHasCatalogue.providedBy(provider))
        return provider.catalogue  # type: ignore[attr-defined]

    async def find(self, catalogue: Any, name: str) -> CatalogueImage:
        found: CatalogueImage = await self.within(catalogue.find(name, {}))
        return found

    async def test_it_provides_its_interface(self) -> None:
        catalogue = await self.catalogue()
        verifyObject(IImageCatalogue, catalogue)
        self.assertEqual((catalogue.name, catalogue.machine_images), ("aws", True))

    async def test_an_image_is_found_by_its_tags(self) -> None:
        ami = await self.world.machine_image("team/web:1.0")
        await self.world.machine_image("team/web:2.0")
        catalogue = await self.catalogue()
        begun = len(self.world.requests)
        found = await self.find(catalogue, "aws.infranetes.io/team/web:1.0")
        self.assertEqual([one["Action"] for one in self.world.requests[begun:]], ["DescribeImages"])
        self.assertEqual((found.machine, found.names), (ami, ("team/web:1.0",)))
        self.assertEqual(found.digests, (f"team/web@{found.id}",))
        self.assertTrue(is_digest(found.id))
        self.assertEqual(found.size, 15 << 30)
        other = await self.find(catalogue, "team/web:2.0")
        self.assertNotEqual(other.id, found.id)
        again = await self.find(catalogue, f"team/web:1.0@{found.id}")
        self.assertEqual(again, found)
        said = await self.refused(NotFound, catalogue.find(f"team/web:1.0@{other.id}", {}))
        self.assertIn(found.id, str(said))

    async def test_the_newest_of_those_with_the_same_tags(self) -> None:
        old = await self.world.machine_image("web:1.0")
        made = int(time.time())
        await self.until(lambda: int(time.time()) > made, "EC2's dates have seconds")
        while (new := await self.world.machine_image("web:1.0")) > old:  # ids do not tell which is newer
            self.world.deregister(new)
        found = await self.find(await self.catalogue(), "web:1.0")
        self.assertEqual(found.machine, new)

    async def test_only_bootable_images_of_ours_are_found(self) -> None:
        await self.world.machine_image("web:1", infranetes="false")
        await self.world.machine_image("web:10")
        await self.world.machine_image("web:1", source=ARM_IMAGE)
        catalogue = await self.catalogue()
        said = str(await self.refused(NotFound, catalogue.find("web:1", {})))
        for words in ("infranetes=true", "infranetes.image_name=web:1", "self", "x86_64", "aws eu-west-1"):
            self.assertIn(words, said)

    async def test_images_of_configured_owners_are_found(self) -> None:
        ami = await self.world.machine_image("web:1")
        self.settings["image_owners"] = ["999999999999"]
        catalogue = await self.catalogue()
        self.assertIn("999999999999", str(await self.refused(NotFound, catalogue.find("web:1", {}))))
        self.settings["image_owners"] = ["999999999999", ACCOUNT]
        self.assertEqual((await self.find(await self.catalogue(), "web:1")).machine, ami)

    async def test_whether_an_image_still_exists(self) -> None:
        ami = await self.world.machine_image("web:1")
        catalogue = await self.catalogue()
        found = await self.find(catalogue, "web:1")
        self.assertTrue(await self.within(catalogue.present(found)))
        self.world.deregister(ami)
        self.assertFalse(await self.within(catalogue.present(found)))

    async def test_a_disk_does_not_outlive_its_vm_whatever_the_image_says(self) -> None:
        ami = await self.world.machine_image("web:1")
        [image] = self.world.ec2.describe_images(ImageIds=[ami])["Images"]
        self.assertFalse(image["BlockDeviceMappings"][0]["Ebs"]["DeleteOnTermination"])
        provider = await self.started()
        vm = await self.within(provider.launch(self.spec(image=ami)))
        [instance] = self.world.instances()
        self.assertEqual(instance["ImageId"], ami)
        await self.within(provider.destroy(vm.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_a_missing_image_can_not_be_launched(self) -> None:
        provider = await self.started()
        launching = provider.launch(self.spec(image="ami-0123456789abcdef0"))
        self.assertIn("ami-0123456789abcdef0", str(await self.refused(InvalidArgument, launching)))
        self.assertEqual(self.world.holdings(), [])

    async def test_failures_of_the_cloud(self) -> None:
        ami = await self.world.machine_image("web:1")
        unstarted: Any = self.make_provider()
        await self.refused(Unavailable, unstarted.catalogue.find("web:1", {}))
        catalogue = await self.catalogue()
        throttled = self.world.faults.add(FaultKind.THROTTLE, "DescribeImages", times=2)
        self.assertEqual((await self.find(catalogue, "web:1")).machine, ami)
        self.assertEqual(throttled.happened, 2)
        self.world.faults.add(FaultKind.REVOKED, "DescribeImages")
        for asked in (catalogue.find("web:1", {}), catalogue.present(CatalogueImage(DIGEST, machine=ami))):
            self.assertIsInstance(asked, Deferred)
            await self.refused(FailedPrecondition, asked)
        self.world.faults.clear()
