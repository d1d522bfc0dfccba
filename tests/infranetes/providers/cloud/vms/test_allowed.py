# SPDX-License-Identifier: Apache-2.0
"""Annotations that pods may use: none that costs money, grants rights or opens access, unless allowed."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.annotations import PREFIX, Wishes, read
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vms.allowed import check_allowed
from infranetes_common.errors import InvalidArgument
from tests.infranetes.providers.cloud.case import AwsCase, AzureCase, GcpCase, OpenStackCase
from tests.infranetes.providers.cloud.vsphere.case import VsphereCase
from tests.infranetes.providers.cloud.world_case import WorldCase

ACCOUNT = "web@test-project.iam.gserviceaccount.com"


def allowing(**keys: Any) -> CloudSettings:
    return CloudSettings(**keys)


class CheckTests(SynchronousTestCase):
    def check(self, annotations: dict[str, str], settings: CloudSettings, granted: Any = ()) -> None:
        check_allowed(read(annotations), granted, settings, "aws")

    def refused(self, annotations: dict[str, str], settings: CloudSettings, granted: Any = ()) -> str:
        return str(self.assertRaises(InvalidArgument, self.check, annotations, settings, granted))

    def test_whoever_asks_for_nothing_is_refused_nothing(self) -> None:
        check_allowed(Wishes(), (), allowing(), "aws")
        self.check({"infranetes.io/public-address": "false", "infranetes.io/spot": "true"}, allowing())

    def test_patterns_mean_whole_values(self) -> None:
        profile = {"infranetes.io/instance-profile": "web-front"}
        for pattern in ("web-front", "web-*", "web-fron?", "*"):
            self.check(profile, allowing(allowed_instance_profiles=("other", pattern)))
        for pattern in ("web", "front", "WEB-*", "", "web-front "):
            self.refused(profile, allowing(allowed_instance_profiles=(pattern,)))

    def test_each_of_several_groups_has_to_be_allowed(self) -> None:
        settings = allowing(allowed_security_groups=("sg-web*",))
        groups = "infranetes.io/security-groups"
        self.check({groups: "sg-web1, sg-web2"}, settings)
        said = self.refused({groups: "sg-web1,sg-db"}, settings)
        for word in (groups, "'sg-db'", "providers.aws.allowed_security_groups"):
            self.assertIn(word, said)

    def test_earlier_names_are_limited_as_well(self) -> None:
        self.refused({"infranetes.aws.securtiygroup": "sg-db"}, allowing())
        self.refused({"infranetes.aws.iaminstancename": "admin"}, allowing())

    def test_what_the_configuration_itself_gives_is_not_limited_and_all_else_is(self) -> None:
        given = {"infranetes.io/subnet": "tenants", "infranetes.io/instance-profile": "web"}
        self.check(given, allowing(), frozenset(given))
        self.check({"infranetes.io/subnet": "tenants"}, allowing(), frozenset({"infranetes.aws.subnet"}))
        self.assertIn(
            "subnet", self.refused(given, allowing(), frozenset({"infranetes.io/instance-profile"}))
        )


class LaunchTests:
    """With each cloud. Nested, so that the clouds' cases are run and this one is not."""

    class Case(WorldCase, TestCase):
        limited: tuple[tuple[str, str, str], ...]  # an annotation without its prefix, a value, the key

        async def test_what_is_not_allowed_is_refused_before_there_is_anything(self) -> None:
            provider = await self.started()
            for name, value, key in self.limited:
                annotation = f"{PREFIX}{name}"
                launch = provider.launch(self.spec(annotations={annotation: value}))
                said = str(await self.refused(InvalidArgument, launch))
                for word in (annotation, repr(value), f"providers.{self.provider_name}.{key}"):
                    self.assertIn(word, said)
            self.assertEqual(self.world.holdings(), [])


class AwsLaunchTests(AwsCase, LaunchTests.Case):
    limited = (
        ("image", "ami-760aaa0f", "allowed_images"),
        ("subnet", "subnet-0123456789abcdef0", "allowed_subnets"),
        ("security-groups", "sg-0123456789abcdef0", "allowed_security_groups"),
        ("instance-profile", "admin", "allowed_instance_profiles"),
        ("elastic-address", "new", "allowed_elastic_addresses"),
        ("public-address", "true", "allow_public_address"),
    )

    async def test_a_handlers_own_choice_is_served(self) -> None:
        given = {f"{PREFIX}subnet": self.world.subnets[1], f"{PREFIX}security-groups": self.world.group}
        provider = await self.started()
        spec = self.spec(annotations=given, granted=frozenset(given))
        await self.within(provider.launch(spec))
        [launch] = [one for one in self.world.requests if one["Action"] == "RunInstances"]
        self.assertEqual(launch["NetworkInterface.1.SubnetId"], self.world.subnets[1])


class GcpLaunchTests(GcpCase, LaunchTests.Case):
    limited = (
        ("image", "other", "allowed_images"),
        ("subnet", "others", "allowed_subnets"),
        ("security-groups", "open", "allowed_security_groups"),
        ("instance-profile", ACCOUNT, "allowed_instance_profiles"),
        ("elastic-address", "new", "allowed_elastic_addresses"),
        ("public-address", "true", "allow_public_address"),
    )


class AzureLaunchTests(AzureCase, LaunchTests.Case):
    limited = (
        ("image", "others/pod", "allowed_images"),
        ("subnet", "network/others", "allowed_subnets"),
        ("security-groups", "open", "allowed_security_groups"),
        ("instance-profile", "admin", "allowed_instance_profiles"),
        ("elastic-address", "new", "allowed_elastic_addresses"),
        ("public-address", "true", "allow_public_address"),
    )


class OpenStackLaunchTests(OpenStackCase, LaunchTests.Case):
    limited = (
        ("image", "other", "allowed_images"),
        ("subnet", "inner", "allowed_subnets"),
        ("security-groups", "open", "allowed_security_groups"),
        ("elastic-address", "new", "allowed_elastic_addresses"),
        ("public-address", "true", "allow_public_address"),
    )


class VsphereLaunchTests(VsphereCase, LaunchTests.Case):
    limited = (("image", "web-1.0", "allowed_images"),)

    async def test_networks_may_be_allowed_one_by_one(self) -> None:
        self.settings["allowed_subnets"] = ["another"]
        provider = await self.started()
        launch = provider.launch(self.spec(annotations={f"{PREFIX}subnet": "DC0_DVPG1"}))
        said = str(await self.refused(InvalidArgument, launch))
        self.assertIn("providers.vsphere.allowed_subnets", said)
