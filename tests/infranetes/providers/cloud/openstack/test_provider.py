# SPDX-License-Identifier: Apache-2.0
"""The OpenStack provider on a simulated OpenStack over HTTPS, whose servers have real agents."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.contract.pod_provider import PodProviderContract
from tests.infranetes.providers.cloud.case import OpenStackCase


class OpenStackContractTests(OpenStackCase, PodProviderContract, TestCase):
    """The contract of all providers."""
