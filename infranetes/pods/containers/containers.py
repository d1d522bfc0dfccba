# SPDX-License-Identifier: Apache-2.0
"""The container calls of the CRI, without their messages."""

from __future__ import annotations

from functools import partial

import attrs
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.interfaces import IReactorTime

from infranetes.pods.containers.creation import ContainerCreation
from infranetes.pods.containers.lifelog import log_command
from infranetes.pods.containers.start import ContainerStart
from infranetes.pods.containers.stop import ContainerStop
from infranetes.pods.node.hooks import Features
from infranetes.pods.node.inventory import Container, Inventory
from infranetes.pods.node.logs import Logs
from infranetes.pods.node.pinning import repin
from infranetes.pods.node.times import until
from infranetes.pods.sandboxes.sandboxes import Sandboxes
from infranetes.pods.store.states import ALIVE, ContainerState
from infranetes.pods.vm.huge_pages import check_huge_pages
from infranetes.pods.vm.reports import ContainerReports
from infranetes.pods.vm.resize import Resizer
from infranetes_common import cpusets
from infranetes_common.concurrency import Flight, settled, shielded, start
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, NotFound
from infranetes_common.huge_pages import pages_of
from infranetes_common.wire import cri, vmserver

# The most bytes of each stream. CRI clients accept messages of 16 MiB, which hold both streams and framing.
MAX_EXEC_OUTPUT = 8 * 1024 * 1024 - 4096


