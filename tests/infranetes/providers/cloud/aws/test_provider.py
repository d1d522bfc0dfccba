# SPDX-License-Identifier: Apache-2.0
"""The AWS provider on a simulated EC2 over HTTP, whose instances have real agents."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.contract.pod_provider import PodProviderContract
from tests.infranetes.providers.cloud.case import AwsCase


class AwsContractTests(AwsCase, PodProviderContract, TestCase):
    """The contract of all providers."""
