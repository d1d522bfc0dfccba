# SPDX-License-Identifier: Apache-2.0
"""The call of ``proto/control.proto`` that makes checkpoints of pods."""

from __future__ import annotations

from infranetes.control.visits import vm_of
from infranetes.pods.keeping.checkpoints import Checkpoints
from infranetes.pods.node.inventory import Inventory
from infranetes.pods.node.meant import present_sandbox
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlCheckpointRpcs
from txgrpc import Call

SECONDS = 600.0  # the most that one may take


class CheckpointCalls(ControlCheckpointRpcs):
    """One method per RPC."""

    def __init__(self, inventory: Inventory, checkpoints: Checkpoints) -> None:
        self._inventory = inventory
        self._checkpoints = checkpoints

    async def CheckpointPod(
        self, request: control.CheckpointPodRequest, call: Call
    ) -> control.CheckpointPodResponse:
        sandbox = present_sandbox(self._inventory, request.pod)
        vm = vm_of(sandbox)
        limit = call.time_remaining()
        seconds = SECONDS if limit is None else min(SECONDS, limit)
        checkpoint = await self._checkpoints.checkpoint_pod(sandbox, request.location, seconds)
        return control.CheckpointPodResponse(
            vm=vm, size=checkpoint.size, pause_seconds=checkpoint.pause_seconds, seconds=checkpoint.seconds
        )
