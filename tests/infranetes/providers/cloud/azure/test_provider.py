# SPDX-License-Identifier: Apache-2.0
"""The Azure provider on a simulated Azure over HTTP, whose VMs have real agents."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.contract.pod_provider import PodProviderContract
from tests.infranetes.providers.cloud.case import AzureCase


class AzureContractTests(AzureCase, PodProviderContract, TestCase):
    """The contract of all providers."""
