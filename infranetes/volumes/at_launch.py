# SPDX-License-Identifier: Apache-2.0
"""A pod's volumes before it has containers: its VM is launched where they are, and given them as it starts.

kubelet has volumes published before it asks for the sandbox, at paths that name the pod's UID. Whatever
fails here is tried again when a container mounts the volume, which then says what the trouble is. Only what
no container could mend any more is refused: that the VM would be in the wrong zone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from twisted.internet.defer import CancelledError
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.pods.context import NodeContext
from infranetes.pods.inventory import Sandbox
from infranetes.providers.volumes import IHasVolumes, IVolumes, VolumeDisk
from infranetes.volumes.published import PublishedVolume
from infranetes_common.concurrency import Flight, settled, start, within
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.volume_disks import checked_options

LOOK_SECONDS = 60.0

FindForPod = Callable[[str], Awaitable[Sequence[PublishedVolume]]]
"""Look up which volumes are published for the pod with a UID."""

Attach = Callable[[Sandbox, PublishedVolume], Awaitable[object]]
"""Record a volume as the sandbox's, and attach it to its VM. Idempotent."""

_log = Logger()


class VolumesAtLaunch:
    """The volumes that are published for pods whose VMs are launched."""

    def __init__(self, node: NodeContext, find: FindForPod, attach: Attach) -> None:
        self._node = node
        self._find = find
        self._attach = attach
        self._attaching: dict[Sandbox, Flight[None]] = {}

    async def zone(self, sandbox: Sandbox) -> str:
        """Return the zone that a sandbox's VM has to be in to be given its pod's volumes; "": any.

        :raise FailedPrecondition: they are in different ones.
        :raise Unavailable, DeadlineExceeded: the provider does not tell now."""
        provider = self._node.side_of(sandbox.record).provider
        if not IHasVolumes.providedBy(provider):
            return ""
        wanted = await self._wanted(sandbox)
        found = await settled(start(self._look(provider.volumes, one)) for one in wanted)
        zones: dict[str, str] = {}  # with one of the volumes there
        for disk in found:
            if isinstance(disk, Failure):
                disk.raiseException()
            elif disk is not None and disk.zone:
                zones.setdefault(disk.zone, disk.id)
        if len(zones) > 1:
            places = ", ".join(f"volume {volume} in {zone}" for zone, volume in sorted(zones.items()))
            raise FailedPrecondition(
                f"the pod's volumes are in different zones ({places}), and its VM can be in one only: give "
                "the pod volumes of one zone"
            )
        return next(iter(zones), "")

    async def _look(self, volumes: IVolumes, wanted: PublishedVolume) -> VolumeDisk | None:
        looking = volumes.get(wanted.volume)
        what = f"looking for volume {wanted.volume}"
        try:
            return await within(self._node.clock, LOOK_SECONDS, looking, what)
        except (Unavailable, DeadlineExceeded):
            raise
        except InfranetesError as error:
            _log.info("{error}", error=error)
            return None

    def begin(self, sandbox: Sandbox) -> None:
        """Begin to attach a sandbox's volumes to its VM, which runs. Idempotent."""
        if sandbox in self._attaching or not self._has_volumes(sandbox):
            return
        self._attaching[sandbox] = flight = Flight(self._attach_all(sandbox))
        flight.join().addBoth(self._ended, sandbox)

    async def end(self, sandbox: Sandbox) -> None:
        """Attach nothing more to a sandbox's VM, which is to end. Idempotent."""
        flight = self._attaching.get(sandbox)
        if flight is not None:
            flight.cancel()
            await settled([flight.join()])

    def _ended(self, outcome: object, sandbox: Sandbox) -> None:
        del self._attaching[sandbox]
        if isinstance(outcome, Failure) and not outcome.check(CancelledError) and not self._node.stopping:
            _log.failure("attaching volumes with the launch of {sandbox}", outcome, sandbox=sandbox.id)

    async def _attach_all(self, sandbox: Sandbox) -> None:
        wanted = await self._wanted(sandbox)
        outcomes = await settled(start(self._attach_one(sandbox, one)) for one in wanted)
        for one, outcome in zip(wanted, outcomes, strict=True):
            if not isinstance(outcome, Failure) or self._node.stopping:
                continue
            if not outcome.check(InfranetesError):
                outcome.raiseException()
            _log.info(
                "volume {volume} is not attached with the launch of sandbox {sandbox}; a container that "
                "mounts it tries again: {error}",
                volume=one.volume,
                sandbox=sandbox.id,
                error=outcome.value,
            )

    async def _attach_one(self, sandbox: Sandbox, wanted: PublishedVolume) -> None:
        checked_options(wanted.mount_flags)  # a container that asks for others is refused
        await self._attach(sandbox, wanted)

    async def _wanted(self, sandbox: Sandbox) -> Sequence[PublishedVolume]:
        """What is published for the pod, as far as it can be told."""
        try:
            return await self._find(sandbox.config.metadata.uid)
        except InfranetesError as error:
            _log.info(
                "which volumes sandbox {sandbox} has is not known at its launch: {error}",
                sandbox=sandbox.id,
                error=error,
            )
            return []

    def _has_volumes(self, sandbox: Sandbox) -> bool:
        return IHasVolumes.providedBy(self._node.side_of(sandbox.record).provider)
