# SPDX-License-Identifier: Apache-2.0
"""What a VM's tap is connected to: the provider's own bridge."""

from __future__ import annotations

from typing import Protocol

from infranetes.providers.qemu import clone
from infranetes.providers.qemu.pod_network import PodNetwork
from infranetes.providers.qemu.vm import Vm
from infranetes_common.identity import Network
from infranetes_common.pod_firewall import PodFirewall


class Uplink(Protocol):
    """Connects VMs' taps. Each method that changes something is idempotent."""

    async def address(self, vm: Vm) -> str:
        """The address that a new VM will have; nothing is made for it.

        :raise FailedPrecondition: the VM can't be connected; the message says what has to be changed.
        """

    async def join(self, vm: Vm) -> None:
        """Connect the tap of a VM that does not execute yet.

        :raise InfranetesError: it is not connected.
        """

    async def leave(self, vm: Vm) -> None:
        """Let go of what belongs to a VM that is no more."""

    async def guest_network(self, vm: Vm) -> Network:
        """What the guest is told of its network."""

    async def set_firewall(self, vm: Vm, firewall: PodFirewall) -> None:
        """Put a VM's firewall in force, now and after a restart.

        :raise FailedPrecondition: there are none here. :raise Unavailable: the one before is in force.
        """


class BridgeUplink:
    """Taps are ports of the provider's bridge, and addresses are of its subnet. See `Uplink`."""

    def __init__(self, network: PodNetwork) -> None:
        self._network = network

    async def address(self, vm: Vm) -> str:
        return vm.record.address  # chosen when it was reserved

    async def join(self, vm: Vm) -> None:
        await self._network.join(vm.record.bridge_port)

    async def leave(self, vm: Vm) -> None:
        await self._network.leave(vm.record.bridge_port)

    async def guest_network(self, vm: Vm) -> Network:
        return clone.guest_network(vm.record, await self._network.subnet(), self._network.bridge.mtu)

    async def set_firewall(self, vm: Vm, firewall: PodFirewall) -> None:
        await self._network.set_firewall(vm.record.bridge_port, vm.paths.directory, firewall)
