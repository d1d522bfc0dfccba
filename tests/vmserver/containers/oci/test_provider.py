# SPDX-License-Identifier: Apache-2.0
"""The oci ContainerProvider fulfils the contract, with real conmon and crun."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.contract.container_output import LayersContract, LogContract
from tests.contract.container_provider import ExecContract, LifecycleContract
from tests.contract.container_sessions import SessionContract
from tests.contract.container_usage import UsageContract
from tests.vmserver.containers.oci.provider_case import OciCase


class OciLifecycleTests(OciCase, LifecycleContract, TestCase):
    """Create, start, stop, remove, update, list."""


class OciExecTests(OciCase, ExecContract, TestCase):
    """ExecSync."""


class OciSessionTests(OciCase, SessionContract, TestCase):
    """Live sessions."""


class OciUsageTests(OciCase, UsageContract, TestCase):
    """Stats."""


class OciLogTests(OciCase, LogContract, TestCase):
    """ReadLog."""


class OciImageTests(OciCase, LayersContract, TestCase):
    """Images."""
