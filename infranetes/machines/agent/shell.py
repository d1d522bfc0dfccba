# SPDX-License-Identifier: Apache-2.0
"""The call that runs a shell of the VM itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from infranetes.machines.agent import limits
from infranetes.machines.agent.calls import AgentCalls
from infranetes.machines.sessions import SessionCall
from infranetes_common.errors import InfranetesError
from infranetes_common.wire import vmserver


class ShellClient(AgentCalls):
    """The part of `AgentClient` that opens shells."""

    def shell(self) -> SessionCall:
        call = self._stub.Shell(timeout=None)
        call.receive_ahead(limits.STREAM_AHEAD_BYTES)
        return call

    async def shell_output(self, call: SessionCall) -> AsyncGenerator[vmserver.SessionOutput, None]:
        messages = self._streamed(call)
        try:
            async for message in messages:
                if message.WhichOneof("output") == "end":
                    code = message.end.exit_code
                    message.end.exit_code = code if 0 <= code <= 255 else 255
                    yield message
                    return
                yield message
        finally:
            await messages.aclose()
        raise InfranetesError("the agent ended the shell without an exit code; its log in the VM says why")
