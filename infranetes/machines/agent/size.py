# SPDX-License-Identifier: Apache-2.0
"""The agent's calls before and after memory or processors are taken from a VM."""

from __future__ import annotations

from collections.abc import Sequence

from infranetes.machines.agent.calls import AgentCalls
from infranetes.providers.interface import MemoryRange
from infranetes_common.wire import vmserver

_MARGIN_SECONDS = 10.0  # added to the time that the guest has
_RESTORE_SECONDS = 90.0


class SizeClient(AgentCalls):
    """The part of AgentClient for the VM's size."""

    async def release_memory(self, ranges: Sequence[MemoryRange], seconds: float) -> None:
        request = vmserver.ReleaseMemoryRequest(ranges=_to_wire(ranges), seconds=seconds)
        await self._call(self._stub.ReleaseMemory(request, timeout=seconds + _MARGIN_SECONDS))

    async def restore_memory(self, ranges: Sequence[MemoryRange]) -> None:
        request = vmserver.RestoreMemoryRequest(ranges=_to_wire(ranges))
        await self._call(self._stub.RestoreMemory(request, timeout=_RESTORE_SECONDS))

    async def use_processors(self, count: int) -> None:
        request = vmserver.UseProcessorsRequest(count=count)
        await self._call(self._stub.UseProcessors(request, timeout=_RESTORE_SECONDS))


def _to_wire(ranges: Sequence[MemoryRange]) -> list[vmserver.MemoryRange]:
    return [vmserver.MemoryRange(address=piece.address, size=piece.size) for piece in ranges]
