# SPDX-License-Identifier: Apache-2.0
"""The provider of any driver, with libcloud's driver of DigitalOcean on a simulated DigitalOcean."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.contract.pod_provider import PodProviderContract
from tests.infranetes.providers.cloud.any.case import NodesLastingFaults, NodesPassingFaults, VpsCase
from tests.support.clouds.vps import DigitalOcean


class DigitalOceanContractTests(VpsCase, PodProviderContract, TestCase):
    """The contract of all providers."""

    api = DigitalOcean


class DigitalOceanPassingFaultTests(VpsCase, NodesPassingFaults, TestCase):
    """Transient errors: a call that meets one is retried and succeeds."""

    api = DigitalOcean


class DigitalOceanLastingFaultTests(VpsCase, NodesLastingFaults, TestCase):
    """Final errors: a call that meets one fails, and its error says why."""

    api = DigitalOcean
