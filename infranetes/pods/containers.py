"""Creating, running, stopping and removing containers, and commands in them."""

from __future__ import annotations

import contextlib
from typing import Any

import attrs
from twisted.internet.defer import CancelledError
from twisted.logger import Logger

from infranetes.agent.client import AgentClient
from infranetes.pods import apparmor, carried
from infranetes.pods.boots import Boots
from infranetes.pods.follow import GONE_REASON, end, take
from infranetes.pods.inventory import Container, Sandbox, container_name
from infranetes.pods.node import MACHINE_DRAIN_SECONDS, Node
from infranetes.pods.records import ContainerRecord, new_id
from infranetes.pods.sandboxes import Sandboxes
from infranetes.pods.states import ContainerState, SandboxState
from infranetes.pods.waits import Flight, go, sleep, uncut, within
from infranetes.threads import in_thread
from infranetes_common import cri
from infranetes_common.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    NotFound,
    Unavailable,
)

# Bytes of each stream. CRI clients take messages of 16 MiB: both streams, and what is around them.
MAX_EXEC_OUTPUT = 8 * 1024 * 1024 - 4096
STOP_DRAIN_SECONDS = 2.0  # a stop answers when the log is complete, or at the latest after this
UNDO_SECONDS = 10.0
LOOKS = 8  # at the provider, for a VM that may just have ended
LOOK_PAUSE_SECONDS = 0.25

_log = Logger()


