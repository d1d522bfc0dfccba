# SPDX-License-Identifier: Apache-2.0
"""Loading an image's layers into a VM: shown as disks where the provider can do that, else sent to the agent.

Nothing is recorded: each load asks the VM what it has, so that one which a killed daemon or a lost connection
broke off continues from where it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.images import Image
from infranetes.images.layer_disk import LayerDisk
from infranetes.pods.images.file_chunks import FileChunks
from infranetes.pods.node.images import Images
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.node.load_progress import ImageLoadProgress
from infranetes.pods.node.node_providers import Providers
from infranetes.providers.interface import IShowsDisks, ReadOnlyDisk, ShownDisk
from infranetes_common.concurrency import Flight, backoff, settled, sleep
from infranetes_common.errors import (
    DataLoss,
    DeadlineExceeded,
    InfranetesError,
    OutOfRange,
    Unavailable,
)
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver

PATIENCE_SECONDS = 60.0  # how long a load goes on without receiving a byte while the agent can't be reached
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0  # seconds between two attempts
PLUG_ATTEMPTS = 2  # how many times a disk that does not appear in the VM is plugged

_log = Logger()


class _NotSeen(Unavailable):
    """The VM does not see its disks, even after they were plugged once more."""


@attrs.define
class _Made:
    """The image to make from the layers. :ivar done: whether the call that mounted them has made it."""

    id: str
    configuration: bytes = attrs.field(repr=False)
    done: bool = False


class _Patience:
    """The limit on waiting for an agent that can't be reached, extended whenever bytes have arrived."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._arrived = -1
        self._renew(0)

    def _renew(self, arrived: int) -> None:
        if arrived > self._arrived:
            self._arrived = arrived
            self._until = self._clock.seconds() + PATIENCE_SECONDS
            self._pauses = backoff(FIRST_PAUSE, LONGEST_PAUSE)

    async def pause(self, error: InfranetesError, arrived: int) -> None:
        """Wait a little, or raise `error` if nothing has arrived for too long.

        :param arrived: how many bytes have arrived altogether."""
        self._renew(arrived)
        if self._clock.seconds() >= self._until:
            raise error
        _log.info("an image's load was interrupted and continues: {error}", error=error)
        await sleep(self._clock, next(self._pauses))