@attrs.frozen(eq=False, repr=False)
class Containers:
    """Creates, starts, stops and removes containers, and runs commands in them.

    :param exec_limit: the most seconds that a command without streams may run."""

    _clock: IReactorTime
    _inventory: Inventory
    _logs: Logs
    _features: Features
    _exec_limit: float
    _sandboxes: Sandboxes
    _creation: ContainerCreation
    _start: ContainerStart
    _stop: ContainerStop
    _resizer: Resizer
    _reports: ContainerReports

    def lookup(self, id: str) -> Container:
        """Return the container with this id or prefix of one, if the CRI shows it, and record it as claimed.

        :raise NotFound: there is none. :raise InvalidArgument: there are several."""
        container = self._inventory.container(id)
        if not container.shown:
            raise NotFound(f"container {container.id} is not there yet: it is being created")
        if not container.record.claimed:
            claimed = attrs.evolve(container.record, claimed=True)
            saved = self._inventory.save_container(container, claimed)
            self._inventory.note(saved, f"container {container.id}")
        return container

    async def create(self, sandbox_id: str, config: cri.ContainerConfig, limit: float | None = None) -> str:
        """Create a container and return its id. Cancelling does not end the work: a repeated call joins it.

        :param limit: the seconds after which this raises; None: wait until the work ends.
        :raise DeadlineExceeded: the limit has passed. The work goes on; the message says how far it is.
        :raise AlreadyExists: another container has the name. :raise FailedPrecondition: there is no VM.
        :raise InfranetesError: the creation failed and was undone."""
        sandbox = self._sandboxes.lookup(sandbox_id)
        sandbox.asked_until = until(self._clock, limit)
        creating = start(self._creation.create(sandbox, config))
        try:
            container = await (creating if limit is None else creating.addTimeout(limit, self._clock))
        except DeferredTimeout:
            far = [progress.words() for progress in sandbox.loads.progress.values()]
            raise DeadlineExceeded(
                f"container {config.metadata.name} of sandbox {sandbox.id} is still being created"
                f"{''.join(f', {words}' for words in far)}; that goes on, so call again"
            ) from None
        return self.lookup(container.id).id

    async def start(self, id: str) -> None:
        """Run the container, once in its life. See `ContainerStart`."""
        container = self.lookup(id)
        await self._start.start(container)
        await self._logs.wait_until_open(container)

    async def stop(self, id: str, grace_seconds: int, limit: float | None = None) -> None:
        """Stop the container and wait for its end. Does nothing if it is unknown or was never started.

        :param limit: the seconds until the caller gives up; None: it does not say. For so long a log
            that advances is waited for."""
        try:
            container = self.lookup(id)
        except NotFound:
            return
        await self._stop.stop(container, grace_seconds, limit)

    async def remove(self, id: str) -> None:
        """Stop and forget the container. Does nothing if it is unknown."""
        try:
            container = self._inventory.container(id)
        except NotFound:
            return
        if container.creating is not None and not container.creating.done:
            container.creating.cancel()
            await settled([container.creating.join()])
            return
        await self.removal(container).join()

    def removal(self, container: Container) -> Flight[None]:
        """Return the container's removal, beginning it unless it is under way."""
        return self._stop.removal(container)

    async def update(self, id: str, resources: cri.LinuxContainerResources) -> None:
        """Put resource limits in force, and enlarge the VM for them if need be.

        :raise FailedPrecondition: the container has ended, or the VM can't grow that much."""
        container = self.lookup(id)
        if container.state not in ALIVE:
            raise FailedPrecondition(f"container {container.id} has ended: its resources can't be changed")
        await self._features.needed(container.sandbox)
        agent = container.sandbox.agent()
        await shielded(repin(self._inventory, container, resources))
        resources = cpusets.without(resources)
        if not resources.ByteSize():
            return
        if pages := pages_of(resources):
            await check_huge_pages(agent, pages)
            await self._resizer.make_room(container, resources)
        await shielded(self._resizer.fit(container, resources))
        self._reports.apply(container, await shielded(agent.update(container.id, resources)))

    async def exec_sync(
        self, id: str, command: list[str], seconds: int, limit: float | None
    ) -> vmserver.ExecSyncResponse:
        """Run a command to its end. Cancelling ends the command.

        :param seconds: how long the command may run; 0: until `limit`.
        :param limit: the seconds until the call's own deadline; None: it has none.
        :raise DeadlineExceeded: the command took longer and was killed.
        :raise FailedPrecondition: the container is not running."""
        container = self.lookup(id)
        if container.state is not ContainerState.RUNNING:
            raise FailedPrecondition(f"container {container.id} is not running")
        most = self._exec_limit if limit is None else min(limit, self._exec_limit)
        began = self._clock.seconds()
        try:
            result = await self._features.execute(
                container, command, partial(self._run_command, container, command, seconds, most)
            )
        except DeadlineExceeded:
            log_command(container, command, "was killed: it took too long", self._clock.seconds() - began)
            raise DeadlineExceeded(
                f"the command in container {container.id} took longer than {seconds or most:.0f} s and "
                "was killed"
            ) from None
        outcome = f"ended: exit code {result.exit_code}"
        log_command(container, command, outcome, self._clock.seconds() - began, routine=True)
        # The caller may next read on the node what the command wrote: other runtimes' containers share files.
        await self._features.caught_up(container)
        return _cut(result)

    async def _run_command(
        self, container: Container, command: list[str], seconds: int, most: float
    ) -> vmserver.ExecSyncResponse:
        agent = container.sandbox.agent()
        return await agent.exec_sync(container.id, command, seconds, most, MAX_EXEC_OUTPUT + 1)

    async def reopen_log(self, id: str) -> None:
        """Continue the log in a new file at its path.

        :raise FailedPrecondition: the container is not running."""
        container = self.lookup(id)
        if container.state is not ContainerState.RUNNING:
            raise FailedPrecondition(f"container {container.id} is not running: its log is not open")
        await self._logs.reopen(container)


def _cut(output: vmserver.ExecSyncResponse) -> vmserver.ExecSyncResponse:
    """Return a command's output, cut to what one answer can have. The end of stderr says what was cut.

    The exit code is the command's all the same: a probe goes by it."""
    stdout, stderr = output.stdout, output.stderr  # each look makes a copy, of up to 8 MiB
    streams = {"stdout": stdout, "stderr": stderr}
    cut = [name for name, data in streams.items() if len(data) > MAX_EXEC_OUTPUT]
    if not cut:
        return output
    note = (
        f"\ninfranetes: {' and '.join(cut)} cut after {MAX_EXEC_OUTPUT} bytes, all that ExecSync returns; "
        "a command with streams (crictl exec without -s, kubectl exec) has no limit\n"
    )
    return vmserver.ExecSyncResponse(
        stdout=stdout[:MAX_EXEC_OUTPUT],
        stderr=stderr[:MAX_EXEC_OUTPUT] + note.encode(),
        exit_code=output.exit_code,
    )
