# SPDX-License-Identifier: Apache-2.0
"""The vSphere provider on govmomi's simulated vCenter over HTTPS, whose VMs have real agents."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.contract.pod_provider import PodProviderContract
from tests.harness.needs import needs_tools
from tests.infranetes.providers.cloud.vsphere.case import VsphereCase


@needs_tools("vcsim")
class VsphereContractTests(VsphereCase, PodProviderContract, TestCase):
    """The contract of all providers."""
