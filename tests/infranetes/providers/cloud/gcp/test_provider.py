# SPDX-License-Identifier: Apache-2.0
"""The GCP provider on a simulated Compute Engine over HTTP, whose instances have real agents."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.contract.pod_provider import PodProviderContract
from tests.infranetes.providers.cloud.case import GcpCase


class GcpContractTests(GcpCase, PodProviderContract, TestCase):
    """The contract of all providers."""
