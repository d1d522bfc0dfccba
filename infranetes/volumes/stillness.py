# SPDX-License-Identifier: Apache-2.0
"""The carried volumes of pods that are held still: nothing is compared or copied meanwhile.

Those in memory that only the node's side changes, such as secrets, are emptied in the VM before that is kept,
and brought again before the pod goes on. If containers may write to one, nobody else has what they wrote: it
is not named here, and the VM's agent refuses to have it kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from infranetes.pods.node.inventory import Sandbox
from infranetes.volumes.sync import VolumeSync
from infranetes.volumes.volume import Volume
from infranetes_common.concurrency import settled


class StillVolumes:
    """Holds volumes' locks while their sandboxes are held still."""

    def __init__(self, sync: VolumeSync) -> None:
        self._sync = sync
        self._locked: dict[str, list[Volume]] = {}  # by sandbox

    async def hold(self, sandbox: Sandbox, volumes: Iterable[Volume]) -> list[str]:
        """Have nobody change these volumes until `go_on`; return the ids of those to be emptied."""
        its = list(volumes)
        locked = self._locked.setdefault(sandbox.id, [])
        for volume in its:
            await volume.lock.acquire()
            locked.append(volume)
        return [each.source.id for each in its if _is_brought_again(each)]

    async def go_on(self, sandbox: Sandbox, volumes: Iterable[Volume]) -> None:
        """Bring again what may be empty, and let volumes change. Idempotent.

        :raise InfranetesError: one can't be brought."""
        locked = self._locked.pop(sandbox.id, [])
        brought = [each for each in volumes if _is_brought_again(each) and each.containers]
        try:
            for failure in await settled(self._bring(sandbox, each, each in locked) for each in brought):
                if failure is not None:
                    failure.raiseException()
        finally:
            for volume in locked:
                volume.lock.release()

    async def _bring(self, sandbox: Sandbox, volume: Volume, locked: bool) -> None:
        if locked:
            await self._sync.sync_locked(sandbox, volume)
            return
        async with volume.lock:
            await self._sync.sync_locked(sandbox, volume)

    def forget(self, sandbox_id: str) -> None:
        """Let the volumes of a sandbox whose VM is gone be removed. Idempotent."""
        for volume in self._locked.pop(sandbox_id, []):
            volume.lock.release()


def _is_brought_again(volume: Volume) -> bool:
    return volume.source.in_memory and not volume.writable and not volume.source.size_limit
