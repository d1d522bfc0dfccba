# SPDX-License-Identifier: Apache-2.0
"""The provider of any driver, with libcloud's driver of Vultr on a simulated Vultr."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.contract.pod_provider import PodProviderContract
from tests.infranetes.providers.cloud.any.case import NodesLastingFaults, NodesPassingFaults, VpsCase
from tests.support.clouds.vps import Vultr


class VultrContractTests(VpsCase, PodProviderContract, TestCase):
    """The contract of all providers."""

    api = Vultr


class VultrPassingFaultTests(VpsCase, NodesPassingFaults, TestCase):
    """Transient errors: a call that meets one is retried and succeeds."""

    tells_retry_after = False
    api = Vultr


class VultrLastingFaultTests(VpsCase, NodesLastingFaults, TestCase):
    """Final errors: a call that meets one fails, and its error says why."""

    api = Vultr
