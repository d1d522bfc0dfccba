# SPDX-License-Identifier: Apache-2.0
"""The agent's calls for the rules of Kubernetes' Services."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from infranetes.machines.agent import checks
from infranetes.machines.agent.calls import AgentCalls
from infranetes_common.concurrency import start
from infranetes_common.wire import vmserver


class ServiceClient(AgentCalls):
    """The part of AgentClient for Services."""

    async def service_rules(
        self, updates: AsyncIterator[vmserver.ServiceRulesUpdate]
    ) -> AsyncGenerator[vmserver.ServiceRulesState, None]:
        call = self._stub.ServiceRules(timeout=None)

        async def send() -> None:
            async for update in updates:
                await call.send(update)

        sending = start(send())
        sending.addErrback(lambda _: call.cancel())
        try:
            async for state in self._streamed(call):
                yield checks.clamped(state)
        finally:
            sending.cancel()

    async def service_report(
        self, key: vmserver.ServiceKey | None, within: float
    ) -> vmserver.ServiceReportResponse:
        request = vmserver.ServiceReportRequest(key=key)
        return checks.clamped(await self._call(self._stub.ServiceReport(request, timeout=within)))
