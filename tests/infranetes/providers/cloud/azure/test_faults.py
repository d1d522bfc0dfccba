# SPDX-License-Identifier: Apache-2.0
"""Faults between Azure and its provider: the same tests as for AWS and GCP."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.infranetes.providers.cloud.case import AzureCase
from tests.infranetes.providers.cloud.faults import FamilyQuotas, LastingFaults, PassingFaults


class AzurePassingFaultTests(AzureCase, PassingFaults, TestCase):
    """Transient errors: a call that meets one is retried and succeeds."""


class AzureLastingFaultTests(AzureCase, LastingFaults, TestCase):
    """Final errors: a call that meets one fails, and its error says why."""


class AzureFamilyQuotaTests(AzureCase, FamilyQuotas, TestCase):
    """Azure's quotas of cores."""
