# SPDX-License-Identifier: Apache-2.0
"""What the tests of all simulated clouds' volumes and snapshots share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar, Generic
from unittest.mock import patch

from infranetes.providers.cloud.interface import D
from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.interface import InstanceState
from infranetes.providers.volumes import IHasSnapshots, ISnapshots, IVolumes, VolumeSnapshot
from infranetes_common.concurrency import deferred
from infranetes_common.errors import Unavailable
from tests.contract.attached_volumes import AttachedVolumesContract, Attacher
from tests.contract.snapshots import SnapshotsContract
from tests.infranetes.providers.cloud.world_case import WorldCase
from tests.support.clouds.faults import NO_AGENT, FaultKind

Step = Callable[[IVolumes], Awaitable[object]]
"""What asks volumes for something once it is called."""


def of_snapshots(step: Callable[[ISnapshots], Awaitable[object]]) -> Step:
    """Return a step that calls the snapshots of volumes."""
    return lambda volumes: step(IHasSnapshots(volumes).snapshots)


class CloudVolumesCase(WorldCase, Generic[D]):
    """Daemons with volumes, one after the other, and VMs without agents.

    :ivar provider: the last daemon's."""

    provider: CloudProvider[D]

    async def volumes(self) -> IVolumes:
        """Return the volumes of a new daemon."""
        self.world.behaviour = NO_AGENT
        provider = await self.started()
        assert isinstance(provider, CloudProvider)
        self.provider = provider
        return self.provider.volumes

    async def next_volumes(self, volumes: IVolumes) -> IVolumes:
        await self.within(self.provider.stop())
        return await self.volumes()

    async def hurried_volumes(self) -> IVolumes:
        """Return the volumes of a new daemon with short timeouts, for requests that can't succeed."""
        with patch.dict(self.settings, volume_seconds=0.5):
            return await self.next_volumes(self.provider.volumes)

    async def vm(self) -> str:
        """Launch a VM; return its id."""
        return (await self.running(self.provider, self.spec())).id

    async def until_ended(self, vm: str) -> None:
        """Wait until the daemon knows that a VM has ended."""
        while (await self.provider.get(vm)).state is not InstanceState.ENDED:
            await self.sleep(0.05)

    async def killed_at(self, action: str, step: Step) -> None:
        """Lose a daemon just before it gets the answer to `action`; the next one takes the step."""
        volumes = await self.volumes()
        untold = self.world.faults.add(FaultKind.LOST, action)
        waiting = step(volumes)
        await self.until(lambda: untold.happened, action)
        await self.within(self.provider.stop())
        self.world.faults.rules.remove(untold)
        with self.assertRaises(Unavailable):
            await waiting
        await step(await self.volumes())

    def patient(self, step: Step, words: str) -> Step:
        """Return a step that is retried while it fails with these words: the disk is busy."""

        @deferred
        async def taken(volumes: IVolumes) -> None:
            while True:
                try:
                    await step(volumes)
                    return
                except Unavailable as error:
                    if words not in str(error):
                        raise
                await self.sleep(0.05)

        return taken


class CloudAttachedVolumesContract(CloudVolumesCase[D], AttachedVolumesContract):
    """The hooks of the contract of attached volumes, and the promises of clouds beyond it.

    :cvar of_attaching: the calls that attach a volume and detach it."""

    of_attaching: ClassVar[tuple[str, str]]

    async def attacher(self) -> Attacher:
        return await self.volumes()

    async def machine(self, attacher: Attacher) -> str:
        return await self.vm()

    async def next_daemon(self, attacher: Attacher) -> Attacher:
        return await self.next_volumes(self.provider.volumes)

    async def end(self, attacher: Attacher, machine: str) -> None:
        self.world.end(machine)
        await self.until_ended(machine)

    async def volume(self, attacher: Attacher, name: str) -> str:
        volumes = self.provider.volumes
        return (await volumes.create(name, volumes.unit)).id

    async def test_what_the_cloud_does_in_silence_is_done_once(self) -> None:
        self.settings |= {"call_seconds": 0.6, "retry_seconds": 20.0}
        volumes = await self.volumes()
        machine, volume = await self.machine(volumes), await self.volume(volumes, "one")
        silences = [self.world.faults.add(FaultKind.SILENT, each, times=1) for each in self.of_attaching]
        await volumes.attach(machine, volume, False)
        self.assertTrue(self.has(machine, volume))
        await volumes.detach(machine, volume)
        self.assertFalse(self.has(machine, volume))
        self.assertEqual([each.happened for each in silences], [1, 1])


class CloudSnapshotsCase(CloudVolumesCase[D]):
    """Daemons with volumes and their snapshots."""

    async def snapshots(self) -> ISnapshots:
        """Return the snapshots of a new daemon."""
        return IHasSnapshots(await self.volumes()).snapshots

    async def until_ready(self, snapshots: ISnapshots, found: VolumeSnapshot) -> VolumeSnapshot:
        while not found.ready:
            await self.sleep(0.05)
            found = await snapshots.get(found.id)
        return found


class CloudSnapshotsContract(CloudSnapshotsCase[D], SnapshotsContract):
    """The hooks of the contract of snapshots."""

    async def made(self) -> IHasSnapshots:
        return IHasSnapshots(await self.volumes())

    async def next_daemon(self, volumes: IHasSnapshots) -> IHasSnapshots:
        return IHasSnapshots(await self.next_volumes(volumes))
