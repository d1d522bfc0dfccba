# SPDX-License-Identifier: Apache-2.0
"""The uplink of a VM's tap: the provider's own bridge, or a link in a namespace that another program made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from twisted.logger import Logger

from infranetes.providers.interface import Attachment
from infranetes.providers.machine_images import Names
from infranetes.providers.qemu.dhcp.servers import Guest, Servers
from infranetes.providers.qemu.network.namespaces import Namespaces
from infranetes.providers.qemu.network.pod_network import PodNetwork
from infranetes.providers.qemu.vm.vm import Vm
from infranetes.providers.subnet import gateway
from infranetes_common.concurrency import settled, start
from infranetes_common.errors import FailedPrecondition, InfranetesError
from infranetes_common.identity import Network
from infranetes_common.pod_firewall import PodFirewall

_log = Logger()


class Uplink(Protocol):
    """Connects VMs' taps. Each method that changes something is idempotent."""

    async def prepare(self) -> None:
        """Find out whether VMs can be connected. :raise FailedPrecondition: they can't be."""

    async def addresses(self, vm: Vm) -> Sequence[str]:
        """Return the addresses that a new VM will have, first one of IPv4; nothing is made for them.

        :raise FailedPrecondition: the VM can't be connected; the message says what has to be changed.
        """

    async def join(self, vm: Vm) -> None:
        """Connect the tap of a VM that does not execute yet.

        :raise InfranetesError: it is not connected.
        """

    async def leave(self, vm: Vm) -> None:
        """Release what belongs to a VM that no longer exists."""

    async def guest_network(self, vm: Vm) -> Network:
        """Return the network configuration that the guest is given."""

    async def set_firewall(self, vm: Vm, firewall: PodFirewall) -> None:
        """Put a VM's firewall in force, now and after a restart.

        :raise FailedPrecondition: there are none here. :raise Unavailable: the one before is in force.
        """


class BridgeUplink:
    """Taps are ports of the provider's bridge, and addresses are of its subnet. See `Uplink`."""

    def __init__(self, network: PodNetwork) -> None:
        self._network = network

    async def prepare(self) -> None:
        pass  # the bridge is set up with the provider

    async def addresses(self, vm: Vm) -> Sequence[str]:
        return [vm.record.address]  # chosen when the VM was reserved

    async def join(self, vm: Vm) -> None:
        await self._network.join(vm.record.bridge_port)

    async def leave(self, vm: Vm) -> None:
        await self._network.leave(vm.record.bridge_port)

    async def guest_network(self, vm: Vm) -> Network:
        subnet = await self._network.subnet()
        return Network(
            mac=vm.record.bridge_port.mac,
            address=f"{vm.record.address}/{subnet.prefixlen}",
            gateway=str(gateway(subnet)),
            mtu=self._network.bridge.mtu,
        )

    async def set_firewall(self, vm: Vm, firewall: PodFirewall) -> None:
        await self._network.set_firewall(vm.record.bridge_port, vm.paths.directory, firewall)


class NamespaceUplink:
    """Taps take the place of links in the namespaces that VMs' records name. See `Uplink`.

    :param in_use: whether there will be such VMs.
    """

    def __init__(self, namespaces: Namespaces, in_use: bool) -> None:
        self._namespaces = namespaces
        self._in_use = in_use

    async def prepare(self) -> None:
        if self._in_use:
            await self._namespaces.self_test()

    async def addresses(self, vm: Vm) -> Sequence[str]:
        network = await self.guest_network(vm)
        return [address.partition("/")[0] for address in (network.address, *network.more)]

    async def join(self, vm: Vm) -> None:
        network = await self.guest_network(vm)
        await self._namespaces.join(_attachment(vm), vm.record.tap, network.mtu)

    async def leave(self, vm: Vm) -> None:
        pass  # all that was made disappears with the tap

    async def guest_network(self, vm: Vm) -> Network:
        if vm.taken_over is None:
            vm.taken_over = await self._namespaces.read(_attachment(vm))
        return vm.taken_over

    async def set_firewall(self, vm: Vm, firewall: PodFirewall) -> None:
        raise FailedPrecondition("the pod is in a CNI's network, where the CNI's own policies hold")


def _attachment(vm: Vm) -> Attachment:
    assert vm.record.attachment is not None, "it is on the bridge"
    return vm.record.attachment


def _guest(vm: Vm) -> Guest:
    return Guest(vm.record.tap, vm.record.attachment, vm.paths.directory)


class UplinkOfRecord:
    """Uses for each VM the uplink that its record names; tells VMs their network by DHCP. See `Uplink`."""

    def __init__(self, bridge: Uplink, namespaces: Uplink, dhcp: Servers) -> None:
        self._bridge = bridge
        self._namespaces = namespaces
        self._dhcp = dhcp

    async def prepare(self) -> None:
        await self._bridge.prepare()
        await self._namespaces.prepare()

    async def addresses(self, vm: Vm) -> Sequence[str]:
        return await self._of(vm).addresses(vm)

    async def join(self, vm: Vm) -> None:
        await self._of(vm).join(vm)

    async def tell(self, vm: Vm, names: Names) -> None:
        """Tell a connected VM by DHCP, from now on, what its network is, until it leaves. Idempotent.

        :raise InfranetesError: it can't be told.
        """
        await self._dhcp.serve(_guest(vm), await self.guest_network(vm), names)

    async def resume(self, vms: Iterable[Vm]) -> None:
        """Go on to tell VMs that earlier daemons told of their network. Idempotent."""
        await settled([start(self._resume(vm)) for vm in vms])

    async def _resume(self, vm: Vm) -> None:
        try:
            await self._dhcp.resume(_guest(vm), partial(self.guest_network, vm))
        except InfranetesError as error:  # the VM goes on with what it was told
            _log.warn("VM {vm} is told its network no more: {error}", vm=vm.record.id, error=str(error))

    async def close(self) -> None:
        """Tell nobody any more. The next daemon may resume."""
        await self._dhcp.close()

    def has_address(self, vm: Vm) -> bool:
        """Return whether a VM has asked for its address and was given it, by whichever daemon."""
        return self._dhcp.has_address(vm.record.tap)

    async def leave(self, vm: Vm) -> None:
        await self._dhcp.stop(vm.record.tap)
        await self._of(vm).leave(vm)

    async def guest_network(self, vm: Vm) -> Network:
        return await self._of(vm).guest_network(vm)

    async def set_firewall(self, vm: Vm, firewall: PodFirewall) -> None:
        await self._of(vm).set_firewall(vm, firewall)

    def _of(self, vm: Vm) -> Uplink:
        return self._bridge if vm.record.on_bridge else self._namespaces
