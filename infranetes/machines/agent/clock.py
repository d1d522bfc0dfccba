# SPDX-License-Identifier: Apache-2.0
"""The call that has a VM's clock become right."""

from __future__ import annotations

from infranetes.machines.agent.calls import AgentCalls
from infranetes_common.wire import vmserver

SECONDS = 30.0


class ClockClient(AgentCalls):
    """A part of AgentClient."""

    async def correct_clock(self, steady: int, earliest: int, latest: int) -> None:
        """Say what time it was when the VM's steady clock was `steady`, as `info` told it. Idempotent.

        :param earliest: and `latest`: the node's time, nanoseconds since 1970 UTC, before and after.
        :raise FailedPrecondition: that was too long ago, or the VM's kernel refuses.
        :raise Unimplemented: the VM's agent is of an earlier release, or the VM is not its alone.
        """
        request = vmserver.CorrectClockRequest(
            steady_nanos=steady, earliest_nanos=earliest, latest_nanos=latest
        )
        await self._call(self._stub.CorrectClock(request, timeout=SECONDS))
