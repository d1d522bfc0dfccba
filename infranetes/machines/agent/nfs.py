# SPDX-License-Identifier: Apache-2.0
"""The agent's calls for the exports of NFS servers."""

from __future__ import annotations

import re

from infranetes.machines.agent.calls import AgentCalls
from infranetes_common.errors import InfranetesError
from infranetes_common.nfs import NfsMount
from infranetes_common.wire import vmserver

MOUNT_SECONDS = 75.0  # the agent gives up on the server earlier
_MARGIN_SECONDS = 5.0
_ID = re.compile(r"[0-9a-z-]{1,64}")


class NfsClient(AgentCalls):
    """The part of AgentClient for NFS."""

    async def mount_nfs(self, container_id: str, mount: NfsMount) -> str:
        request = vmserver.MountNfsRequest(
            container_id=container_id, source=mount.source, options=mount.options
        )
        answer = await self._call(self._stub.MountNfs(request, timeout=MOUNT_SECONDS))
        if not _ID.fullmatch(answer.id):
            raise InfranetesError(
                f"the agent reported an NFS volume {answer.id[:80]!r}, which is not a valid id"
            )
        return answer.id

    async def unmount_nfs(self, within: int) -> None:
        request = vmserver.UnmountNfsRequest(seconds=within)
        await self._call(self._stub.UnmountNfs(request, timeout=within + _MARGIN_SECONDS))
