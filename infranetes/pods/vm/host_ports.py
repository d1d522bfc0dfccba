# SPDX-License-Identifier: Apache-2.0
"""The host ports that sandboxes ask for, in the form that `hostports` takes."""

from __future__ import annotations

from collections.abc import Iterable

from infranetes.hostports.hostports import PodPorts
from infranetes.hostports.mappings import host_ports_of
from infranetes.pods.node.handler_config import CNI
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.store.states import SandboxState


def ports_of(sandbox: Sandbox) -> PodPorts:
    """Return the host ports of one sandbox; none where the node's CNI forwards them."""
    asked = () if sandbox.record.network == CNI else host_ports_of(sandbox.config)
    return PodPorts(sandbox.id, sandbox.pod, asked, sandbox.record.address)


def taken_ports(sandboxes: Iterable[Sandbox]) -> list[PodPorts]:
    """Return the host ports that are taken, so that no other sandbox may have them."""
    return [ports_of(one) for one in sandboxes if one.state is not SandboxState.STOPPED]


def ports_in_force(sandboxes: Iterable[Sandbox]) -> list[PodPorts]:
    """Return the host ports that are forwarded. A lost VM's are not: its address may be another's by now."""
    return [ports_of(one) for one in sandboxes if one.state is SandboxState.READY]
