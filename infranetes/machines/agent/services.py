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
        """Send updates; yield the state in force when the call begins and after each update.

        :raise NotOffered: the VM has no service proxy.
        :raise Unavailable: its tables can't be changed, a newer call took over, or the connection is lost.
        """
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
        """Ask for the state of the VM's service proxy.

        :param key: a destination; the report then has the proxy's verdict on connections to it.

        :raise NotOffered: the VM has no service proxy.
        """
        request = vmserver.ServiceReportRequest(key=key)
        return checks.clamped(await self._call(self._stub.ServiceReport(request, timeout=within)))