@attrs.frozen(eq=False, repr=False)
class LayerLoads:
    """Loads images' layers into VMs."""

    _reactor: IReactor
    _images: Images
    _providers: Providers

    async def load(self, sandbox: Sandbox, image: Image) -> str:
        """Load the layers that the VM lacks, and make the image from its layers there.

        The load survives a lost connection to the agent, if that comes back in time.

        :return: how much was missing, as a message.
        :raise InfranetesError: the image can't be loaded."""
        async with self._images.held(image.id):
            with ImageLoadProgress(self._reactor, sandbox, image.id) as progress:
                disks = await self._images.disks(image.id)
                configuration = await self._images.config(image.id)
                wanted = list({disk.diff_id: disk for disk in disks}.values())
                await self._bring_all(sandbox, image, wanted, configuration, progress)
                mib = progress.size / 2**20
                return f"{progress.layers} of {len(wanted)} layers, {mib:.1f} MiB, were missing"

    async def _bring_all(
        self,
        sandbox: Sandbox,
        image: Image,
        wanted: Sequence[LayerDisk],
        configuration: bytes,
        progress: ImageLoadProgress,
    ) -> None:
        patience, damaged = _Patience(self._reactor), False
        while True:
            try:
                made = _Made(image.id, configuration)
                await self._bring(sandbox, wanted, progress, made)
                if not made.done:
                    await sandbox.agent().add_image(image.id, configuration)
                break
            except _NotSeen:
                raise
            except (DataLoss, OutOfRange) as error:  # the agent has already deleted the damaged data
                if damaged:
                    raise
                damaged = True
                _log.warn("loading image {image} into sandbox {sandbox} is tried again: {error}",
                          image=image.id, sandbox=sandbox.id, error=error)  # fmt: skip
            except (Unavailable, DeadlineExceeded) as error:
                await patience.pause(error, progress.arrived)
        progress.done()

    async def _bring(
        self, sandbox: Sandbox, disks: Sequence[LayerDisk], progress: ImageLoadProgress, made: _Made
    ) -> None:
        """Have the VM mount all of `disks`, waiting for those that another image's load brings."""
        while True:
            missing = await self._lacking(sandbox, disks)
            progress.add_missing(missing)
            flights = sandbox.loads.flights()
            theirs = list({flights[disk.diff_id] for disk in missing if disk.diff_id in flights})
            rest = [disk for disk in missing if disk.diff_id not in flights]
            ours = self._begin(sandbox, rest, None if theirs else made)
            for flight in ours:
                await flight.join()
            others = await settled([flight.join() for flight in theirs])
            if not any(others):  # each is None or a Failure
                return

    async def _lacking(self, sandbox: Sandbox, disks: Sequence[LayerDisk]) -> list[LayerDisk]:
        """Return the disks that the VM has not mounted, asking its agent only about those it is shown."""
        shown = await shown_layers(self._providers, sandbox)
        if shown is None:
            return await _missing(sandbox, disks)
        there = [disk for disk in disks if disk.diff_id in shown]
        missing = {disk.diff_id for disk in await _missing(sandbox, there)} if there else set()
        return [disk for disk in disks if disk.diff_id not in shown or disk.diff_id in missing]

    def _begin(self, sandbox: Sandbox, disks: Sequence[LayerDisk], made: _Made | None) -> list[Flight[None]]:
        """Begin to bring the disks into the VM: all in one Flight where they are shown, else each in its own.

        :param made: the image to make of them, if nothing else of it is missing."""
        if not disks:
            return []
        layers, provider = sandbox.loads.layers, self._providers.of(sandbox.record).provider
        if IShowsDisks.providedBy(provider):
            flight = Flight(self._show(sandbox, provider, disks, made))
            layers.update({disk.diff_id: flight for disk in disks})
            return [flight]
        for disk in disks:
            layers[disk.diff_id] = Flight(self._send(sandbox, disk))
        return [layers[disk.diff_id] for disk in disks]

    async def _show(
        self,
        sandbox: Sandbox,
        provider: IShowsDisks,
        disks: Sequence[LayerDisk],
        made: _Made | None,
    ) -> None:
        instance_id = sandbox.record.instance_id
        files = [ReadOnlyDisk(disk_name(disk.diff_id), disk.path) for disk in disks]
        failed: InfranetesError | None = None
        for _ in range(PLUG_ATTEMPTS):
            if failed is not None:
                _log.warn("attaching the disks of sandbox {sandbox} is tried again: {error}",
                          sandbox=sandbox.id, error=failed)  # fmt: skip
            places = await provider.show_disks(instance_id, files)
            mounts = [
                vmserver.LayerDisk(diff_id=disk.diff_id, target=place.target, lun=place.lun)
                for disk, place in zip(disks, places, strict=True)
            ]
            try:
                await _mount(sandbox, mounts, made)
                return
            except InfranetesError as error:
                failed = error
            # This raises if the agent is gone. The disks then stay plugged, and the caller tries again.
            missing = await _missing(sandbox, disks)
            await provider.hide_disks(instance_id, [disk_name(disk.diff_id) for disk in missing])
            if not isinstance(failed, (Unavailable, DeadlineExceeded)):
                raise failed
        raise _NotSeen(
            f"the VM of sandbox {sandbox.id} does not see a layer that it is shown as a disk: {failed}"
        )

    async def _send(self, sandbox: Sandbox, disk: LayerDisk) -> None:
        """Send the part of the layer that the VM has just said that it lacks.

        :raise DataLoss: the data that has arrived is not the layer."""
        arrived = sandbox.loads.arrived
        async with sandbox.loads.streams:
            offset = arrived[disk.diff_id]
            if offset:
                _log.info("sending layer {layer} to sandbox {sandbox} continues at {offset} of {size} bytes",
                          layer=disk.diff_id, sandbox=sandbox.id, offset=offset, size=disk.size)  # fmt: skip

            def count(size: int) -> None:
                arrived[disk.diff_id] += size

            header = vmserver.PutLayerHeader(
                diff_id=disk.diff_id, size=disk.size, digest=disk.digest, offset=offset
            )
            await sandbox.agent().put_layer(header, FileChunks(self._reactor, disk.path, offset, count))
            arrived[disk.diff_id] = disk.size


async def shown_layers(providers: Providers, sandbox: Sandbox) -> set[str] | None:
    """Return the diff ids of the layers that the VM is shown as disks; None: the provider can't show any."""
    provider = providers.of(sandbox.record).provider
    if not IShowsDisks.providedBy(provider):
        return None
    return {layer_of(disk) for disk in await provider.shown_disks(sandbox.record.instance_id)}


async def _missing(sandbox: Sandbox, disks: Sequence[LayerDisk]) -> list[LayerDisk]:
    """Return the disks that the agent has not mounted, and note how much of them has arrived."""
    states = await sandbox.agent().layers([disk.diff_id for disk in disks])
    missing = []
    for disk, state in zip(disks, states, strict=True):
        if not state.mounted:
            missing.append(disk)
            if disk.diff_id not in sandbox.loads.flights():
                sandbox.loads.arrived[disk.diff_id] = _arrived(disk, state)
    return missing


async def _mount(sandbox: Sandbox, mounts: Sequence[vmserver.LayerDisk], made: _Made | None) -> None:
    """Have the agent mount disks and, given `made`, make the image in the same call."""
    if made is None:
        await sandbox.agent().mount_layers(mounts)
        return
    await sandbox.agent().add_image(made.id, made.configuration, mounts)
    made.done = True


def disk_name(diff_id: str) -> str:
    """Return the name of the layer's disk, by which a later daemon recognizes it."""
    return diff_id.removeprefix("sha256:")


def layer_of(disk: ShownDisk) -> str:
    """Return the diff id of the layer that the disk shows."""
    return f"sha256:{disk.name}"


def _arrived(disk: LayerDisk, state: vmserver.LayerState) -> int:
    """Return how many bytes of the disk the VM has; 0 if those that it has are of another file."""
    return min(state.arrived, disk.size) if state.digest == disk.digest else 0
