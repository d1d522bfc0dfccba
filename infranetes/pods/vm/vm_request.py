# SPDX-License-Identifier: Apache-2.0
"""What a pod asks of its VM: the one translation of the CRI's words into the provider's."""

from __future__ import annotations

from infranetes.pods.node.context import NodeContext
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.vm.sandbox_vm import zone_for
from infranetes.pods.vm.vm_size import recorded_size
from infranetes.providers.interface import VmRequest


async def vm_request(node: NodeContext, sandbox: Sandbox, found: bool) -> VmRequest:
    """Return what the sandbox's VM is requested with.

    :param found: there is a VM already: no network is made for it, and no zone chosen.
    :raise InfranetesError: the network or the zone can't be had."""
    config, handler = sandbox.config, node.handlers.of(sandbox.record)
    return VmRequest(
        size=handler.sized(recorded_size(sandbox)),
        hostname=config.hostname,
        annotations=handler.annotations.applied(config.annotations),
        granted=frozenset(handler.annotations.set),
        image=sandbox.record.image,
        attachment=None if found else await node.features.attachment(sandbox),
        cgroup_parent=config.linux.cgroup_parent,
        zone="" if found else await zone_for(node.features, sandbox),
    )
