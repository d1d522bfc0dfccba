# SPDX-License-Identifier: Apache-2.0
"""Tenants at vSphere."""

from __future__ import annotations

from collections.abc import Mapping

from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.vsphere.settings import Settings
from infranetes_common.config import structure
from infranetes_common.errors import ConfigError
from tests.infranetes.providers.cloud.tenants_case import TenantsContract
from tests.infranetes.providers.cloud.vsphere.case import SETTINGS, VsphereCase


class VsphereTenantTests(VsphereCase, TenantsContract, TestCase):
    """The tests of all clouds, in one folder and network: VMs' names tell whose they are."""

    own_keys = ("folder", "networks", "resource_pools")

    async def test_addresses_that_the_node_gives_are_no_tenants(self) -> None:
        table = {
            **SETTINGS,
            "addresses": "10.0.0.0/24",
            "gateway": "10.0.0.1",
            "address_ranges": ["10.0.0.10-10.0.0.20"],
        }
        with self.assertRaisesRegex(ConfigError, "tenants.acme: it needs address_ranges of its own"):
            self.read({**table, "tenants": {"acme": {"folder": "acme"}}})
        self.read({**table, "tenants": {"acme": {"folder": "acme", "address_ranges": []}}})

    def read(self, table: Mapping[str, object]) -> None:
        structure(table, Settings, source="file", prefix="providers.vsphere")
