# SPDX-License-Identifier: Apache-2.0
"""The network from which a sandbox's pod has its address, and how its VM joins the pods' network."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from twisted.logger import Logger

from infranetes.overlay.overlay import Overlay
from infranetes.pods.node.context import NodeContext
from infranetes.pods.node.handler_config import CNI
from infranetes.pods.node.handlers import Handler
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.store.states import SandboxState
from infranetes.providers.annotations import PREFIX, network
from infranetes.providers.interface import IInVpc
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, Unimplemented
from infranetes_common.wire import cri, vmserver

_HAS_LEASE = (SandboxState.LAUNCHING, SandboxState.BOOTING, SandboxState.READY, SandboxState.LOST)
_HAS_TUNNEL = (SandboxState.READY, SandboxState.LOST)

_log = Logger()


def network_of(node: NodeContext, handler: Handler, config: cri.PodSandboxConfig) -> str:
    """Return the network of the pod's address, as recorded: CNI, one of NETWORKS, or "" without a choice."""
    if handler.network == CNI:
        return CNI
    chosen = network(config.annotations) or handler.network
    return chosen or (node.network if handler.side.overlay is not None else "")


def check_network(node: NodeContext, handler: Handler, config: cri.PodSandboxConfig) -> None:
    """Check that the pod can have the network that it asks for.

    :raise InvalidArgument: this pod can't have that network; the message says what to do.
    :raise FailedPrecondition: this node can't provide it, or not yet; the message says what to do."""
    asked = network(config.annotations)
    side = handler.side
    if handler.network == CNI:
        _check_cni(config, asked)
    elif side.overlay is not None:
        if network_of(node, handler, config) == "overlay":
            side.overlay.check()
    elif IInVpc.providedBy(side.provider):
        if asked == "overlay":
            raise InvalidArgument(
                f"annotation {PREFIX}network: overlay: the addresses of this node's subnet are those of "
                "another provider's pods; leave it out, or have the pod scheduled to other nodes"
            )
    elif asked == "vpc":
        raise InvalidArgument(
            f"annotation {PREFIX}network: vpc: provider {side.name} gives pods "
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


async def join_pod_network(node: NodeContext, sandbox: Sandbox) -> None:
    """Give the pod an address of the pods' network, if that is its network. Idempotent.

    :raise InfranetesError: the pod can't get an address there."""
    record = sandbox.record
    overlay = node.side_of(record).overlay
    if overlay is None:
        return
    chosen = record.network or network_of(node, node.handler_of(record), sandbox.config)
    if chosen != "overlay":
        return
    instance = sandbox.machine.instance
    if instance is not None and instance.agent_host not in ("", instance.address):
        raise FailedPrecondition(
            f"sandbox {sandbox.id}: a tunnel needs the VM's address in the cloud's network, and the node "
            "reaches the VM by another one (agent_address); leave the pod in the VPC"
        )
    address = overlay.lease(sandbox.id)
    if record.address != address:  # the record is on the disk before anyone learns the address
        await node.save(sandbox, attrs.evolve(record, address=address))
    await _join(overlay, sandbox)


def join_again(node: NodeContext, sandbox: Sandbox) -> None:
    """Have a reconnected VM set up its end of the tunnel again, which it has lost if it rebooted."""
    overlay = node.overlay
    if overlay is not None and sandbox.state is SandboxState.READY and overlay.knows(sandbox.id):
        start(_join(overlay, sandbox)).addErrback(
            lambda failure: _log.warn(
                "sandbox {sandbox}: its VM can't join the pods' network again: {error}",
                sandbox=sandbox.id,
                error=failure.value,
            )
        )


async def restore_pod_network(node: NodeContext, pod_cidr: str) -> None:
    """Restore, after a start of the daemon, the addresses and tunnels of the sandboxes in the inventory.

    :param pod_cidr: the subnet that UpdateRuntimeConfig has set; "": none."""
    overlay = node.overlay
    if overlay is None:
        return
    if pod_cidr:
        overlay.configure(pod_cidr)
    await overlay.restore(dict(_found(node, overlay)))
    for sandbox in node.inventory:
        if sandbox.watch is not None and sandbox.watch.live:  # it connected during `restore`
            join_again(node, sandbox)


def _found(node: NodeContext, overlay: Overlay) -> Iterator[tuple[str, tuple[str, str]]]:
    for sandbox in node.inventory:
        record = sandbox.record
        if sandbox.state in _HAS_LEASE and overlay.has(record.address):
            yield sandbox.id, (record.address, record.agent_host if sandbox.state in _HAS_TUNNEL else "")


async def _join(overlay: Overlay, sandbox: Sandbox) -> None:
    host = sandbox.record.agent_host
    invitation = await overlay.invite(sandbox.id, host)
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
    except Unimplemented as error:
        raise FailedPrecondition(
            f"sandbox {sandbox.id}: its VM can't join the pods' network: {error}; rebuild the image, or "
            "leave the pod in the VPC"
        ) from None
    await overlay.put(sandbox.id, host, mtu)
