# SPDX-License-Identifier: Apache-2.0
"""UseProcessors: the node sets how many of the machine's processors its pod uses."""

from __future__ import annotations

from infranetes_common.errors import InvalidArgument, Unimplemented
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentProcessorRpcs
from txgrpc import Call
from vmserver.machine.processors import MachineProcessors

SECONDS = 60.0


class ProcessorCalls(AgentProcessorRpcs):
    """Passes the number to `processors`, which is None where the machine is shared."""

    def __init__(self, processors: MachineProcessors | None) -> None:
        self._processors = processors

    async def UseProcessors(
        self, request: messages.UseProcessorsRequest, call: Call
    ) -> messages.UseProcessorsResponse:
        if self._processors is None:
            raise Unimplemented("the agent shares this machine, so its processors can't be changed")
        if request.count < 1:
            raise InvalidArgument("count: a machine uses one processor at least")
        await self._processors.use(request.count, SECONDS)
        return messages.UseProcessorsResponse()
