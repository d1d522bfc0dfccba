# SPDX-License-Identifier: Apache-2.0
"""A pod's volumes before it has containers: its VM is launched in their zone, and gets them as it starts.

kubelet has volumes published before it asks for the sandbox, at paths that name the pod's UID. Whatever
fails here is tried again when a container mounts the volume, which then says what the trouble is. Only what
no container could mend any more is refused: that the VM would be in the wrong zone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import attrs
from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.store.states import SandboxState
from infranetes.providers.volumes import IHasVolumes, IVolumes, VolumeDisk
from infranetes.volumes.published import PublishedVolume
from infranetes_common.concurrency import Event, Flight, settled, start, within
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.user_namespaces import user_namespace
from infranetes_common.volume_disks import checked_options

LOOK_SECONDS = 60.0

_LAUNCHED = (SandboxState.LAUNCHING, SandboxState.BOOTING)

FindForPod = Callable[[str], Awaitable[Sequence[PublishedVolume]]]
"""Look up which volumes are published for the pod with a UID."""

Have = Callable[[Sandbox, PublishedVolume], Awaitable[object]]
"""Have a sandbox's VM given a volume, or mount it. Idempotent."""

_log = Logger()


@attrs.frozen
class _Launch:
    """The work in progress for one sandbox. :ivar answers: happens once the agent of its VM answers."""

    flight: Flight[None]
    answers: Event[None]


class VolumesAtLaunch:
    """The volumes that are published for pods whose VMs are launched.

    :param attach: records a volume as the sandbox's, and attaches it.
    :param mount: mounts what is attached, or finds it if it is raw.
    :ivar stopping: whether the daemon stops, so that what fails is not said."""

    def __init__(
        self, clock: IReactorTime, providers: Providers, find: FindForPod, attach: Have, mount: Have
    ) -> None:
        self._clock = clock
        self._providers = providers
        self.stopping = False
        self._find = find
        self._attach = attach
        self._mount = mount
        self._launches: dict[Sandbox, _Launch] = {}

    async def zone(self, sandbox: Sandbox) -> str:
        """Return the zone that a sandbox's VM has to be in to be given its pod's volumes; "": any.

        :raise FailedPrecondition: they are in different ones.
        :raise Unavailable, DeadlineExceeded: the provider does not tell now."""
        provider = self._providers.of(sandbox.record).provider
        if not IHasVolumes.providedBy(provider):
            return ""
        wanted = await self._wanted(sandbox)
        found = await settled(start(self._look(provider.volumes, one)) for one in wanted)
        zones: dict[str, str] = {}  # by zone: one of the volumes in it
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
            return await within(self._clock, LOOK_SECONDS, looking, what)
        except (Unavailable, DeadlineExceeded):
            raise
        except InfranetesError as error:
            _log.info("{error}", error=error)
            return None

    def begin(self, sandbox: Sandbox) -> None:
        """Begin to attach volumes to the VM, which runs, of a sandbox that is being launched. Idempotent."""
        if sandbox.state not in _LAUNCHED or sandbox in self._launches or not self._has_volumes(sandbox):
            return
        answers = Event[None]()
        self._launches[sandbox] = launch = _Launch(Flight(self._all(sandbox, answers)), answers)
        launch.flight.join().addBoth(self._ended, sandbox)

    def agent_answers(self, sandbox: Sandbox) -> None:
        """Have what is attached mounted too, by the agent of the sandbox's VM. Idempotent."""
        launch = self._launches.get(sandbox)
        if launch is not None:
            launch.answers.succeed(None)

    async def end(self, sandbox: Sandbox) -> None:
        """Attach and mount nothing more in a sandbox's VM, which is to end. Idempotent."""
        launch = self._launches.get(sandbox)
        if launch is not None:
            launch.flight.cancel()
            await settled([launch.flight.join()])

    def _ended(self, outcome: object, sandbox: Sandbox) -> None:
        del self._launches[sandbox]
        if isinstance(outcome, Failure) and not outcome.check(CancelledError) and not self.stopping:
            _log.failure("volumes at the launch of {sandbox}", outcome, sandbox=sandbox.id)

    async def _all(self, sandbox: Sandbox, answers: Event[None]) -> None:
        attached = await self._each(sandbox, await self._wanted(sandbox), self._attach_one, "attached")
        if attached:
            await answers.wait()
            await self._each(sandbox, attached, self._mount, "mounted")

    async def _each(
        self, sandbox: Sandbox, wanted: Sequence[PublishedVolume], have: Have, what: str
    ) -> Sequence[PublishedVolume]:
        """Do something for all volumes; return those for which it is done."""
        done = []
        outcomes = await settled(start(_awaited(have(sandbox, one))) for one in wanted)
        for one, outcome in zip(wanted, outcomes, strict=True):
            if not isinstance(outcome, Failure):
                done.append(one)
            elif not outcome.check(InfranetesError):
                outcome.raiseException()
            elif not self.stopping:
                _log.info(
                    "volume {volume} could not be {what} at the launch of sandbox {sandbox}; a container "
                    "that "
                    "mounts it tries again: {error}",
                    volume=one.volume,
                    what=what,
                    sandbox=sandbox.id,
                    error=outcome.value,
                )
        return done

    async def _attach_one(self, sandbox: Sandbox, wanted: PublishedVolume) -> None:
        checked_options(wanted.mount_flags)  # as for a container's mounts: others are refused
        await self._attach(sandbox, wanted)

    async def _wanted(self, sandbox: Sandbox) -> Sequence[PublishedVolume]:
        """Return the volumes that are published for the pod; none if they can't be found out."""
        options = sandbox.config.linux.security_context.namespace_options
        if user_namespace(options, "config.linux.security_context.namespace_options") is not None:
            return []  # such a pod's containers are refused volumes
        try:
            return await self._find(sandbox.config.metadata.uid)
        except InfranetesError as error:
            _log.info(
                "the volumes of sandbox {sandbox} are not known at its launch: {error}",
                sandbox=sandbox.id,
                error=error,
            )
            return []

    def _has_volumes(self, sandbox: Sandbox) -> bool:
        return IHasVolumes.providedBy(self._providers.of(sandbox.record).provider)


async def _awaited(awaitable: Awaitable[object]) -> object:
    return await awaitable
