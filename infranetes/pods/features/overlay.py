# SPDX-License-Identifier: Apache-2.0
"""The network that a pod asks for, and the overlay as a feature of pods: how a VM joins the pods' network."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from twisted.logger import Logger

from infranetes.overlay.overlay import Overlay
from infranetes.pods.node.handler_config import CNI
from infranetes.pods.node.handlers import Handler, Handlers
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.store.records import POD_CIDR, Contents
from infranetes.pods.store.states import SandboxState
from infranetes.providers.annotations import PREFIX, network
from infranetes.providers.interface import IInVpc
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotOffered
from infranetes_common.wire import cri, vmserver

_HAS_LEASE = (SandboxState.LAUNCHING, SandboxState.BOOTING, SandboxState.READY, SandboxState.LOST)
_HAS_TUNNEL = (SandboxState.READY, SandboxState.LOST)

_log = Logger()


class NetworkChoice(PodFeature):
    """Refuses pods that can't have the network that they ask for.

    :param default: as for `Handler.network_of`."""

    name = "choices of networks"

    def __init__(self, default: str) -> None:
        self._default = default

    def check(self, handler: Handler, config: cri.PodSandboxConfig) -> None:
        """Check that the pod can have the network that it asks for.

        :raise InvalidArgument: this pod can't have that network; the message says what to do.
        :raise FailedPrecondition: this node can't provide it, or not yet; the message says what to do."""
        asked = network(config.annotations)
        node_provider = handler.node_provider
        if handler.network == CNI:
            _check_cni(config, asked)
        elif node_provider.overlay is not None:
            if handler.network_of(config.annotations, self._default) == "overlay":
                node_provider.overlay.check()
        elif IInVpc.providedBy(node_provider.provider):
            if asked == "overlay":
                raise InvalidArgument(
                    f"annotation {PREFIX}network: overlay: the addresses of this node's subnet are those of "
                    "another provider's pods; leave it out, or have the pod scheduled to other nodes"
                )
        elif asked == "vpc":
            raise InvalidArgument(
                f"annotation {PREFIX}network: vpc: provider {node_provider.name} gives pods "
                "addresses of the node's own; leave it out, or have the pod scheduled to other nodes"
            )


def _check_cni(config: cri.PodSandboxConfig, asked: str) -> None:
    if asked:
        raise InvalidArgument(
            f"annotation {PREFIX}network: {asked}: the pods of this RuntimeClass are in the network of the "
            "node's CNI; leave it out, or choose another one"
        )
    if config.linux.security_context.namespace_options.network == cri.NODE:
        raise InvalidArgument(
            "hostNetwork: a VM can't have the node's own network; leave out the pod's runtimeClassName"
        )


class PodOverlay(PodFeature):
    """Gives pods addresses of the pods' network if that is theirs, and their VMs tunnels to the node."""

    name = "addresses and tunnels of the pods' network"

    def __init__(
        self, overlay: Overlay, inventory: Inventory, providers: Providers, handlers: Handlers
    ) -> None:
        self._overlay = overlay
        self._inventory = inventory
        self._providers = providers
        self._handlers = handlers

    async def answered(self, sandbox: Sandbox) -> None:
        """Give the pod an address of the pods' network, if that is its network.

        :raise InfranetesError: the pod can't get an address there."""
        record = sandbox.record
        if self._providers.of(record).overlay is None:
            return
        handler, annotations = self._handlers.of(record), sandbox.config.annotations
        chosen = record.network or handler.network_of(annotations, self._handlers.network)
        if chosen != "overlay":
            return
        instance = sandbox.machine.instance
        if instance is not None and instance.agent_host not in ("", instance.address):
            raise FailedPrecondition(
                f"sandbox {sandbox.id}: a tunnel needs the VM's address in the cloud's network, and the node "
                "reaches the VM by another one (agent_address); leave the pod in the VPC"
            )
        address = self._overlay.lease(sandbox.id)
        if record.address != address:  # the record is on the disk before anyone learns the address
            await self._inventory.save(sandbox, attrs.evolve(record, address=address))
        await self._join(sandbox)

    async def live(self, sandbox: Sandbox) -> None:
        """Have a reconnected VM set up its end of the tunnel again, which it has lost if it rebooted."""
        if sandbox.state is SandboxState.READY and self._overlay.knows(sandbox.id):
            await self._join(sandbox)

    async def address_released(self, id: str) -> None:
        await self._overlay.remove(id)

    async def load(self, contents: Contents) -> None:
        """Use the subnet that UpdateRuntimeConfig has set, if it has."""
        if subnet := contents.settings.get(POD_CIDR, ""):
            self._overlay.configure(subnet)

    async def resume(self, inventory: Inventory) -> None:
        """Restore the addresses and tunnels of the sandboxes."""
        await self._overlay.restore(dict(self._recorded(inventory)))
        for sandbox in inventory:
            if sandbox.watch is not None and sandbox.watch.live:  # it connected during `restore`
                start(self.live(sandbox)).addErrback(
                    lambda failure, sandbox: _log.warn(
                        "sandbox {sandbox}: its VM can't join the pods' network again: {error}",
                        sandbox=sandbox.id,
                        error=failure.value,
                    ),
                    sandbox,
                )

    def _recorded(self, inventory: Inventory) -> Iterator[tuple[str, tuple[str, str]]]:
        for sandbox in inventory:
            record = sandbox.record
            if sandbox.state in _HAS_LEASE and self._overlay.has(record.address):
                host = record.agent_host if sandbox.state in _HAS_TUNNEL else ""
                yield sandbox.id, (record.address, host)

    async def sweep(self) -> None:
        await self._overlay.sweep()

    async def stop(self) -> None:
        await self._overlay.stop()

    async def _join(self, sandbox: Sandbox) -> None:
        host = sandbox.record.agent_host
        invitation = await self._overlay.invite(sandbox.id, host)
        request = vmserver.JoinPodNetworkRequest(
            address=invitation.address,
            gateway=invitation.gateway,
            node_host=invitation.node_host,
            port=invitation.port,
            mtu=invitation.mtu,
            networks=invitation.networks,
        )
        try:
            mtu = await sandbox.machine.connect().join_pod_network(request)
        except NotOffered as error:
            raise FailedPrecondition(
                f"sandbox {sandbox.id}: its VM can't join the pods' network: {error}, or leave it in the VPC"
            ) from None
        await self._overlay.put(sandbox.id, host, mtu)
