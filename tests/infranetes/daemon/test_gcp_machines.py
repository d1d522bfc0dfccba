# SPDX-License-Identifier: Apache-2.0
"""Pods whose image is the VM on a simulated Compute Engine, through the CRI of a daemon that is a process."""

from __future__ import annotations

from tests.harness.durations import slow
from tests.harness.needs import needs_systemd, needs_tools
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.infranetes.daemon.machine_pods import MachinePods
from tests.support.clouds.gce import SimulatedGce


@slow(5, "machines of their own boot, at a simulated cloud")
@needs_tools("wheels")
@needs_systemd
class GcpMachineTests(MachinePods, CloudDaemonCase):
    """Images are selected by labels; one that shuts itself down stays, stopped, until it is deleted."""

    provider = "gcp"
    make_world = SimulatedGce
    size = "e2-small"
    looked_for = (
        "infranetes=true",
        "infranetes-image-name=web",
        "infranetes-image-version=9",
        "test-project",
        "europe-west1",
    )
