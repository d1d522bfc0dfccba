# SPDX-License-Identifier: Apache-2.0
"""The VMs of pods whose image is the VM: booted when a container names the image, destroyed if that fails."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import Protocol

import attrs
from twisted.internet.defer import CancelledError
from twisted.logger import Logger

from infranetes.images import Image
from infranetes.machines.ids import new_id
from infranetes.pods.node.handlers import Handlers
from infranetes.pods.node.hooks import Features
from infranetes.pods.node.images import Images
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.sandboxes.launch import Dns, Launches
from infranetes.pods.store.states import SandboxState
from infranetes.pods.vm.agent_events import AgentConnections
from infranetes.pods.vm.sandbox_vm import machine_for
from infranetes.providers import machine_annotations
from infranetes.providers.annotations import read
from infranetes.providers.hypervisor import IBootsGuests, IBootsImages
from infranetes.providers.machine_annotations import GuestWay, Root
from infranetes.providers.machine_images import BaseDisk, BootDisk, GuestBoot, ImageBoot, Names
from infranetes_common.concurrency import Event, Flight, settled, start
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.wire import cri

_log = Logger()


def is_half_ended(sandbox: Sandbox) -> bool:
    """Whether the sandbox has, or may have, a VM that is to be destroyed before it can have another.

    A boot was begun by an earlier daemon, or is not undone yet, or destroying a VM that was up has failed."""
    if sandbox.state is SandboxState.BOOTING:
        return sandbox.launching is None or sandbox.launching.done
    return is_being_vacated(sandbox)


def is_being_vacated(sandbox: Sandbox) -> bool:
    """Whether the VM of a READY sandbox, which is an image's, is being destroyed, or could not be."""
    return sandbox.state is SandboxState.READY and sandbox.ending is not None


class MachineDisks(Protocol):
    """The disks in the images that the node has."""

    async def base(self, image: Image) -> BaseDisk:
        """Return the disk in an image, taken out of it if that was not done before.

        :raise InvalidArgument: there is no disk in it, or one that can't be booted; the message says why.
        :raise ResourceExhausted: there is no room for it."""


class RootVolumes(Protocol):
    """The volumes that are roots of VMs; see `infranetes.volumes.pod_volumes.PodVolumes`."""

    async def root(
        self, sandbox: Sandbox, config: cri.ContainerConfig, base: BaseDisk, *, replace: bool
    ) -> BootDisk | None:
        """Return the volume that is the root of a container's VM, once it is one; None: it has none."""

    def check_no_root(self, sandbox: Sandbox, config: cri.ContainerConfig) -> None:
        """Check that the container of a VM that boots a cloud's image has none."""


class GuestBoots(Protocol):
    """Makes what guests of clouds are launched with."""

    async def boot(self, sandbox: Sandbox, provider: IBootsGuests) -> GuestBoot | None:
        """Return with what a VM is launched; None: our agent is in its image.

        :raise InfranetesError: what the pod asks for can't be, or can't be had now."""


@attrs.frozen
class BootSources:
    """What VMs are booted from besides the images of clouds.

    :ivar disks: those of images that the node has; None: clouds have all of them.
    :ivar roots: the volumes that are roots; None: no volume can be one.
    :ivar guests: those without our agent; None: there are none.
    """

    disks: MachineDisks | None = None
    roots: RootVolumes | None = None
    guests: GuestBoots | None = None


def booted_from(image: Image) -> str:
    """Return what the record of a sandbox says that its VM was booted from."""
    return image.machine or image.id


