# SPDX-License-Identifier: Apache-2.0
"""CreateContainer: record a container and create it at its agent, or undo all of it."""

from __future__ import annotations

import attrs
from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.images import Image
from infranetes.machines.ids import new_id
from infranetes.machines.interface import IAgent
from infranetes.pods.containers import node_files, user_namespaces
from infranetes.pods.containers.profiles import SecurityProfiles
from infranetes.pods.images.image_loads import ImageLoads
from infranetes.pods.images.removal import UnusedImages
from infranetes.pods.node.handler_config import MACHINE
from infranetes.pods.node.handlers import Handlers
from infranetes.pods.node.hooks import Features
from infranetes.pods.node.images import Images
from infranetes.pods.node.inventory import Container, Inventory, Sandbox, container_name
from infranetes.pods.node.pinning import guests, pin, pin_later
from infranetes.pods.sandboxes.machine_images import MachineImages, is_being_vacated
from infranetes.pods.store.records import ContainerRecord
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.pods.vm.huge_pages import check_huge_pages
from infranetes.pods.vm.resize import Resizer
from infranetes_common.concurrency import Event, Flight, start, to_its_end
from infranetes_common.errors import AlreadyExists, FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.huge_pages import pages_of
from infranetes_common.nanoseconds import nanoseconds
from infranetes_common.wire import cri

UNDO_SECONDS = 10.0  # the time that an agent gets to remove a container whose creation failed

_log = Logger()


@attrs.frozen(eq=False, repr=False)
class ContainerCreation:
    """Creates containers. Several requests for the same one share the work.

    :param stopping: happens when the daemon stops: it leaves what is under way to the next one."""

    _clock: IReactorTime
    _inventory: Inventory
    _images: Images
    _handlers: Handlers
    _features: Features
    _profiles: SecurityProfiles
    _image_loads: ImageLoads
    _unused_images: UnusedImages
    _resizer: Resizer
    _machine_images: MachineImages
    _stopping: Event[None]

    async def create(self, sandbox: Sandbox, config: cri.ContainerConfig) -> Container:
        """Create the container, or join its creation.

        Cancelling does not end the work: a repeated call joins it.

        :raise AlreadyExists: another container has the name. :raise FailedPrecondition: there is no VM.
        :raise InfranetesError: the creation failed and was undone."""
        _check_vm(sandbox)
        container = self._named(sandbox, config)
        if container is None:
            user_namespaces.check(config, sandbox.config)
            image = await self._images.find(config.image.image)
            # The VM may have been stopped meanwhile, and another request may have begun the container.
            _check_vm(sandbox)
            container = self._named(sandbox, config) or self._begin(sandbox, config, image)
        if container.creating is not None:
            await container.creating.join()
        return container

    def _named(self, sandbox: Sandbox, config: cri.ContainerConfig) -> Container | None:
        """Return the container of this name, or None.

        :raise AlreadyExists: it is not the one that this request asks for."""
        container = self._inventory.container_named(sandbox, container_name(config.metadata))
        if container is not None:
            _check_same(container, config)
        return container

    def _begin(self, sandbox: Sandbox, config: cri.ContainerConfig, image: Image) -> Container:
        sandbox.check_stays()
        self._handlers.check_image(sandbox.record, image)
        if sandbox.record.kind == MACHINE and sandbox.containers:
            raise FailedPrecondition(
                f"sandbox {sandbox.id} is container {next(iter(sandbox.containers))}: a pod whose image is "
                "the VM has one container"
            )
        node_files.check_target_container(config, sandbox.containers)
        container = Container(
            sandbox,
            ContainerRecord(
                id=new_id(),
                sandbox_id=sandbox.id,
                state=ContainerState.CREATING,
                config=config.SerializeToString(deterministic=True),
                image_ref=image.told_id or image.id,
                image_id=image.id,
                created_at=nanoseconds(self._clock),
            ),
        )
        container.being_created = True
        self._inventory.add_container(container)
        container.creating = Flight(self._create(container, image))
        return container

    async def _create(self, container: Container, image: Image) -> None:
        name = container.config.metadata.name
        with container.sandbox.timeline.step("the container is created", image.id, container=name):
            await self._create_or_undo(container, image)

    async def _create_or_undo(self, container: Container, image: Image) -> None:
        sandbox = container.sandbox
        asked: IAgent | None = None
        try:
            await self._inventory.store.put_container(container.record)
            await self._features.before_create(container)
            config = await self._profiles.put_into(container.config)
            if sandbox.record.kind == MACHINE:
                await self._machine_images.boot(sandbox, image, config)
            await pin(sandbox)
            config = guests(config)
            if pages := pages_of(config.linux.resources):
                await check_huge_pages(sandbox.agent(), pages)
                await self._resizer.make_room(container, config.linux.resources)
            mounted = await node_files.mounted_images(config, self._images)
            for needed in (image, *mounted.values()):
                await self._image_loads.load(sandbox, needed)
            config = node_files.with_image_ids(config, mounted)
            asked = sandbox.agent()
            config = await self._features.prepare(container, config)
            report = await self._features.adopted(container, config)
            if report is None:
                report = await sandbox.agent().create(container.id, image.id, config, sandbox.config)
            created = container.record.to(
                ContainerState.CREATED, created_at=report.created_at or container.record.created_at
            )
            await self._inventory.store.put_container(created)
            container.record = created
            container.reported = report
        except BaseException as error:
            if self._stopping.happened:
                raise
            await to_its_end(start(self._undo(container, asked)))  # also if it is cancelled only then
            if isinstance(error, CancelledError):
                raise Unavailable(f"sandbox {sandbox.id} is being stopped") from None
            raise
        finally:
            container.being_created = False

    async def _undo(self, container: Container, asked: IAgent | None) -> None:
        """Remove what exists of the container.

        :param asked: the agent that has been asked for something of the container's; None: none has.

        If its agent can't be reached now, it is removed after the agent's next snapshot, which shows a
        container without a record. If the VM is the container, it goes first: no other container is to get
        that."""
        if container.sandbox.record.kind == MACHINE:
            await self._machine_images.give_up(container.sandbox)
            asked = None
        self._inventory.discard_container(container)
        pin_later(container.sandbox)
        if asked is not None:
            try:
                await asked.remove(container.id, within=UNDO_SECONDS)
            except InfranetesError as error:
                _log.info("container {container}, whose creation failed, is not removed yet: {error}",
                          container=container.id, error=error)  # fmt: skip
        await self._features.release(container)
        self._unused_images.remove_later(container.sandbox)
        deletion = self._inventory.store.delete_container(container.id)
        self._inventory.note(deletion, f"the end of container {container.id}")


def _check_vm(sandbox: Sandbox) -> None:
    """Check that the sandbox has a VM, or gets one with its container.

    :raise FailedPrecondition: the sandbox is not ready."""
    gets_one = sandbox.state in (SandboxState.VACANT, SandboxState.BOOTING) or is_being_vacated(sandbox)
    if not gets_one:
        sandbox.agent()


def _check_same(container: Container, config: cri.ContainerConfig) -> None:
    """Check that this request may join the container's creation.

    :raise AlreadyExists: it may not."""
    joinable = container.state is ContainerState.CREATING or (
        container.state is ContainerState.CREATED and not container.record.claimed
    )
    if not joinable or not node_files.same_request(container.config, config):
        raise AlreadyExists(
            f"container {config.metadata.name} (attempt {config.metadata.attempt}) of sandbox "
            f"{container.sandbox.id} is {container.id} already: remove it, or ask for another attempt"
        )
