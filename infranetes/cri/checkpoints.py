# SPDX-License-Identifier: Apache-2.0
"""The CRI's CheckpointContainer."""

from __future__ import annotations

from infranetes.cri import validate
from infranetes.cri.sandboxes import before_deadline
from infranetes.pods.keeping.checkpoints import Checkpoints
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import RuntimeCheckpointRpcs
from txgrpc import Call

DEFAULT_SECONDS = 120
MAX_SECONDS = 3600  # a longer one is as good as this


class CheckpointCalls(RuntimeCheckpointRpcs):
    """CheckpointContainer. `pods.keeping.Checkpoints` does it; this class translates."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    async def CheckpointContainer(
        self, request: cri.CheckpointContainerRequest, call: Call
    ) -> cri.CheckpointContainerResponse:
        if not request.location:
            raise InvalidArgument("location is empty: give the path of a file on the node")
        asked = validate.seconds(request.timeout, "timeout")
        seconds: float = min(asked, MAX_SECONDS) or DEFAULT_SECONDS
        limit = before_deadline(call)
        if limit is not None:
            seconds = min(seconds, limit)
        await self._checkpoints.checkpoint(request.container_id, request.location, seconds)
        return cri.CheckpointContainerResponse()
