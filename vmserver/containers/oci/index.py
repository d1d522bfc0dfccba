# SPDX-License-Identifier: Apache-2.0
"""The containers of this VM, each a directory with a record."""

from __future__ import annotations

import errno
from pathlib import Path

import attrs
from twisted.internet.interfaces import IReactorThreads
from twisted.logger import Logger

from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError, NotFound, ResourceExhausted
from infranetes_common.wire import cri
from vmserver.containers.hooks import Hook
from vmserver.containers.interface import Changed, Removed
from vmserver.containers.oci import record as records
from vmserver.containers.oci import state as states
from vmserver.containers.oci.container import OciContainer
from vmserver.containers.oci.record import OciRecord
from vmserver.validate import CONTAINER_ID

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_log = Logger()


class ContainerIndex:
    """The containers, in the order of their creation by this agent.

    :param directory: has a directory for each container; created when it is first needed.
    """

    def __init__(self, reactor: IReactorThreads, directory: Path) -> None:
        self._reactor = reactor
        self._directory = directory
        self._containers: dict[str, OciContainer] = {}
        self._watchers: list[tuple[Changed, Removed]] = []

    async def load(self) -> list[Path]:
        """Read the records of earlier agents; return the directories that have none.

        :raise FailedPrecondition: the directory can't be used."""
        try:
            found, without = await run_in_thread(self._reactor, _thd_load, self._directory)
        except (OSError, ValueError) as error:
            raise FailedPrecondition(
                f"the state directory {self._directory} can't be used: {error}"
            ) from None
        for directory, record in found:
            self._containers.setdefault(record.state.id, OciContainer(record, directory))
        return without

    def watch(self, changed: Changed, removed: Removed) -> None:
        """See `IContainerProvider.watch`."""
        self._watchers.append((changed, removed))

    def get(self, id: str) -> OciContainer | None:
        """Return a container; None if there is none."""
        return self._containers.get(id)

    def existing(self, id: str) -> OciContainer:
        """Return a container. :raise NotFound: there is none."""
        container = self._containers.get(id)
        if container is None or container.quiet:
            raise NotFound(f"there is no container {id} in this sandbox's VM")
        return container

    def running(self, id: str) -> OciContainer:
        """Return a running container.

        :raise NotFound: there is none. :raise FailedPrecondition: it does not run."""
        container = self.existing(id)
        if not container.running:
            raise FailedPrecondition(f"container {id} is not running")
        return container

    def all(self) -> list[OciContainer]:
        """Return every container."""
        return list(self._containers.values())

    def listed(self) -> list[OciContainer]:
        """Return the containers of the pod that the VM is."""
        return [each for each in self._containers.values() if not each.quiet]

    def new(self, record: OciRecord) -> OciContainer:
        """Return a new container, without a directory yet and not yet listed: see `add`."""
        return OciContainer(record, self._directory / record.engine_id)

    async def add(self, container: OciContainer) -> None:
        """Write the record of a new container, list it, and notify the watchers.

        :raise ResourceExhausted: the disk is full."""
        await self.save(container)
        self._containers[container.id] = container
        self.notify(container)

    async def give(
        self, container: OciContainer, id: str, config: cri.ContainerConfig, hook: Hook | None, now: int
    ) -> None:
        """Write down that a kept container is another pod's from now on, list it, and notify the watchers.

        :param id: its new one. :raise ResourceExhausted: the disk is full; nothing has changed."""
        before, old_id = attrs.evolve(container.record, state=container.state()), container.id
        states.given(container.record, id, config, hook, now)
        try:
            await self.save(container)
        except BaseException:
            container.record = before
            raise
        self._containers.pop(old_id, None)
        self._containers[id] = container
        container.quiet = False
        self.notify(container)

    async def save(self, container: OciContainer) -> None:
        """Write a container's record.

        :raise ResourceExhausted: the disk is full."""
        try:
            await run_in_thread(
                self._reactor, records.save, container.directory, records.serialized(container.record)
            )
        except OSError as error:
            raise unwritable(container.directory, error) from error

    async def note(self, container: OciContainer) -> bool:
        """Record an event that has happened already; return whether that has worked.

        If it has not, the next agent derives the same from the container's processes and files."""
        try:
            await self.save(container)
        except InfranetesError as error:
            _log.warn("the record of container {id} is out of date: {error}", id=container.id, error=error)
            return False
        return True

    def notify(self, container: OciContainer) -> None:
        """Notify the watchers of a container's state."""
        if not container.quiet:
            state = container.state()
            for changed, _ in self._watchers:
                changed(state)
        container.notify()

    def remove(self, container: OciContainer) -> None:
        """Remove a container from the list after its files are deleted, and notify the watchers."""
        container.removed = True
        if self._containers.pop(container.id, None) is not None and not container.quiet:
            for _, removed in self._watchers:
                removed(container.id)
        container.notify()


def unwritable(path: Path, error: OSError) -> ResourceExhausted | FailedPrecondition:
    """Return the error for a file or directory that can't be written."""
    kind = ResourceExhausted if error.errno in _NO_SPACE else FailedPrecondition
    return kind(f"{path} can't be written: {error.strerror}")


def _thd_load(directory: Path) -> tuple[list[tuple[Path, OciRecord]], list[Path]]:
    """Return the directories with a record, by age, and those without one."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o711)  # lets the users of a user namespace reach their container's root directory
    found, without = [], []
    for entry in sorted(directory.iterdir()):
        if not CONTAINER_ID.fullmatch(entry.name):
            continue
        record = records.load(entry)
        if record is None:
            without.append(entry)
        elif record.engine_id != entry.name:
            raise ValueError(f"{entry / records.FILE} is of another container, {record.engine_id}")
        else:
            found.append((entry, record))
    return sorted(found, key=lambda each: each[1].state.created_at), without
