# SPDX-License-Identifier: Apache-2.0
"""Containers that are held still while their VM is kept, and that another pod is given in a clone of it.

See `IHoldsContainers`, and the phases KEPT and GIVEN in `record`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes_common.concurrency import Notifier, run_in_thread, settled, shielded, sleep
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, NotFound
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from vmserver.containers.hooks import Hook
from vmserver.containers.oci import state as states
from vmserver.containers.oci.bundle import Bundles
from vmserver.containers.oci.container import OciContainer
from vmserver.containers.oci.hold import HELD, Freezer
from vmserver.containers.oci.index import ContainerIndex
from vmserver.containers.oci.lifecycle import Lifecycle
from vmserver.containers.oci.limit_changes import change_limits
from vmserver.containers.oci.pod_processes import PodProcesses
from vmserver.containers.oci.record import Phase
from vmserver.containers.oci.runtime import Crun

COMMAND_SECONDS = 2.0  # for commands that are being executed, such as probes, to end before all is held still

_log = Logger()


class Keeping:
    """Holds the containers of `index`, and hands them over in a clone.

    :ivar held: whether they are held, or about to be.
    """

    def __init__(
        self,
        reactor: IReactor,
        index: ContainerIndex,
        freezer: Freezer,
        lifecycle: Lifecycle,
        bundles: Bundles,
        crun: Crun,
        processes: PodProcesses,
    ) -> None:
        self._reactor = reactor
        self._index = index
        self._freezer = freezer
        self._lifecycle = lifecycle
        self._bundles = bundles
        self._crun = crun
        self._processes = processes
        self._commands = 0
        self._command_ended = Notifier()
        self.held = False

    @contextlib.contextmanager
    def command(self) -> Iterator[None]:
        """Note that a command is executed meanwhile. :raise FailedPrecondition: the containers are held."""
        self.refuse()
        self._commands += 1
        try:
            yield
        finally:
            self._commands -= 1
            self._command_ended.notify()

    def refuse(self) -> None:
        """Refuse what can't be done to containers that are held. :raise FailedPrecondition: they are."""
        if self.held:
            raise FailedPrecondition(HELD)

    # In the pod that is kept

    async def hold(self) -> list[str]:
        """See `IHoldsContainers.hold`."""
        self.held = True
        try:
            for container in self._index.all():
                if container.starting is not None:
                    with contextlib.suppress(InfranetesError):
                        await container.starting.join()
            await self._commands_end()
            running = [each for each in self._index.listed() if each.running]
            await self._freezer.freeze(self._engine_ids(running))
        except BaseException:
            await shielded(self.thaw())
            raise
        return [each.id for each in running if not each.over]

    async def thaw(self) -> None:
        """See `IHoldsContainers.thaw`."""
        await self._freezer.thaw(self._engine_ids(self._index.listed()))
        self.held = False

    async def let_go(self, container: OciContainer) -> None:
        """Let one container go on that is held, so that it can end."""
        if self.held:
            await self._freezer.thaw([container.engine_id])

    def _engine_ids(self, containers: list[OciContainer]) -> list[str]:
        held = (Phase.KEPT, Phase.GIVEN)
        ids = [each.engine_id for each in containers if each.record.phase not in held]
        return [*ids, *self._processes.ids()]

    async def _commands_end(self) -> None:
        """Wait for commands that are being executed. Those that go on for longer are held, too."""
        late = sleep(self._reactor, COMMAND_SECONDS)
        late.addCallback(lambda _: self._command_ended.notify())
        try:
            while self._commands and not late.called:
                await self._command_ended.wait()
        finally:
            if not late.called:
                late.addErrback(lambda _: None)
                late.cancel()

    # In a clone

    async def keep(self) -> None:
        """See `IHoldsContainers.keep`."""
        ended = []
        for container in self._index.listed():
            async with container.lock:
                if container.running:
                    states.kept(container.record)
                    container.quiet = True
                    await self._index.save(container)
                elif container.record.phase not in (Phase.KEPT, Phase.GIVEN):
                    container.quiet = True
                    ended.append(container)
            await self._end_commands(container)
        self.held = False
        await self._freezer.thaw(self._processes.ids())
        for failure in await settled(self._remove(container) for container in ended):
            if isinstance(failure, Failure):
                _log.warn("a container of the pod that was kept stays: {error}", error=failure.value)

    async def _end_commands(self, container: OciContainer) -> None:
        """Kill commands that were executed for clients of the pod that was kept."""
        group = self._freezer.group(container.engine_id)
        if group is not None and not container.over:
            await run_in_thread(self._reactor, group.kill_commands)

    async def _remove(self, container: OciContainer) -> None:
        async with container.lock:
            if not container.removed:
                await self._lifecycle.remove(container)

    async def adopt(
        self,
        old_id: str,
        new_id: str,
        config: cri.ContainerConfig,
        sandbox_config: cri.PodSandboxConfig,
        hook: Hook | None,
    ) -> messages.ContainerState:
        """See `IHoldsContainers.adopt`."""
        given = self._index.get(new_id)
        if given is not None and given.record.engine_id == old_id and not given.quiet:
            return given.state()  # already
        container = self._index.get(old_id)
        if container is None or container.record.phase is not Phase.KEPT:
            raise NotFound(f"no container {old_id} was kept in this VM, or it has ended")
        if given is not None:
            raise FailedPrecondition(f"there is a container {new_id} already")
        async with container.lock:
            if container.removed or container.record.phase is not Phase.KEPT:
                raise NotFound(f"the container {old_id} that was kept has ended")
            check_same(container.record.config, config)
            hostname = sandbox_config.hostname
            await self._bundles.rename(container, config, hostname)
            await self._lifecycle.begin_log(container)
            await self._index.give(container, new_id, config, hook, time.time_ns())
            if config.linux.HasField("resources"):
                await change_limits(self._index, self._bundles, self._crun, container, config.linux.resources)
            return container.state()

    def kept(self) -> list[str]:
        """See `IHoldsContainers.kept`."""
        return [each.id for each in self._index.all() if each.record.phase in (Phase.KEPT, Phase.GIVEN)]

    def pids(self) -> dict[str, list[int]]:
        """See `IHoldsContainers.pids`. Blocks."""
        found = {}
        for container in self._index.listed():
            group = self._freezer.group(container.engine_id) if container.running else None
            if group is not None:
                found[container.id] = group.processes()
        return found


def check_same(kept: cri.ContainerConfig, config: cri.ContainerConfig) -> None:
    """Check that a running container can be the one that a configuration describes.

    :raise InvalidArgument: it can't; says in what they differ."""
    for field in ("command", "args", "working_dir", "stdin", "stdin_once", "tty", "devices", "CDI_devices"):
        if getattr(kept, field) != getattr(config, field):
            raise InvalidArgument(f"config.{field}: not that of the container that was kept")
    if _mounted(kept) != _mounted(config):
        raise InvalidArgument("config.mounts: not at the same places as those of the container that was kept")
    if _confinement(kept) != _confinement(config):
        raise InvalidArgument("config.linux.security_context: not that of the container that was kept")


def _mounted(config: cri.ContainerConfig) -> list[tuple[object, ...]]:
    return sorted(
        (
            mount.container_path,
            mount.readonly,
            mount.recursive_read_only,
            mount.propagation,
            mount.image.image,
            mount.image_sub_path,
        )
        for mount in config.mounts
    )


def _confinement(config: cri.ContainerConfig) -> cri.LinuxContainerSecurityContext:
    context = cri.LinuxContainerSecurityContext()
    context.CopyFrom(config.linux.security_context)
    context.namespace_options.target_id = ""  # of the other pod
    return context
