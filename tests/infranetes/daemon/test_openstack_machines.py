# SPDX-License-Identifier: Apache-2.0
"""Pods whose image is the VM on a simulated OpenStack, through the CRI of a daemon that is a process."""

from __future__ import annotations

from tests.harness.durations import slow
from tests.harness.needs import needs_systemd, needs_tools
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.infranetes.daemon.machine_pods import MachinePods
from tests.support.clouds.nova_resources import PROJECT
from tests.support.clouds.openstack import SimulatedOpenStack


@slow(5, "machines of their own boot, at a simulated cloud")
@needs_tools("wheels")
@needs_systemd
class OpenStackMachineTests(MachinePods, CloudDaemonCase):
    """Images are selected by properties; a server that shuts itself down stays until it is deleted."""

    provider = "openstack"
    make_world = SimulatedOpenStack
    size = "m1.tiny"
    looked_for = ("infranetes=true", "infranetes_image_name=web", "infranetes_image_version=9", PROJECT)
