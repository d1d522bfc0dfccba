# SPDX-License-Identifier: Apache-2.0
"""Huge pages of pods: the VM's own, which its agent has the kernel reserve for containers."""

from __future__ import annotations

from collections.abc import Iterable

from infranetes.machines.agent.client import AgentClient
from infranetes_common.errors import FailedPrecondition
from infranetes_common.huge_pages import resource_name


async def check_huge_pages(agent: AgentClient, sizes: Iterable[int]) -> None:
    """Check that a VM can have huge pages of these sizes, in bytes. :raise FailedPrecondition: it can't."""
    there = (await agent.info()).huge_page_sizes
    for size in sorted(set(sizes).difference(there)):
        others = " or ".join(map(resource_name, there))
        raise FailedPrecondition(
            f"this pod's VM can't have {resource_name(size)}: "
            + (
                f"its processor and kernel have none of that size; ask for {others}"
                if others
                else "its agent is of an earlier release or shares a machine, or its kernel has none"
            )
        )
