# SPDX-License-Identifier: Apache-2.0
"""Faults between AWS, GCP and their providers: the same tests for both."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.infranetes.providers.cloud.case import AwsCase, GcpCase
from tests.infranetes.providers.cloud.faults import FamilyQuotas, LastingFaults, PassingFaults


class AwsPassingFaultTests(AwsCase, PassingFaults, TestCase):
    """EC2's transient errors: a call that meets one is retried and succeeds."""


class AwsLastingFaultTests(AwsCase, LastingFaults, TestCase):
    """EC2's final errors: a call that meets one fails, and its error says why."""


class AwsFamilyQuotaTests(AwsCase, FamilyQuotas, TestCase):
    """EC2's limits of vCPUs."""


class GcpPassingFaultTests(GcpCase, PassingFaults, TestCase):
    """Compute Engine's transient errors: a call that meets one is retried and succeeds."""


class GcpLastingFaultTests(GcpCase, LastingFaults, TestCase):
    """Compute Engine's final errors: a call that meets one fails, and its error says why."""


class GcpFamilyQuotaTests(GcpCase, FamilyQuotas, TestCase):
    """Compute Engine's quotas of CPUs."""
