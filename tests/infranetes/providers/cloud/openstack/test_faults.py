# SPDX-License-Identifier: Apache-2.0
"""Faults between OpenStack and its provider: the same tests as for AWS and GCP."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.infranetes.providers.cloud.case import OpenStackCase
from tests.infranetes.providers.cloud.faults import LastingFaults, PassingFaults


class OpenStackPassingFaultTests(OpenStackCase, PassingFaults, TestCase):
    """Transient errors: a call that meets one is retried and succeeds."""


class OpenStackLastingFaultTests(OpenStackCase, LastingFaults, TestCase):
    """Final errors: a call that meets one fails, and its error says why."""
