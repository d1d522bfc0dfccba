# SPDX-License-Identifier: Apache-2.0
"""Pods of images without our agent on a simulated Azure."""

from __future__ import annotations

from tests.harness.durations import slow
from tests.harness.needs import needs_programs, needs_systemd, needs_tools
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.infranetes.daemon.guest_pods import GuestPods
from tests.support.clouds.azure import SimulatedAzure


@slow(8, "daemons that are processes, and an SSH server for each guest")
@needs_tools("wheels")
@needs_programs("sshd")
@needs_systemd
class AzureGuestTests(GuestPods, CloudDaemonCase):
    """A VM that powers off stays until it is deleted."""

    provider = "azure"
    make_world = SimulatedAzure
