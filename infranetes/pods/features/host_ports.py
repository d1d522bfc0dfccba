# SPDX-License-Identifier: Apache-2.0
"""Host ports as a feature of pods: ports of the node that lead to a pod, which `hostports` forwards."""

from __future__ import annotations

from collections.abc import Iterable

from twisted.logger import Logger

from infranetes.hostports.hostports import HostPorts, PodPorts
from infranetes.hostports.mappings import host_ports_of
from infranetes.pods.node.handler_config import CNI
from infranetes.pods.node.handlers import Handler
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.store.states import SandboxState
from infranetes_common.concurrency import start
from infranetes_common.wire import cri

_log = Logger()


class PodHostPorts(PodFeature):
    """The host ports of this node's pods."""

    name = "host ports"

    def __init__(self, ports: HostPorts, inventory: Inventory) -> None:
        self._ports = ports
        self._inventory = inventory

    def check(self, handler: Handler, config: cri.PodSandboxConfig) -> None:
        if handler.network != CNI:  # CNI plug-ins forward the ports themselves
            self._ports.check(host_ports_of(config), taken_ports(self._inventory))

    async def answered(self, sandbox: Sandbox) -> None:
        ports = ports_of(sandbox)
        if sandbox.record.network != CNI:
            await self._ports.take_over(ports)
        await self._ports.put(ports)

    def lost(self, sandbox: Sandbox) -> None:
        closed = start(self._ports.remove(sandbox.id))
        closed.addErrback(
            lambda failure: _log.error(
                "host ports still lead to the VM of sandbox {sandbox}, which is lost: {error}",
                sandbox=sandbox.id,
                error=failure.value,
            )
        )

    async def address_released(self, id: str) -> None:
        await self._ports.remove(id)

    async def resume(self, inventory: Inventory) -> None:
        await self._ports.restore(ports_in_force(inventory))

    async def sweep(self) -> None:
        await self._ports.sweep()


def ports_of(sandbox: Sandbox) -> PodPorts:
    """Return the host ports of one sandbox; none where the node's CNI forwards them."""
    asked = () if sandbox.record.network == CNI else host_ports_of(sandbox.config)
    return PodPorts(sandbox.id, sandbox.pod, asked, sandbox.record.address)


def taken_ports(sandboxes: Iterable[Sandbox]) -> list[PodPorts]:
    """Return the host ports that are taken, so that no other sandbox may have them."""
    return [ports_of(one) for one in sandboxes if one.state is not SandboxState.STOPPED]


def ports_in_force(sandboxes: Iterable[Sandbox]) -> list[PodPorts]:
    """Return the host ports that are forwarded. A lost VM's are not: its address may be another's by now.

    Of several sandboxes with one address the newest has the VM, and the others' is gone without a word."""
    ready = [one for one in sandboxes if one.state is SandboxState.READY and one.record.network != CNI]
    ready.sort(key=lambda one: one.record.created_at)
    return [ports_of(one) for one in {one.record.address: one for one in ready}.values()]
