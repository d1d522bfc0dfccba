# SPDX-License-Identifier: Apache-2.0
"""Base class for tests of the vSphere provider."""

from __future__ import annotations

from collections.abc import Callable

from tests.contract.pod_provider_case import reactor
from tests.harness.needs import needs_tools
from tests.infranetes.providers.cloud.world_case import WorldCase
from tests.support.clouds import tls, vcsim
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.vsphere import SimulatedVcenter

# The smallest valid configuration.
SETTINGS = {
    "host": "vcenter.example.org",
    "username": "infranetes@vsphere.local",
    "password_file": "/etc/infranetes/vsphere",
    "datacenter": "dc",
    "folder": "pods",
    "image": "templates/guest",
    "resource_pools": ["cluster/Resources"],
    "networks": ["pods"],
}


@needs_tools("vcsim")
class VsphereCase(WorldCase):
    """Tests on a vCenter."""

    provider_name = "vsphere"
    world: SimulatedVcenter

    @classmethod
    def setUpClass(cls) -> None:
        vcsim.shared()  # both take a moment the first time
        tls.certificate()

    def make_world(self) -> SimulatedVcenter:
        return SimulatedVcenter(reactor, self.run_dir / "machines")

    def break_launches(self) -> Callable[[], None]:
        """Answer each launch with an error though the VM is created and powered on."""
        self.world.faults.add(FaultKind.ACTED, "PowerOnVM_Task")
        self.world.faults.add(FaultKind.ACTED, "CloneVM_Task")
        self.settings["retry_seconds"] = 2.0

        def mend() -> None:
            self.world.faults.clear()
            self.settings["retry_seconds"] = 5.0

        return mend
