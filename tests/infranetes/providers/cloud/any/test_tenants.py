# SPDX-License-Identifier: Apache-2.0
"""Tenants at a cloud by libcloud."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.infranetes.providers.cloud.any.case import VpsCase
from tests.infranetes.providers.cloud.tenants_case import TenantsContract
from tests.support.clouds.vps import DigitalOcean


class DigitalOceanTenantTests(VpsCase, TenantsContract, TestCase):
    """The tests of all clouds."""

    api = DigitalOcean
    own_keys = ("credentials_file",)
