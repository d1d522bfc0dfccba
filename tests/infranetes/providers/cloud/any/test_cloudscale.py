# SPDX-License-Identifier: Apache-2.0
"""The provider of any driver, with libcloud's driver of cloudscale.ch on a simulated one."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.contract.pod_provider import PodProviderContract
from tests.infranetes.providers.cloud.any.case import NodesPassingFaults, VpsCase
from tests.support.clouds.vps import Cloudscale


class CloudscaleContractTests(VpsCase, PodProviderContract, TestCase):
    """The contract of all providers."""

    api = Cloudscale


class CloudscalePassingFaultTests(VpsCase, NodesPassingFaults, TestCase):
    """Transient errors: a call that meets one is retried and succeeds."""

    api = Cloudscale
