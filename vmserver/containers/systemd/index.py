# SPDX-License-Identifier: Apache-2.0
"""The containers of one systemd, kept up to date by its signals.

As long as systemd has a container's unit, the unit's properties decide; otherwise the container's record
does. A unit that has ended is discarded only after its end was recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InfranetesError, NotFound
from infranetes_common.systemd_bus import SERVICE, Body, BusError
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from vmserver.containers import records
from vmserver.containers.interface import Changed, Removed
from vmserver.containers.journal import Journal
from vmserver.containers.records import Record
from vmserver.containers.systemd import logs, units
from vmserver.containers.systemd import state as states
from vmserver.containers.systemd.container import UnitContainer
from vmserver.containers.systemd.manager import Manager
from vmserver.containers.systemd.privileges import identity
from vmserver.containers.systemd.programs import CannotRun, Located
from vmserver.containers.users import process_user

_log = Logger()


class UnitIndex:
    """The containers of one systemd.

    :param directory: of the records; created when it is first needed.
    :param locate: finds the program of a container.
    :param own_pid: see `SystemdProvider`.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        endpoint: IStreamClientEndpoint,
        directory: Path,
        journal: Journal,
        locate: Callable[[Record], Located | CannotRun],
        own_pid: Callable[[int], int],
    ) -> None:
        self._reactor = reactor
        self._directory = directory
        self._journal = journal
        self._locate = locate
        self._own_pid = own_pid
        self._containers: dict[str, UnitContainer] = {}
        self._watchers: list[tuple[Changed, Removed]] = []
        self._refreshing: set[Deferred[None]] = set()
        self.systemd = Manager(reactor, endpoint, self._signalled, self._refresh_all)

    def load(self) -> None:
        """Read the records of earlier agents.

        :raise FailedPrecondition: the directory can't be used."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for record in records.load(self._directory):
                self._containers.setdefault(record.state.id, UnitContainer(record))
        except (OSError, ValueError) as error:
            raise FailedPrecondition(
                f"the state directory {self._directory} can't be used: {error}"
            ) from None

    def stop(self) -> None:
        """Disconnect from systemd. Idempotent."""
        for refreshing in list(self._refreshing):
            refreshing.cancel()
        self.systemd.stop()

    def watch(self, changed: Changed, removed: Removed) -> None:
        """See `IContainerProvider.watch`."""
        self._watchers.append((changed, removed))

    def get(self, id: str) -> UnitContainer | None:
        """Return a container; None if there is none."""
        return self._containers.get(id)

    def existing(self, id: str) -> UnitContainer:
        """Return a container. :raise NotFound: there is none."""
        container = self._containers.get(id)
        if container is None:
            raise NotFound(f"there is no container {id} in this sandbox's VM")
        return container

    def running(self, id: str) -> UnitContainer:
        """Return a running container.

        :raise NotFound: there is none. :raise FailedPrecondition: it does not run."""
        container = self.existing(id)
        if container.record.state.state != cri.CONTAINER_RUNNING:
            raise FailedPrecondition(f"container {id} is not running")
        return container

    def all(self) -> list[UnitContainer]:
        """Return every container."""
        return list(self._containers.values())

    def add(self, record: Record) -> UnitContainer:
        """Add a new container, write its record and notify the watchers.

        :raise ResourceExhausted: the disk is full."""
        container = UnitContainer(record)
        records.save(self._directory, record)
        self._containers[record.state.id] = container
        self._notify(container)
        return container

    def changed(self, container: UnitContainer) -> None:
        """Write a container's changed record and notify the watchers.

        :raise ResourceExhausted: the disk is full."""
        records.save(self._directory, container.record)
        self._notify(container)

    def remove(self, container: UnitContainer) -> None:
        """Delete a container's record, without notifying anyone: see `notify_removed`."""
        id = container.record.state.id
        records.remove(self._directory, id)
        self._containers.pop(id, None)
        container.removed = True

    def notify_removed(self, container: UnitContainer) -> None:
        """Notify the watchers that a container was removed."""
        for _, removed in self._watchers:
            removed(container.record.state.id)
        container.notify()

    def _notify(self, container: UnitContainer) -> None:
        state = container.state()
        for changed, _ in self._watchers:
            changed(state)
        container.notify()

    # Updates from systemd

    async def _refresh_all(self) -> None:
        for container in self.all():
            await self.refresh(container)

    def _signalled(self, path: str, member: str, body: Body) -> None:
        if member != "PropertiesChanged" or not body or not str(body[0]).startswith(SERVICE):
            return
        container = self._containers.get(units.container_of(path))
        if container is not None and not container.over:
            refreshing = start(self.refresh(container))
            self._refreshing.add(refreshing)
            refreshing.addErrback(_refresh_failed).addBoth(lambda _: self._refreshing.discard(refreshing))

    async def refresh(self, container: UnitContainer) -> None:
        """Update a container from its unit, and notify the watchers of a change."""
        async with container.lock:
            await self.refresh_locked(container)

    async def refresh_locked(self, container: UnitContainer) -> None:
        """Do the same for a caller that holds the container's lock."""
        if container.over:
            return
        state = container.state()
        unit = units.unit_name(state.id)
        found = await self.systemd.properties(unit)
        if found is None:
            if state.state == cri.CONTAINER_CREATED:
                return
            states.lost(state, time.time_ns())
        else:
            await self._apply(container, state, *found)
        if state == container.record.state:
            return
        container.record.state = state
        self.changed(container)
        if container.over and found is not None:
            await self.systemd.discard(unit)

    async def _apply(
        self,
        container: UnitContainer,
        state: messages.ContainerState,
        unit: states.Unit,
        service: states.Service,
    ) -> None:
        never_ran = ""
        if states.may_never_have_run(unit, service):
            name = units.unit_name(state.id)
            never_ran = await logs.spawn_failure(self._reactor, self._journal, name, unit.invocation_id)
        states.apply(state, unit, service, never_ran)
        if never_ran and service.main_status == states.EXIT_EXEC:
            error = self._locate(container.record).failed(never_ran)
            states.cannot_run(state, error.code, error.message, time.time_ns())
        self._set_user(container, state)

    def _set_user(self, container: UnitContainer, state: messages.ContainerState) -> None:
        """Set the state's user: the configured one, or else that of the process."""
        if not state.pid or state.HasField("user"):
            return
        who = identity(container.record.config.linux.security_context)
        if who is not None:
            user = cri.LinuxContainerUser(uid=who.uid, gid=who.gid)
            user.supplemental_groups.extend(sorted({who.gid, *who.groups}))
            state.user.linux.CopyFrom(user)
            return
        pid = self._own_pid(state.pid)
        found = process_user(pid) if pid else None
        if found is not None:
            state.user.CopyFrom(found)


def _refresh_failed(failure: Failure) -> None:
    if failure.check(InfranetesError, CancelledError, BusError) is None:
        _log.failure("querying a unit failed", failure)
