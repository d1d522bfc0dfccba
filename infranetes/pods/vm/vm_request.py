# SPDX-License-Identifier: Apache-2.0
"""What a pod asks of its VM: the one translation of the CRI's words into the provider's."""

from __future__ import annotations

from infranetes.pods.node.handlers import Handler
from infranetes.pods.node.hooks import Features
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.vm.sandbox_vm import zone_for
from infranetes.pods.vm.vm_size import recorded_size
from infranetes.providers.interface import VmRequest
from infranetes.providers.machine_images import GuestBoot, ImageBoot


async def vm_request(
    handler: Handler,
    features: Features,
    sandbox: Sandbox,
    *,
    has_vm: bool,
    boot: ImageBoot | GuestBoot | None = None,
) -> VmRequest:
    """Return what the sandbox's VM is requested with.

    :param handler: the sandbox's. :param has_vm: no network is made for its VM, and no zone chosen.
    :param boot: what it boots, unless its cloud has that and needs to be told nothing.
    :raise InfranetesError: the network or the zone can't be had."""
    config = sandbox.config
    return VmRequest(
        size=handler.sized(recorded_size(sandbox)),
        hostname=config.hostname,
        annotations=handler.vm_annotations(config.annotations),
        granted=frozenset(handler.annotations.set),
        image=sandbox.record.image,
        boot=boot if isinstance(boot, ImageBoot) else None,
        guest=boot if isinstance(boot, GuestBoot) else None,
        attachment=None if has_vm else await features.attachment(sandbox),
        cgroup_parent=config.linux.cgroup_parent,
        zone="" if has_vm else await zone_for(features, sandbox),
    )
