# SPDX-License-Identifier: Apache-2.0
"""Pods whose image is the VM on a simulated vCenter, through the CRI of a daemon that is a process."""

from __future__ import annotations

from tests.harness.durations import slow
from tests.harness.needs import needs_mounts, needs_tools
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.infranetes.daemon.machine_pods import MachinePods
from tests.support.clouds import tls, vcsim
from tests.support.clouds.vsphere import SimulatedVcenter


@needs_mounts
@slow(5, "machines of their own boot, at a simulated vCenter")
@needs_tools("vcsim")
class VsphereMachineTests(MachinePods, CloudDaemonCase):
    """Images are templates; a VM that shuts itself down stays, powered off, until it is destroyed."""

    provider = "vsphere"
    make_world = SimulatedVcenter
    size = "2cpu-1024mib"
    looked_for = ("web-9", "infranetes.image_name=web:9", "/images", "DC0")

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        vcsim.shared()  # both take a moment, but only once
        tls.certificate()
