# SPDX-License-Identifier: Apache-2.0
"""Pods' huge pages. They are the VM's own: its agent has the VM's kernel reserve them for containers.

kubelet does not tell a sandbox how many its containers will ask for, so a VM grows when they ask.
"""

from __future__ import annotations

from collections.abc import Iterable

from infranetes.machines.interface import IAgent
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.store.states import ALIVE, ContainerState
from infranetes_common.errors import FailedPrecondition
from infranetes_common.huge_pages import bytes_of, resource_name
from infranetes_common.wire import cri

_ASKING = ALIVE | {ContainerState.CREATING}


async def check_huge_pages(agent: IAgent, sizes: Iterable[int]) -> None:
    """Check that a VM can have huge pages of these sizes in bytes. :raise FailedPrecondition: it can't."""
    in_vm = (await agent.info()).huge_page_sizes
    for size in sorted(set(sizes).difference(in_vm)):
        others = " or ".join(map(resource_name, in_vm))
        raise FailedPrecondition(
            f"this pod's VM can't have {resource_name(size)}: "
            + (
                f"its processor and kernel have none of that size; ask for {others}"
                if others
                else "its agent shares a machine, or its kernel has none"
            )
        )


def huge_bytes(sandbox: Sandbox, without: Container | None = None) -> int:
    """Return the bytes of huge pages that the sandbox's containers ask for, not counting ended ones.

    :param without: a container that is not counted either."""
    return sum(
        bytes_of(limits_of(container))
        for container in sandbox.containers.values()
        if container is not without and container.state in _ASKING
    )


def limits_of(container: Container) -> cri.LinuxContainerResources:
    """Return the limits that a container has or, before its agent reports them, is created with."""
    if container.reported is None:
        return container.config.linux.resources
    return container.reported.resources
