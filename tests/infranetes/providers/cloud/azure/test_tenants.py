# SPDX-License-Identifier: Apache-2.0
"""Tenants at Azure."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.infranetes.providers.cloud.case import AzureCase
from tests.infranetes.providers.cloud.tenants_case import RangeTests


class AzureTenantTests(AzureCase, RangeTests, TestCase):
    """The tests of all clouds."""

    own_keys = ("resource_group", "subnet")
