# SPDX-License-Identifier: Apache-2.0
"""The oci ContainerProvider fulfils the contract, with real conmon and crun."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.contract.container_output import LayersContract, LogContract
from tests.contract.container_provider import ExecContract, LifecycleContract
from tests.contract.container_sessions import SessionContract
from tests.contract.container_usage import UsageContract
from tests.harness.needs import needs_crun
from tests.vmserver.containers.oci.provider_case import OciCase


@needs_crun
class OciLifecycleTests(OciCase, LifecycleContract, TestCase):
    """Create, start, stop, remove, update, list."""


@needs_crun
class OciExecTests(OciCase, ExecContract, TestCase):
    """ExecSync."""


@needs_crun
class OciSessionTests(OciCase, SessionContract, TestCase):
    """Live sessions."""


@needs_crun
class OciUsageTests(OciCase, UsageContract, TestCase):
    """Stats."""


@needs_crun
class OciLogTests(OciCase, LogContract, TestCase):
    """ReadLog."""


@needs_crun
class OciImageTests(OciCase, LayersContract, TestCase):
    """Images."""
