# SPDX-License-Identifier: Apache-2.0
"""Pods of images without our agent on a simulated vCenter."""

from __future__ import annotations

from tests.harness.durations import slow
from tests.harness.needs import needs_programs, needs_systemd, needs_tools
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.infranetes.daemon.guest_pods import GuestPods
from tests.support.clouds import tls, vcsim
from tests.support.clouds.vsphere import SimulatedVcenter


@slow(8, "daemons that are processes, and an SSH server for each guest")
@needs_tools("vcsim")
@needs_programs("sshd")
@needs_systemd
class VsphereGuestTests(GuestPods, CloudDaemonCase):
    """A VM that powers off stays until it is destroyed."""

    provider = "vsphere"
    make_world = SimulatedVcenter

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        vcsim.shared()  # both take a moment, but only once
        tls.certificate()

    def setUp(self) -> None:
        super().setUp()
        self.config["providers"]["vsphere"]["consoles_datastore"] = "LocalDS_0"
