"""What is known of the containers: as systemd says for as long as it knows a unit, else as its record says.

A unit that has run stays until it is written down here how it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.logger import Logger

from infranetes_common import cri
from infranetes_common import vmserver as messages
from infranetes_common.errors import FailedPrecondition, InfranetesError, NotFound
from vmserver.containers.journal import Journal
from vmserver.containers.systemd import logs, records, units
from vmserver.containers.systemd import state as states
from vmserver.containers.systemd.bus import SERVICE, BusError
from vmserver.containers.systemd.known import Known
from vmserver.containers.systemd.manager import Manager
from vmserver.containers.systemd.programs import CannotRun, Located
from vmserver.containers.systemd.records import Record
from vmserver.containers.users import process_user

_log = Logger()


class View:
    """The containers of one systemd.

    :param directory: where the records are; made when it is first needed.
    :param located: finds what a container is to run.
    :param outside: see `SystemdProvider`.
    """

    def __init__(
        self,
        reactor: Any,
        endpoint: IStreamClientEndpoint,
        directory: Path,
        journal: Journal,
        located: Callable[[Record], Located | CannotRun],
        outside: Callable[[int], int],
    ) -> None:
        self._reactor = reactor
        self._directory = directory
        self._journal = journal
        self._located = located
        self._outside = outside
        self._known: dict[str, Known] = {}
        self._watchers: list[tuple[Callable[[Any], None], Callable[[str], None]]] = []
        self._looks: set[Deferred[None]] = set()
        self.systemd = Manager(reactor, endpoint, self._signalled, self._look_at_all)

    def load(self) -> None:
        """Take up what an earlier agent wrote down.

        :raise FailedPrecondition: the directory can't be used."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for record in records.load(self._directory):
                self._known.setdefault(record.state.id, Known(record))
        except (OSError, ValueError) as error:
            raise FailedPrecondition(
                f"the state directory {self._directory} can't be used: {error}"
            ) from None

    def stop(self) -> None:
        """Follow systemd no longer."""
        for look in list(self._looks):
            look.cancel()
        self.systemd.stop()

    def watch(self, changed: Callable[[Any], None], removed: Callable[[str], None]) -> None:
        """See `IContainerProvider.watch`."""
        self._watchers.append((changed, removed))

    def get(self, id: str) -> Known | None:
        """A container, if there is one."""
        return self._known.get(id)

    def existing(self, id: str) -> Known:
        """A container. :raise NotFound: there is none."""
        known = self._known.get(id)
        if known is None:
            raise NotFound(f"there is no container {id} in this sandbox's VM")
        return known

    def running(self, id: str) -> Known:
        """A container that runs.

        :raise NotFound: there is none. :raise FailedPrecondition: it does not run."""
        known = self.existing(id)
        if known.record.state.state != cri.CONTAINER_RUNNING:
            raise FailedPrecondition(f"container {id} is not running")
        return known

    def all(self) -> list[Known]:
        """Every container."""
        return list(self._known.values())

    def add(self, record: Record) -> Known:
        """A container that was just made. :raise ResourceExhausted: the disk is full."""
        known = Known(record)
        records.save(self._directory, record)
        self._known[record.state.id] = known
        self.tell(known)
        return known

    def changed(self, known: Known) -> None:
        """Its record is another one: write it down, and tell. Raises as `add`."""
        records.save(self._directory, known.record)
        self.tell(known)

    def forget(self, known: Known) -> None:
        """Nothing of it is left but those who have to be told: see `removed`."""
        id = known.record.state.id
        records.forget(self._directory, id)
        self._known.pop(id, None)
        known.gone = True

    def removed(self, known: Known) -> None:
        """Tell that it is gone."""
        for _, removed in self._watchers:
            removed(known.record.state.id)
        known.tell()

    def tell(self, known: Known) -> None:
        """Tell what it is like now."""
        state = known.state()
        for changed, _ in self._watchers:
            changed(state)
        known.tell()

    # What systemd says

    async def _look_at_all(self) -> None:
        for known in self.all():
            await self.refresh(known)

    def _signalled(self, path: str, member: str, body: tuple[Any, ...]) -> None:
        if member != "PropertiesChanged" or not body or not str(body[0]).startswith(SERVICE):
            return
        known = self._known.get(units.container_of(path))
        if known is not None and not known.over:
            look = Deferred.fromCoroutine(self.refresh(known))
            self._looks.add(look)
            look.addErrback(self._look_failed).addBoth(lambda _: self._looks.discard(look))

    def _look_failed(self, failure: Any) -> None:
        if failure.check(InfranetesError, CancelledError, BusError) is None:
            _log.failure("looking at a unit failed", failure)

    async def refresh(self, known: Known) -> None:
        """Look at a container, and tell what has changed."""
        await known.lock.acquire()
        try:
            await self.look(known)
        finally:
            known.lock.release()

    async def look(self, known: Known) -> None:
        """`refresh`, by who has the lock."""
        if known.over:
            return
        state = known.state()
        unit = units.unit_name(state.id)
        found = await self.systemd.properties(unit)
        if found is None:
            if state.state == cri.CONTAINER_CREATED:
                return
            states.lost(state, time.time_ns())
        else:
            never_ran = ""
            if states.may_never_have_run(*found):
                never_ran = await logs.spawn_failure(
                    self._reactor, self._journal, unit, found[0]["InvocationID"]
                )
            states.apply(state, *found, never_ran)
            if never_ran and found[1]["ExecMainStatus"] == states.EXIT_EXEC:
                cannot = self._located(known.record).reason(never_ran)
                states.cannot_run(state, cannot.code, str(cannot), time.time_ns())
            self._identify(known, state)
        if state == known.record.state:
            return
        known.record.state = state
        self.changed(known)
        if known.over and found is not None:
            await self.systemd.clean(unit)

    def _identify(self, known: Known, state: messages.ContainerState) -> None:
        """Whom it runs as: as it was asked for, or else as it does."""
        if not state.pid or state.HasField("user"):
            return
        who = units.identity(known.record.config.linux.security_context)
        if who is not None:
            user = cri.LinuxContainerUser(uid=who.uid, gid=who.gid)
            user.supplemental_groups.extend(sorted({who.gid, *who.groups}))
            state.user.linux.CopyFrom(user)
            return
        pid = self._outside(state.pid)
        found = process_user(pid) if pid else None
        if found is not None:
            state.user.CopyFrom(found)
