# SPDX-License-Identifier: Apache-2.0
"""The calls about mounts of NFS exports."""

from __future__ import annotations

from infranetes_common.errors import InvalidArgument, Unimplemented
from infranetes_common.nfs import checked
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentNfsRpcs
from txgrpc import Call
from vmserver import validate
from vmserver.volumes.nfs import NfsMounts

MAX_SECONDS = 600


class NfsCalls(AgentNfsRpcs):
    """Validates requests. :param nfs: None: the machine is shared."""

    def __init__(self, nfs: NfsMounts | None) -> None:
        self._nfs = nfs

    async def MountNfs(self, request: messages.MountNfsRequest, call: Call) -> messages.MountNfsResponse:
        container = validate.container_id(request.container_id)
        wanted = checked(request.source, request.options)
        return messages.MountNfsResponse(id=await self._own().mount(container, wanted))

    async def UnmountNfs(
        self, request: messages.UnmountNfsRequest, call: Call
    ) -> messages.UnmountNfsResponse:
        if not 0 < request.seconds <= MAX_SECONDS:
            raise InvalidArgument(f"seconds {request.seconds}: expected 1 to {MAX_SECONDS}")
        await self._own().unmount_all(request.seconds)
        return messages.UnmountNfsResponse()

    def _own(self) -> NfsMounts:
        if self._nfs is None:
            raise Unimplemented("the agent shares this machine, so it mounts nothing")
        return self._nfs
