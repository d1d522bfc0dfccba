# SPDX-License-Identifier: Apache-2.0
"""The calls before and after memory or processors are taken from a VM."""

from __future__ import annotations

from collections.abc import Sequence

from infranetes.machines.agent.calls import AgentCalls
from infranetes.providers.interface import MemoryRange
from infranetes_common.wire import vmserver

_MARGIN_SECONDS = 10.0  # beyond the time that the guest has
_RESTORE_SECONDS = 90.0


class SizeClient(AgentCalls):
    """A part of AgentClient."""

    async def release_memory(self, ranges: Sequence[MemoryRange], seconds: float) -> None:
        """Have the guest take memory out of use, all or none. What is there `seconds` later it uses again.

        :raise FailedPrecondition: what runs needs it, or the guest can't move what is in it.
        :raise DeadlineExceeded: it takes longer than `seconds`.
        :raise Unimplemented: the VM's agent is of an earlier release, or the VM is not its alone.
        """
        request = vmserver.ReleaseMemoryRequest(ranges=_said(ranges), seconds=seconds)
        await self._call(self._stub.ReleaseMemory(request, timeout=seconds + _MARGIN_SECONDS))

    async def restore_memory(self, ranges: Sequence[MemoryRange]) -> None:
        """Have the guest use memory again. Idempotent. Fails as `release_memory`."""
        request = vmserver.RestoreMemoryRequest(ranges=_said(ranges))
        await self._call(self._stub.RestoreMemory(request, timeout=_RESTORE_SECONDS))

    async def use_processors(self, count: int) -> None:
        """Have the guest use so many processors, or as many as it has. Idempotent.

        :raise FailedPrecondition: it can't.
        :raise Unimplemented: as `release_memory`.
        """
        request = vmserver.UseProcessorsRequest(count=count)
        await self._call(self._stub.UseProcessors(request, timeout=_RESTORE_SECONDS))


def _said(ranges: Sequence[MemoryRange]) -> list[vmserver.MemoryRange]:
    return [vmserver.MemoryRange(address=each.address, size=each.size) for each in ranges]
