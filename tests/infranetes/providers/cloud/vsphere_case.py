# SPDX-License-Identifier: Apache-2.0
"""Base class for tests of the vSphere provider."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from infranetes.providers.interface import Instance
from tests.contract.pod_provider_case import ProviderCase, reactor
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


class VsphereCase(ProviderCase):
    """A simulated vCenter for each test."""

    provider_name = "vsphere"
    boot_timeout: ClassVar[float] = 30.0
    agent_timeout: ClassVar[float] = 60.0
    interrupt_after = (0.05, 0.5)

    @classmethod
    def setUpClass(cls) -> None:
        vcsim.shared()  # both take a moment the first time
        tls.certificate()

    def setUp(self) -> Any:
        self.cluster = f"contract-{secrets.token_hex(4)}"  # type: ignore[misc]
        result = super().setUp()
        self.world = SimulatedVcenter(reactor, self.run_dir / "machines")
        self.world.start()
        self.settings: dict[str, Any] = self.world.table()
        return result

    def table(self) -> Mapping[str, Any]:
        return self.settings

    async def end_from_outside(self, instance: Instance) -> None:
        self.world.end(instance.id)

    def break_launches(self) -> Callable[[], None]:
        """Answer each launch with an error though the VM is created and powered on."""
        self.world.faults.add(FaultKind.ACTED, "PowerOnVM_Task")
        self.world.faults.add(FaultKind.ACTED, "CloneVM_Task")
        self.settings["retry_seconds"] = 2.0

        def mend() -> None:
            self.world.faults.clear()
            self.settings["retry_seconds"] = 5.0

        return mend

    def leftovers(self) -> list[str]:
        return self.world.holdings()

    async def finish(self) -> None:
        await self.world.stop()
