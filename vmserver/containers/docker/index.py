# SPDX-License-Identifier: Apache-2.0
"""The containers of a Docker engine, as last inspected and kept up to date by its events.

Inspections of one container run one after the other, so that none overtakes a later one. While the stream of
events is lost, `live` is False and the index is out of date.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from infranetes_common.concurrency import Event, KeyedLock, backoff, sleep, start
from infranetes_common.errors import InfranetesError, NotFound, Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from vmserver.containers.docker import api
from vmserver.containers.docker.engine import Engine, EngineError
from vmserver.containers.docker.kernel import KernelLog
from vmserver.containers.docker.limits import LimitStore
from vmserver.containers.docker.message_store import MessageStore
from vmserver.containers.docker.names import LABEL_ID, LABEL_SHARES, container_name
from vmserver.containers.docker.state import container_state
from vmserver.containers.docker.usage import usage_source
from vmserver.containers.interface import Changed, Removed
from vmserver.containers.resources import overlay
from vmserver.containers.users import process_user
from vmserver.stats.reader import UsageSource

EVENTS = ["create", "start", "die", "oom", "update", "destroy"]
RETRY_SECONDS = (0.1, 2.0)

_log = Logger()


@attrs.frozen
class Container:
    """A container as it was last inspected."""

    state: messages.ContainerState
    log_path: str
    usage_source: UsageSource
    shares_processes: bool  # those of its pod
    command: tuple[str, ...]
    environment: tuple[str, ...]  # NAME=VALUE, those of its image included
    inspected_at: int  # taken before the inspection, from the clock that stamps the engine's events

    @property
    def has_ended(self) -> bool:
        """True if the container has exited, or failed to start."""
        return self.state.state == cri.CONTAINER_EXITED


class ContainerIndex:
    """The containers that this agent has created.

    :param limits: limits that were changed after a container's creation; removed together with it.
    :param users: the directory for the users of first processes, which are needed after their end.
    :ivar live: whether the events are being received.
    """

    def __init__(self, reactor: IReactor, engine: Engine, limits: LimitStore, users: Path) -> None:
        self._reactor = reactor
        self._engine = engine
        self._limits = limits
        self._users = MessageStore(users, cri.ContainerUser)
        self._kernel = KernelLog(reactor)
        self._containers: dict[str, Container] = {}
        self._inspecting: KeyedLock[str] = KeyedLock()
        self._watchers: list[tuple[Changed, Removed]] = []
        self._following: Deferred[None] | None = None
        self.live = False

    async def start(self) -> None:
        """Inspect all containers and follow the engine's events from now on. Idempotent.

        :raise EngineError: the engine refuses. :raise Unavailable: it does not answer."""
        if self._following is not None:
            return
        self._limits.load()
        self._users.load()
        first: Event[None] = Event()
        self._following = start(self._follow(first))
        try:
            await first.wait()
        except BaseException:
            self._stop_following()
            raise

    def stop(self) -> None:
        """Stop following the events. Idempotent."""
        self.live = False
        self._stop_following()
        self._kernel.close()

    def _stop_following(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            following.cancel()

    def watch(self, changed: Changed, removed: Removed) -> None:
        """See `IContainerProvider.watch`."""
        self._watchers.append((changed, removed))

    def get(self, id: str) -> Container | None:
        """Return a container as it was last inspected; None if there was none."""
        return self._containers.get(id)

    def all(self) -> dict[str, Container]:
        """Return all containers as they were last inspected, by id."""
        return dict(self._containers)

    async def existing(self, id: str) -> Container:
        """Inspect a container. :raise NotFound: there is none."""
        container = await self.refresh(id)
        if container is None:
            raise NotFound(f"there is no container {id} in this sandbox's VM")
        return container

    async def resync(self) -> None:
        """Inspect every container that the engine or the index has."""
        ids = {summary["Labels"][LABEL_ID] for summary in await self._engine.list_containers(LABEL_ID)}
        known = self._containers.keys() | self._limits.ids() | self._users.ids()
        for id in [*known - ids, *sorted(ids)]:
            await self.refresh(id)

    async def refresh(self, id: str) -> Container | None:
        """Inspect a container and notify the watchers of a change; None if there is none."""
        async with self._inspecting.held(id):
            now = time.time_ns()
            try:
                found = await self._engine.inspect_container(container_name(id))
            except EngineError as error:
                if error.status != 404:
                    raise error.translated(f"inspecting container {id}") from error
                self._removed(id)
                return None
            return self._inspected(id, await self._kernel.corrected(found), now)

    def _inspected(self, id: str, found: api.ContainerInspect, at: int) -> Container:
        before = self._containers.get(id)
        state = container_state(found)
        if (changes := self._limits.get(id)) is not None:
            overlay(state.resources, changes)
        if state.pid and (before is None or before.state.pid != state.pid):
            self._store_user(id, process_user(state.pid))
        if state.started_at and (user := self._users.get(id)) is not None:
            state.user.CopyFrom(user)
        container = Container(
            state,
            found.get("LogPath") or "",
            usage_source(found),
            LABEL_SHARES in found["Config"]["Labels"],
            (found.get("Path") or "", *(found.get("Args") or ())),
            tuple(found["Config"].get("Env") or ()),
            at,
        )
        self._containers[id] = container
        if before is None or before.state != state:
            for changed, _ in self._watchers:
                changed(state)
        return container

    def _store_user(self, id: str, user: cri.ContainerUser | None) -> None:
        if user is not None and user != self._users.get(id):
            try:
                self._users.put(id, user)
            except OSError as error:
                self._users.remember(id, user)
                _log.warn(
                    "the user of container {container} can't be written: {error}", container=id, error=error
                )

    def _removed(self, id: str) -> None:
        self._limits.remove(id)
        self._users.remove(id)
        if self._containers.pop(id, None) is not None:
            for _, removed in self._watchers:
                removed(id)

    # The engine's events

    async def _follow(self, first: Event[None]) -> None:
        """Follow the events until cancelled. Only the first attempt's error ends it.

        :param first: gets the first attempt's outcome."""
        pauses = backoff(*RETRY_SECONDS)
        with contextlib.suppress(CancelledError):
            while True:
                try:
                    await self._follow_once(first)
                    error: Exception = Unavailable("Docker's engine ended the stream of events")
                except (InfranetesError, EngineError) as raised:
                    error = raised
                if not first.happened:
                    first.fail(error)
                    return
                if self.live:
                    self.live = False
                    pauses = backoff(*RETRY_SECONDS)
                    _log.error("lost Docker's events: {error}", error=error)
                await sleep(self._reactor, next(pauses))

    async def _follow_once(self, first: Event[None]) -> None:
        filters = {"type": ["container"], "label": [LABEL_ID], "event": EVENTS}
        stream = await self._engine.stream("GET", "/events", {"filters": filters})
        try:
            await self.resync()
            self.live = True
            first.succeed(None)
            async for line in stream.lines():
                event: api.Event = json.loads(line)
                id = event["Actor"]["Attributes"].get(LABEL_ID, "")
                container = self._containers.get(id)
                # After a call of this agent, the container has usually been inspected before its event
                # arrives.
                if id and (container is None or container.inspected_at <= event["timeNano"]):
                    await self.refresh(id)
        finally:
            stream.close()