class Containers:
    """The container calls, without their wire."""

    def __init__(self, node: Node, sandboxes: Sandboxes) -> None:
        self._node = node
        self._sandboxes = sandboxes
        self.boots = Boots(node)

    def known(self, id: str) -> Container:
        """The container that a client names: one that the CRI shows.

        :raise NotFound: there is none. :raise InvalidArgument: there are several."""
        container = self._node.inventory.container(id)
        if not container.shown:
            raise NotFound(f"container {container.id} is not there yet: it is being created")
        if not container.record.claimed:
            claimed = attrs.evolve(container.record, claimed=True)
            self._node.note(self._node.save_container(container, claimed), f"container {container.id}")
        return container

    # ---- creating

    async def create(self, sandbox_id: str, config: cri.ContainerConfig) -> str:
        """A new container's id. Cancelling this leaves the work to whoever asks again.

        :raise AlreadyExists: the name is another container's. :raise FailedPrecondition: no VM to be in.
        :raise InfranetesError: it could not be made, and nothing is left of it."""
        sandbox = self._sandboxes.known(sandbox_id)
        if sandbox.state not in (SandboxState.VACANT, SandboxState.BOOTING):
            _client(sandbox)
        name = container_name(config.metadata)
        blob = config.SerializeToString(deterministic=True)
        container = self._node.inventory.container_named(sandbox, name)
        if container is None:
            container = self._begin(sandbox, config, blob)
        else:
            fresh = container.state is ContainerState.CREATING or (
                container.state is ContainerState.CREATED and not container.record.claimed
            )
            if not fresh or container.record.config != blob:
                raise AlreadyExists(
                    f"container {config.metadata.name} (attempt {config.metadata.attempt}) of sandbox "
                    f"{sandbox.id} is {container.id} already: remove it, or ask for another attempt"
                )
        if container.creating is not None:
            await container.creating.join()
        return self.known(container.id).id

    def _begin(self, sandbox: Sandbox, config: cri.ContainerConfig, blob: bytes) -> Container:
        image = self._node.images.resolve(config.image.image)
        if image.machine and sandbox.containers:
            raise FailedPrecondition(
                f"sandbox {sandbox.id} is container {next(iter(sandbox.containers))}: a pod whose image is "
                "the VM has one container"
            )
        carried.check_target(config, sandbox.containers)
        container = Container(
            sandbox,
            ContainerRecord(
                id=new_id(),
                sandbox_id=sandbox.id,
                state=ContainerState.CREATING,
                config=blob,
                image_ref=image.id,
                image_id=image.id,
                created_at=self._node.now(),
            ),
        )
        container.making = True
        self._node.inventory.add_container(container)
        container.creating = Flight(go(self._create(container, image)))
        return container

    async def _create(self, container: Container, image: Any) -> None:
        sandbox = container.sandbox
        asked: list[AgentClient] = []
        try:
            await self._node.store.put_container(container.record)
            config = await self._carried(container.config)
            if image.machine:
                await self.boots.boot(sandbox, image)
            volumes = carried.mounted_images(config, self._node.images)
            for needed in {one.id: one for one in (image, *volumes.values())}.values():
                await self._load(sandbox, needed)
            _client(sandbox)
            config = await self._node.volumes.bring(container, carried.with_images(config, volumes))
            client = _client(sandbox)
            asked.append(client)
            state = await client.create(container.id, image.id, config, sandbox.config)
            created = container.record.to(
                ContainerState.CREATED, created_at=state.created_at or container.record.created_at
            )
            await self._node.store.put_container(created)
            container.record = created
            container.seen = state
        except BaseException as error:
            if self._node.stopping:
                raise
            await uncut(go(self._undo(container, asked)))
            if image.machine:
                await uncut(go(self.boots.give_up(sandbox)))
            if isinstance(error, CancelledError):
                raise Unavailable(f"sandbox {sandbox.id} is being stopped") from None
            raise
        finally:
            container.making = False

    async def _carried(self, config: cri.ContainerConfig) -> cri.ContainerConfig:
        """`config` with what it names of the node's files, but for its mounts."""
        if path := carried.seccomp_path(config):
            text = await in_thread(self._node.clock, carried.read_profile, path)
            config = carried.with_profile(config, text)
        if profile := apparmor.name(config):
            text = await in_thread(self._node.clock, apparmor.find, self._node.apparmor, profile)
            config = apparmor.put(config, profile, text)
        return config

    async def _undo(self, container: Container, asked: list[AgentClient]) -> None:
        """An agent that can't be told now is told when its snapshot shows a container of no record."""
        self._node.inventory.discard_container(container)
        for client in asked:
            try:
                await client.remove(container.id, within=UNDO_SECONDS)
            except InfranetesError as error:
                _log.info("container {container} is not undone yet: {error}",
                          container=container.id, error=error)  # fmt: skip
        await self._node.volumes.release(container)
        self._node.note(
            self._node.store.delete_container(container.id), f"the end of container {container.id}"
        )

    async def _load(self, sandbox: Sandbox, image: Any) -> None:
        """Bring the image into the VM unless it is there. One load of an image at a time."""
        flight = sandbox.loads.get(image.id)
        if flight is None or flight.done:
            flight = sandbox.loads[image.id] = Flight(go(self._load_now(sandbox, image)))
        try:
            await flight.join()
        finally:
            if flight.done and sandbox.loads.get(image.id) is flight:
                del sandbox.loads[image.id]

    async def _load_now(self, sandbox: Sandbox, image: Any) -> None:
        client = _client(sandbox)
        if image.machine or image.id in await client.images():
            return
        began = self._node.clock.seconds()
        if image.url:
            await client.fetch_image(image.id, image.url)
            return
        present = await client.missing_layers(image.diff_ids)
        await client.load_image(image.id, self._node.images.archive(image.id, present))
        _log.info(
            "image {image} loaded into sandbox {sandbox}, {present} of {layers} layers were there: "
            "{seconds:.2f} s",
            image=image.id,
            sandbox=sandbox.id,
            present=present,
            layers=len(image.diff_ids),
            seconds=self._node.clock.seconds() - began,
        )

    # ---- running

    async def start(self, id: str) -> None:
        """Run it. Running already: nothing to do. :raise FailedPrecondition: it has ended."""
        container = self.known(id)
        if container.state is ContainerState.RUNNING:
            return
        if container.state is not ContainerState.CREATED:
            raise FailedPrecondition(
                f"container {container.id} has {'ended' if container.removing is None else 'to be removed'}: "
                "create another attempt"
            )
        client = _client(container.sandbox)
        take(self._node, container, await uncut(go(client.start(container.id))))
        await self._node.logs.opened(container)

    async def stop(self, id: str, grace_seconds: int) -> None:
        """End it; answers when it has ended. Unknown, never started or ended: nothing to do."""
        try:
            container = self.known(id)
        except NotFound:
            return
        if container.state is ContainerState.RUNNING:
            await uncut(go(self._stop(container, grace_seconds)))
        if container.state is ContainerState.EXITED:
            await self._drained(container, STOP_DRAIN_SECONDS)

    async def _stop(self, container: Container, grace_seconds: int) -> None:
        try:
            state = await _client(container.sandbox).stop(container.id, grace_seconds)
        except NotFound:
            end(self._node, container, GONE_REASON, "its VM no longer knows this container")
        except Unavailable:
            if not await self._went_with_its_vm(container):
                raise
        else:
            await self._node.volumes.flush(container)
            take(self._node, container, state, at_once=True)

    async def _went_with_its_vm(self, container: Container) -> bool:
        """An agent was lost. It may be because its VM was, of which the provider needs a moment to know."""
        for _ in range(LOOKS):
            with contextlib.suppress(InfranetesError):
                await self._sandboxes.look(container.sandbox)
            if container.state is not ContainerState.RUNNING:
                return True
            await sleep(self._node.clock, LOOK_PAUSE_SECONDS)
        return False

    async def _drained(self, container: Container, seconds: float) -> bool:
        """Whether the log is complete; waits for that at most so long."""
        try:
            await within(self._node.clock, seconds, self._node.logs.drain(container), "the rest of the log")
        except DeadlineExceeded:
            return False
        return True

    async def remove(self, id: str) -> None:
        """End and forget it. Unknown: nothing to do."""
        try:
            container = self._node.inventory.container(id)
        except NotFound:
            return
        if container.creating is not None and not container.creating.done:
            container.creating.cancel()
            return
        await self.removal(container).join()

    def removal(self, container: Container) -> Flight[None]:
        """The end of a container; begun now unless it is under way."""
        if container.removing is None or container.removing.done:
            container.removing = Flight(go(self._remove(container)))
        return container.removing

    async def _remove(self, container: Container) -> None:
        sandbox = container.sandbox
        if sandbox.state is SandboxState.READY and sandbox.record.image:
            await self._end_machine(container)
        elif sandbox.state is SandboxState.READY:
            client = _client(sandbox)
            if container.state is ContainerState.RUNNING:
                await self._stop(container, 0)
            if container.state is ContainerState.EXITED and not await self._drained(
                container, self._node.times.drain
            ):
                _log.warn("container {container} is removed before its log was complete",
                          container=container.id)  # fmt: skip
            if container.state not in (ContainerState.REMOVING, ContainerState.CREATING):
                await self._node.save_container(container, container.record.to(ContainerState.REMOVING))
            await client.remove(container.id)
        elif sandbox.state is SandboxState.STOPPING and sandbox.stopping is not None:
            await sandbox.stopping.join()
        await self._node.volumes.release(container)
        self._node.logs.abort(container)
        await self._node.store.delete_container(container.id)
        self._node.inventory.discard_container(container)

    async def _end_machine(self, container: Container) -> None:
        """The container is the VM: nothing of it remains but the sandbox, which may boot another."""
        try:
            if container.state is ContainerState.RUNNING:
                await self._stop(container, 0)
        except InfranetesError as error:
            _log.info("the machine {container} is ended unasked: {error}",
                      container=container.id, error=error)  # fmt: skip
        if container.state is ContainerState.EXITED:
            await self._drained(container, MACHINE_DRAIN_SECONDS)
        if container.state not in (ContainerState.REMOVING, ContainerState.CREATING):
            await self._node.save_container(container, container.record.to(ContainerState.REMOVING))
        await self.boots.vacate(container.sandbox).join()

    # ---- while it runs

    async def update(self, id: str, resources: cri.LinuxContainerResources) -> None:
        """Put limits in force. :raise FailedPrecondition: it has ended."""
        container = self.known(id)
        if container.state not in (ContainerState.CREATED, ContainerState.RUNNING):
            raise FailedPrecondition(f"container {container.id} has ended: its resources can't be changed")
        client = _client(container.sandbox)
        take(self._node, container, await uncut(go(client.update(container.id, resources))))

    async def exec_sync(self, id: str, command: list[str], seconds: int, limit: float | None) -> Any:
        """Run a command to its end: a vmserver.ExecSyncResponse. Cancelling this ends the command.

        :param seconds: 0: until `limit`, the call's own deadline in seconds, if it has one.
        :raise DeadlineExceeded: it took longer and was killed. :raise FailedPrecondition: not running."""
        container = self.known(id)
        if container.state is not ContainerState.RUNNING:
            raise FailedPrecondition(f"container {container.id} is not running")
        client = _client(container.sandbox)
        most = self._node.times.exec_limit if limit is None else min(limit, self._node.times.exec_limit)
        try:
            return await client.exec_sync(container.id, command, seconds, most, MAX_EXEC_OUTPUT)
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"the command in container {container.id} took longer than {seconds or most:.0f} s and "
                "was killed"
            ) from None

    async def reopen_log(self, id: str) -> None:
        """Go on in a new file at the log's path. :raise FailedPrecondition: it is not running."""
        container = self.known(id)
        if container.state is not ContainerState.RUNNING:
            raise FailedPrecondition(f"container {container.id} is not running: its log is not open")
        await self._node.logs.reopen(container)


def _client(sandbox: Sandbox) -> AgentClient:
    """The agent of a sandbox that has a VM to ask."""
    if sandbox.state is not SandboxState.READY or sandbox.client is None:
        raise FailedPrecondition(f"sandbox {sandbox.id} is not ready: it is {sandbox.state.value}")
    return sandbox.client
