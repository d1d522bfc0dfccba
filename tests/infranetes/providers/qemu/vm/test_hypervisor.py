# SPDX-License-Identifier: Apache-2.0
"""The hypervisors of VMs that boot images."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.contract.hypervisor import HypervisorContract
from tests.harness.needs import needs_netns, needs_qemu
from tests.infranetes.providers.qemu.image_case import HypervisorCase


@needs_netns
@needs_qemu
class QemuHypervisorTests(HypervisorCase, HypervisorContract, TestCase):
    """The contract."""
