# SPDX-License-Identifier: Apache-2.0
"""Tenants at AWS."""

from __future__ import annotations

from collections.abc import Mapping

from twisted.trial.unittest import TestCase

from infranetes_common.errors import ConfigError
from tests.infranetes.providers.cloud.case import AwsCase
from tests.infranetes.providers.cloud.tenants_case import RangeTests


class AwsTenantTests(AwsCase, RangeTests, TestCase):
    """The tests of all clouds."""

    own_keys = ("image", "subnets", "security_groups")

    async def test_each_has_its_subnet_and_groups_in_the_request(self) -> None:
        group = self.world.group
        one, other = self.world.subnets
        self.settings["tenants"] = {
            "acme": {"subnets": [one], "security_groups": [group]},
            "globex": {"subnets": [other], "security_groups": []},
        }
        begun = len(self.world.requests)
        for tenant in ("acme", "globex"):
            await self.running(await self.of(tenant), self.spec())
        asked = [each for each in self.world.requests[begun:] if each["Action"] == "RunInstances"]
        keys = ("NetworkInterface.1.SubnetId", "NetworkInterface.1.SecurityGroupId.1")
        found = [tuple(each.get(key, "") for key in keys) for each in asked]
        self.assertEqual(found, [(one, group), (other, "")])
        marks = [_tag(each, "infranetes-node") for each in asked]
        self.assertEqual(marks, [f"{self.node}@acme", f"{self.node}@globex"])

    async def test_keys_of_the_provider_do_not_stand_for_a_tenants_profile(self) -> None:
        tenants = self.settings["tenants"]
        self.settings["tenants"] = {"acme": {"profile": "acme"}}
        with self.assertRaisesRegex(ConfigError, r"tenants\.acme\.profile: access_key would go before it"):
            self.made("")
        self.settings["tenants"] = tenants


def _tag(call: Mapping[str, str], key: str) -> str:
    """Return the value of an instance's tag in a request for one."""
    names = [name for name, value in call.items() if value == key and name.endswith(".Key")]
    return call[names[0].replace(".Key", ".Value")]
