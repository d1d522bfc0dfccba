# SPDX-License-Identifier: Apache-2.0
"""Look-ups of the volumes published at paths that containers name, done where they can't hang the daemon."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from twisted.python.failure import Failure

from infranetes.volumes import published, published_devices
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.published import PublishedVolume
from infranetes_common.concurrency import Lanes, run_in_thread, settled
from infranetes_common.errors import FailedPrecondition, InfranetesError
from infranetes_common.paths import resolve
from infranetes_common.reactors import IReactor

FIND_SECONDS = 10.0  # the longest that looking at a path may take
THREADS = 4


class PublishedMounts:
    """Looks at the node's mounts and block devices.

    A path in a directory that does not answer delays only its own container."""

    def __init__(self, reactor: IReactor) -> None:
        self._reactor = reactor
        self._table = MountTable()
        self._lanes = Lanes(reactor, "published volumes", THREADS)

    async def find(self, paths: Sequence[str]) -> list[PublishedVolume | InfranetesError | None]:
        """Return each path's published volume, or the error of its look-up; None: no volume, or no path."""
        if not await run_in_thread(self._reactor, self._thd_any):
            return [None] * len(paths)
        looks = {path: self._look(path) for path in dict.fromkeys(paths) if path}
        found = dict(zip(looks, await settled(looks.values()), strict=True))
        return [_volume_or_error(found.get(path)) for path in paths]

    async def find_for_pod(self, uid: str) -> list[PublishedVolume]:
        """Return the volumes published for the pod with this UID, ordered by volume id.

        :raise InfranetesError: it can't be told."""
        if not uid or not await run_in_thread(self._reactor, self._thd_any):
            return []
        return await self._lanes.run(f"pod {uid}", FIND_SECONDS, self._thd_for_pod, uid)

    async def find_block_devices(self, paths: Sequence[str]) -> list[str]:
        """Return the block devices of the node at each of these paths, without links; "": none.

        :raise InfranetesError: it can't be told."""
        found = await settled(self._lanes.run(path, FIND_SECONDS, _thd_block_device, path) for path in paths)
        for outcome in found:
            if isinstance(outcome, Failure):
                outcome.raiseException()
        return [each for each in found if isinstance(each, str)]

    async def _look(self, path: str) -> PublishedVolume | None:
        return await self._lanes.run(path, FIND_SECONDS, self._thd_look, path)

    def _thd_for_pod(self, uid: str) -> list[PublishedVolume]:
        found = [*published.for_pod(uid, self._table), *published_devices.for_pod(uid)]
        return sorted(found, key=lambda each: each.volume)

    def _thd_look(self, path: str) -> PublishedVolume | None:
        return published_devices.read(path) or published.read(path, self._table)

    def _thd_any(self) -> bool:
        if any(one.source.startswith(published.PREFIX) for one in self._table.mounts()):
            return True
        return published_devices.any_published()

    def close(self) -> None:
        """Look at nothing any more. Idempotent."""
        self._lanes.close()
        self._table.close()


def _thd_block_device(path: str) -> str:
    try:
        path = resolve(path)
        return path if path and stat.S_ISBLK(os.stat(path).st_mode) else ""
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise FailedPrecondition(f"{path} can't be looked at: {error.strerror}") from None


def _volume_or_error(outcome: PublishedVolume | Failure | None) -> PublishedVolume | InfranetesError | None:
    if not isinstance(outcome, Failure):
        return outcome
    if isinstance(outcome.value, InfranetesError):
        return outcome.value
    outcome.raiseException()
