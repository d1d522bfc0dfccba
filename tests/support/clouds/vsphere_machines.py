# SPDX-License-Identifier: Apache-2.0
"""A simulated vCenter whose VMs are machines in namespaces, on a port group without DHCP.

Each has the real agent, which sets the address in its identity and runs real containers. A small program in
it stands for open-vm-tools' vmtoolsd, and this process reports what VMware Tools do: an address, once it
answers.
"""

from __future__ import annotations

import base64
import json
import socket
import time
from pathlib import Path
from typing import Any

from pyVmomi import vim
from twisted.internet.threads import deferToThread

from infranetes.providers.cloud.vsphere.specs import IDENTITY
from infranetes_simulation.machine import AGENT_PORT, guest
from tests.support.clouds import vcsim, vmtoolsd
from tests.support.clouds.instance_machines import InstanceMachines
from tests.support.clouds.vsphere import SimulatedVcenter, Vm

_IDENTITY = f"source = 'vsphere'\ninterface = 'eth0'\nvmtoolsd = '{guest.DISK}/vmtoolsd'"
_ANSWER_SECONDS = 30.0


class SimulatedVcenterMachines(SimulatedVcenter):
    """See `SimulatedVcenter`. VM-image pods are not offered.

    :ivar machines: its VMs."""

    def __init__(self, reactor: Any, directory: Path) -> None:
        super().__init__(reactor, directory)
        self.machines = InstanceMachines(reactor, directory / "vms", _IDENTITY)

    async def stop(self) -> None:
        """Stop everything."""
        await self.machines.stop()
        await super().stop()

    def table(self) -> dict[str, Any]:
        """Return the provider's configuration, which has addresses of the node's own."""
        prefix = self.machines.gateway.rpartition(".")[0]
        return {
            **super().table(),
            "addresses": self.machines.subnet,
            "gateway": self.machines.gateway,
            "address_ranges": [f"{prefix}.10-{prefix}.12"],
        }

    def _turn_on(self, vm: Vm, identity: str) -> None:
        vmtoolsd.write(self.machines.disk(vm.id), identity, guest.DISK)
        self.machines.run(vm.id)

    def _turn_off(self, id: str) -> None:
        self.machines.kill(id)

    async def _boot(self, vm: Vm) -> None:
        there: Any = vim.VirtualMachine(vm.id, self.inventory._stub)
        identity = await deferToThread(lambda: vcsim.extra_config(there).get(IDENTITY, ""))
        self._turn_on(vm, identity)
        network = json.loads(base64.b64decode(identity))["network"]
        vm.address = network["address"].partition("/")[0]
        if await deferToThread(self._thd_answers, vm.address):
            await deferToThread(self.vcsim.reconfigure, there, {"SET.guest.ipAddress": vm.address})

    def _thd_answers(self, address: str) -> bool:
        """Wait until some machine has the address. Return whether one has."""
        until = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < until and not self._stopped:
            try:
                socket.create_connection((address, AGENT_PORT), 1.0).close()
            except ConnectionRefusedError:
                return True
            except OSError:
                time.sleep(0.1)
            else:
                return True
        return False
