"""What goes wrong between AWS, GCP and their providers: the same for both."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.infranetes.providers.cloud.case import AwsCase, GcpCase
from tests.infranetes.providers.cloud.faults import LastingFaults, PassingFaults


class AwsPassingFaultTests(AwsCase, PassingFaults, TestCase):
    """EC2's, that are got over."""


class AwsLastingFaultTests(AwsCase, LastingFaults, TestCase):
    """EC2's, that a call fails with."""


class GcpPassingFaultTests(GcpCase, PassingFaults, TestCase):
    """Compute Engine's, that are got over."""


class GcpLastingFaultTests(GcpCase, LastingFaults, TestCase):
    """Compute Engine's, that a call fails with."""
