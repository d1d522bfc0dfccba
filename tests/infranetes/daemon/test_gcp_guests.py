# SPDX-License-Identifier: Apache-2.0
"""Pods of images without our agent on a simulated Compute Engine."""

from __future__ import annotations

from tests.harness.durations import slow
from tests.harness.needs import needs_programs, needs_systemd
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.infranetes.daemon.guest_pods import GuestPods
from tests.support.clouds.gce import SimulatedGce


@slow(8, "daemons that are processes, and an SSH server for each guest")
@needs_programs("sshd")
@needs_systemd
class GcpGuestTests(GuestPods, CloudDaemonCase):
    """An instance that is stopped stays until it is deleted."""

    provider = "gcp"
    make_world = SimulatedGce
