# SPDX-License-Identifier: Apache-2.0
"""Publishing volumes at pods' paths, for each of kubelet's drivers."""

from __future__ import annotations

import os

from infranetes.csi.checks import InFlight
from infranetes.csi.interface import IPodVolumes
from infranetes.providers.volumes import IVolumes
from infranetes.volumes import published, published_devices
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.published import PublishedVolume
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError
from infranetes_common.reactors import IReactor


class Publisher:
    """Publishes a node's volumes, each to one pod at a time.

    :param pods: flushes volumes before they are unpublished; None: nothing does.
    :ivar volumes: the provider's. :ivar in_flight: what is being worked on."""

    def __init__(self, reactor: IReactor, volumes: IVolumes, pods: IPodVolumes | None = None) -> None:
        self.volumes = volumes
        self._pods = pods
        self.in_flight = InFlight()
        self._reactor = reactor
        self._table = MountTable()

    async def publish(self, target: str, volume: PublishedVolume) -> None:
        """Have a path stand for a volume. Idempotent.

        :raise InvalidArgument: the path or the volume can't be. :raise NotFound: there is no such volume.
        :raise AlreadyExists: it is published there in another way.
        :raise FailedPrecondition: it is published elsewhere, or something else is there, or the daemon may
            not mount."""
        published.check(volume)
        with self.in_flight.only(volume.volume):
            await self.volumes.get(volume.volume)
            await run_in_thread(self._reactor, self._thd_publish, target, volume)

    async def unpublish(self, target: str, volume_id: str) -> None:
        """Remove what is published at a path, and the path. Idempotent.

        What the path's pod has written is on the disk then, also if its VM is never stopped but killed: as
        kubelet does with the processes of a pod that was deleted by force while kubelet was away.

        :raise FailedPrecondition: another volume is published there, or something else is."""
        with self.in_flight.only(volume_id):
            if self._pods is not None:
                await self._pods.flush(volume_id, target)
            await run_in_thread(self._reactor, self._thd_unpublish, target, volume_id)

    async def find(self, path: str) -> PublishedVolume | None:
        """Return the volume published at a path; None: none is.

        :raise FailedPrecondition: a volume is published there, but its description can't be read."""
        return await run_in_thread(self._reactor, self._thd_find, path)

    def close(self) -> None:
        """Stop publishing. Idempotent."""
        self._table.close()

    # ---- In threads

    def _thd_find(self, path: str) -> PublishedVolume | None:
        return published_devices.read(path) or published.read(path, self._table)

    def _thd_publish(self, target: str, volume: PublishedVolume) -> None:
        here = os.path.realpath(target)
        targets = [*published.targets(volume.volume, self._table), *published_devices.targets(volume.volume)]
        others = [each for each in targets if each != here]
        if others:
            raise FailedPrecondition(
                f"volume {volume.volume} is published at {others[0]} already, and a volume is one pod's at a "
                "time: it can be published here once that pod is gone"
            )
        published.check_target(target)
        there = self._thd_find(target)
        if there is not None and there.raw is not volume.raw:
            published.check_same(target, there, volume)
        if volume.raw:
            published_devices.publish(target, volume, self._table)
        else:
            published.publish(target, volume, self._table)

    def _thd_unpublish(self, target: str, volume_id: str) -> None:
        there = None
        if os.path.isabs(target):
            try:
                there = self._thd_find(target)
            except InfranetesError:
                there = None  # whatever is there is to be unpublished
        if there is not None and not there.below and there.volume != volume_id:
            raise FailedPrecondition(f"{target}: volume {there.volume} is published there, not {volume_id}")
        published_devices.unpublish(target, self._table)
        published.unpublish(target, self._table)
