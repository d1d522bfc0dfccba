# SPDX-License-Identifier: Apache-2.0
"""Tenants at GCP."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.infranetes.providers.cloud.case import GcpCase
from tests.infranetes.providers.cloud.tenants_case import RangeTests


class GcpTenantTests(GcpCase, RangeTests, TestCase):
    """The tests of all clouds."""

    own_keys = ("project", "subnetwork")
