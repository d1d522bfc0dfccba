# SPDX-License-Identifier: Apache-2.0
"""ReleaseMemory and RestoreMemory: take memory out of use before it is unplugged, or into use again."""

from __future__ import annotations

import math
from collections.abc import Iterable

from infranetes_common.errors import InvalidArgument, Unimplemented
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentMemoryRpcs
from txgrpc import Call
from vmserver.machine.memory import MachineMemory, Range

MAX_RANGES = 256  # as many as a machine has slots
MAX_SECONDS = 3600.0


class MemoryCalls(AgentMemoryRpcs):
    """Passes the ranges to `memory`, which is None where the machine is shared."""

    def __init__(self, memory: MachineMemory | None) -> None:
        self._memory = memory

    async def ReleaseMemory(
        self, request: messages.ReleaseMemoryRequest, call: Call
    ) -> messages.ReleaseMemoryResponse:
        if not (math.isfinite(request.seconds) and 0 < request.seconds <= MAX_SECONDS):
            raise InvalidArgument(
                f"seconds: {request.seconds} are not more than 0 and at most {MAX_SECONDS:g}"
            )
        await self._own().release(_ranges(request.ranges), request.seconds)
        return messages.ReleaseMemoryResponse()

    async def RestoreMemory(
        self, request: messages.RestoreMemoryRequest, call: Call
    ) -> messages.RestoreMemoryResponse:
        await self._own().restore(_ranges(request.ranges))
        return messages.RestoreMemoryResponse()

    def _own(self) -> MachineMemory:
        if self._memory is None:
            raise Unimplemented("the agent shares this machine, so it gives back no memory")
        return self._memory


def _ranges(said: Iterable[messages.MemoryRange]) -> list[Range]:
    ranges = [Range(each.address, each.size) for each in said]
    if not 0 < len(ranges) <= MAX_RANGES:
        raise InvalidArgument(f"{len(ranges)} ranges of memory are not 1 to {MAX_RANGES}")
    return ranges