@attrs.frozen(eq=False, repr=False)
class MachineImages:
    """Boots the VMs of VACANT sandboxes from images, and makes sandboxes VACANT again.

    :param stopping: happens when the daemon stops: it leaves boots to the next one."""

    _inventory: Inventory
    _providers: Providers
    _handlers: Handlers
    _features: Features
    _images: Images
    _launches: Launches
    _connections: AgentConnections
    _dns: Dns
    _stopping: Event[None]
    _sources: BootSources

    async def boot(self, sandbox: Sandbox, image: Image, config: cri.ContainerConfig) -> None:
        """Boot the sandbox's VM from `image`. Does nothing if it runs from that already.

        :param config: the container's.
        :raise FailedPrecondition: the VM runs from another image, or the sandbox is being stopped.
        :raise InfranetesError: a step failed; the VM is destroyed."""
        if sandbox.state is SandboxState.BOOTING or is_being_vacated(sandbox):
            await self.vacate(sandbox).join()
        if sandbox.state is SandboxState.READY and sandbox.record.image == booted_from(image):
            return
        if sandbox.state is not SandboxState.VACANT:
            has = f" from image {sandbox.record.image}" if sandbox.record.image else ""
            raise FailedPrecondition(
                f"sandbox {sandbox.id} can't be booted: it is {sandbox.state.value}{has}; make another pod"
            )
        self._providers.of(sandbox.record).check_ready()
        sandbox.aborted, sandbox.ending = "", None
        sandbox.launching = Flight(self._record_and_launch(sandbox, image, config))
        await sandbox.launching.join()

    async def _record_and_launch(self, sandbox: Sandbox, image: Image, config: cri.ContainerConfig) -> None:
        # A BOOTING sandbox without a `launching` flight counts as one that an earlier daemon left.
        record = sandbox.record.to(SandboxState.BOOTING, image=booted_from(image))
        try:
            await self._inventory.save(sandbox, record)
        except CancelledError:
            raise Unavailable(f"sandbox {sandbox.id}: {sandbox.aborted or 'the boot was ended'}") from None
        await self._launch(sandbox, image, config)

    async def _launch(self, sandbox: Sandbox, image: Image, config: cri.ContainerConfig) -> None:
        try:
            async with AsyncExitStack() as held:
                prepare = partial(self._prepared, sandbox, image, config, held)
                await self._launches.launch(sandbox, self._undo, prepare)
        except Exception:
            if not sandbox.aborted and not self._stopping.happened:
                # The image may have been removed from the catalogue, in which case it has to be pulled anew.
                check = start(self._images.check(image.id))
                self._inventory.note(check, f"whether image {image.id} still exists")
            raise

    async def _prepared(
        self, sandbox: Sandbox, image: Image, container: cri.ContainerConfig, held: AsyncExitStack
    ) -> ImageBoot | GuestBoot | None:
        """Return what the sandbox's VM boots; None: its cloud has the image, with our agent.

        :param held: keeps the image's files, which may be removed meanwhile, until the VM has them open."""
        handler = self._handlers.of(sandbox.record)
        if not IBootsImages.providedBy(handler.node_provider.provider):
            if self._sources.roots is not None:
                self._sources.roots.check_no_root(sandbox, container)
            if self._sources.guests is not None and IBootsGuests.providedBy(handler.node_provider.provider):
                return await self._sources.guests.boot(sandbox, handler.node_provider.provider)
            return None
        if self._sources.disks is None:
            raise FailedPrecondition(f"image {image.id} can't be booted: this node has no images of machines")
        annotations = handler.vm_annotations(sandbox.config.annotations)
        await held.enter_async_context(self._images.held(image.id))
        base = await self._sources.disks.base(image)
        choices = machine_annotations.read(annotations)
        hardware = choices.hardware_for(base)
        if choices.guest.guest is not None:
            base = attrs.evolve(base, has_agent=choices.guest.guest is GuestWay.AGENT)
        config = sandbox.config
        dns = config.dns_config if config.dns_config.servers else await self._dns()
        names = Names(config.hostname, tuple(dns.servers), tuple(dns.searches))
        root = None
        if self._sources.roots is not None:
            replace = choices.guest.root is Root.REPLACE
            root = await self._sources.roots.root(sandbox, container, base, replace=replace)
        return ImageBoot(base, hardware, read(annotations).disk, root, names=names)

    async def _undo(self, sandbox: Sandbox) -> None:
        try:
            await self.vacate(sandbox).join()
        except InfranetesError as error:
            _log.error(
                "the VM of sandbox {sandbox}, whose boot failed, is not destroyed yet: {error}; the next "
                "pass tries again",
                sandbox=sandbox.id,
                error=error,
            )

    async def give_up(self, sandbox: Sandbox) -> None:
        """End the boot and destroy the VM, because the container that it was booted for can't be created."""
        flight = sandbox.launching
        if sandbox.state is SandboxState.BOOTING and flight is not None and not flight.done:
            sandbox.aborted = sandbox.aborted or "its container was given up"
            flight.cancel()
            await settled([flight.join()])
        if sandbox.state in (SandboxState.BOOTING, SandboxState.READY):
            await self._undo(sandbox)

    def vacate(self, sandbox: Sandbox) -> Flight[None]:
        """Destroy the VM and make the sandbox VACANT, unless it is being stopped.

        :raise InfranetesError: the VM is not destroyed; try again."""
        if sandbox.ending is None or sandbox.ending.done:
            sandbox.ending = Flight(self._vacate(sandbox))
        return sandbox.ending

    async def _vacate(self, sandbox: Sandbox) -> None:
        self._connections.disconnect(sandbox)
        await sandbox.machine.tear_down()
        await self._features.vm_destroyed(sandbox)
        if sandbox.state not in (SandboxState.BOOTING, SandboxState.READY):
            return
        record = sandbox.record.to(
            SandboxState.VACANT, token=new_id(), image="", instance_id="", address="", agent_host="",
            agent_port=0, certificate_until=0, certificate_key="",
        )  # fmt: skip
        await self._inventory.store.put_sandbox(record)
        if sandbox.state in (SandboxState.BOOTING, SandboxState.READY):
            self._inventory.become(sandbox, record)
            sandbox.change_machine(machine_for(self._providers, self._inventory, sandbox))
