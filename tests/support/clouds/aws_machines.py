# SPDX-License-Identifier: Apache-2.0
"""A simulated EC2 whose instances are machines in namespaces, with real containers in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.clouds import moto_answers
from tests.support.clouds.aws import SimulatedAws, Vm
from tests.support.clouds.instance_machines import InstanceMachines


class SimulatedAwsMachines(SimulatedAws):
    """See `SimulatedAws`. VM-image pods and reboots are not offered.

    :ivar machines: its instances."""

    def __init__(self, reactor: Any, directory: Path, cluster: str = "") -> None:
        super().__init__(reactor, directory, cluster)
        self.machines = InstanceMachines(reactor, directory, "source = 'aws'")

    def start(self) -> None:
        """Start a cloud with one subnet, which the machine reaches."""
        super().start()
        self.machines.start(self._imds_site)

    async def stop(self) -> None:
        """Stop everything."""
        await self.machines.stop()
        await super().stop()

    def _make_network(self) -> tuple[tuple[str, ...], str]:
        subnet = self.machines.subnet
        return moto_answers.make_network(self.ec2, subnet, ((subnet, "a"),))

    def _turn_on(self, vm: Vm) -> None:
        self.machines.run(vm.id, vm.address)

    def _turn_off(self, id: str) -> None:
        self.machines.kill(id)
