"""What is known of Docker's containers.

The view follows the engine's events; every entry comes from a whole inspection, one at a time for each
container, so that none overtakes a later one. A view that has lost the events is not answered from.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredLock
from twisted.internet.task import deferLater
from twisted.logger import Logger

from infranetes_common import cri
from infranetes_common.errors import InfranetesError, NotFound, Unavailable
from vmserver.containers.docker.engine import ByteStream, Engine, EngineError
from vmserver.containers.docker.kept import Kept
from vmserver.containers.docker.kernel import KernelLog
from vmserver.containers.docker.limits import Limits, overlay
from vmserver.containers.docker.security import NAME_PREFIX
from vmserver.containers.docker.state import container_state, process_user
from vmserver.containers.docker.translate import LABEL_ID
from vmserver.containers.docker.usage import Traces

EVENTS = ["create", "start", "die", "oom", "update", "destroy"]
RETRY_SECONDS = (0.1, 2.0)

_log = Logger()


@attrs.define
class Known:
    """One container in the view."""

    state: Any
    log_path: str
    traces: Traces
    seen_at: int  # when the engine was asked, by the clock that stamps its events

    @property
    def has_ended(self) -> bool:
        """Whether it ran and does no longer."""
        return bool(self.state.state == cri.CONTAINER_EXITED)


class View:
    """The engine's containers that are this agent's.

    :param limits: what was changed of a container after it was made; overlaid, and dropped with it.
    :param users: where the users of first processes are kept, also of those that have ended.
    """

    def __init__(self, reactor: Any, engine: Engine, limits: Limits, users: Path) -> None:
        self._reactor = reactor
        self._engine = engine
        self._limits = limits
        self._users = Kept(users, cri.ContainerUser)
        self._kernel = KernelLog(reactor)
        self._known: dict[str, Known] = {}
        self._locks: dict[str, DeferredLock] = {}  # one look at a container at a time
        self._watchers: list[tuple[Callable[[Any], None], Callable[[str], None]]] = []
        self._following: Deferred[None] | None = None
        self.live = False  # whether it follows the events

    async def start(self) -> None:
        """Follow the engine's events from now on. Twice: nothing to do.

        :raise EngineError: the engine can't be asked."""
        if self._following is not None:
            return
        self._limits.load()
        self._users.load()
        first: Deferred[None] = Deferred()
        self._following = Deferred.fromCoroutine(self._follow(first))
        try:
            await first
        except BaseException:
            following, self._following = self._following, None
            if following is not None:
                following.cancel()
            raise

    def stop(self) -> None:
        """Follow no longer."""
        self.live = False
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
        self._kernel.close()

    def watch(self, changed: Callable[[Any], None], removed: Callable[[str], None]) -> None:
        """See `IContainerProvider.watch`."""
        self._watchers.append((changed, removed))

    def get(self, id: str) -> Known | None:
        """What was last seen of a container."""
        return self._known.get(id)

    def all(self) -> dict[str, Known]:
        """What was last seen of each."""
        return dict(self._known)

    async def existing(self, id: str) -> Known:
        """A container as it is now. :raise NotFound: there is none."""
        known = await self.refresh(id)
        if known is None:
            raise NotFound(f"there is no container {id} in this sandbox's VM")
        return known

    async def resync(self) -> None:
        """Look at every container there is, and at every one that was known."""
        found = await self._engine.call(
            "GET", "/containers/json", {"all": "1", "filters": {"label": [LABEL_ID]}}
        )
        ids = {container["Labels"][LABEL_ID] for container in found}
        known = self._known.keys() | self._limits.ids() | self._users.ids()
        for id in [*known - ids, *sorted(ids)]:
            await self.refresh(id)

    async def refresh(self, id: str) -> Known | None:
        """Look at a container, tell what has changed, and answer with it; None: there is none."""
        lock = self._locks.setdefault(id, DeferredLock())
        await lock.acquire()
        try:
            asked = time.time_ns()
            try:
                found = await self._engine.call("GET", f"/containers/{NAME_PREFIX}{id}/json")
            except EngineError as error:
                if error.status != 404:
                    raise error.translated(f"looking at container {id}") from error
                self._gone(id)
                return None
            return self._seen(id, await self._kernel.corrected(found), asked)
        finally:
            lock.release()
            if id not in self._known and not lock.locked and not lock.waiting:
                self._locks.pop(id, None)

    def _seen(self, id: str, found: Any, asked: int) -> Known:
        before = self._known.get(id)
        state = container_state(found)
        if (changed := self._limits.of(id)) is not None:
            overlay(state.resources, changed)
        if state.pid and (before is None or before.state.pid != state.pid):
            self._keep_user(id, process_user(state.pid))
        if state.started_at and (user := self._users.of(id)) is not None:
            state.user.CopyFrom(user)
        known = self._known[id] = Known(state, found.get("LogPath") or "", Traces.of(found), asked)
        if before is None or before.state != state:
            for tell, _ in self._watchers:
                tell(state)
        return known

    def _keep_user(self, id: str, user: Any) -> None:
        if user is not None and user != self._users.of(id):
            try:
                self._users.put(id, user)
            except OSError as error:
                self._users.remember(id, user)
                _log.warn("the user of container {container} is not kept: {error}", container=id, error=error)

    def _gone(self, id: str) -> None:
        self._limits.drop(id)
        self._users.drop(id)
        if self._known.pop(id, None) is not None:
            for _, removed in self._watchers:
                removed(id)

    # The engine's events

    async def _follow(self, first: Deferred[None]) -> None:
        """Follow the events until this is cancelled; `first`: how that began."""
        pause, longest = RETRY_SECONDS
        with contextlib.suppress(CancelledError):
            while True:
                try:
                    await self._follow_once(first)
                    error: Exception = Unavailable("Docker's engine ended its events")
                except (InfranetesError, EngineError) as raised:
                    error = raised
                if not first.called:
                    first.errback(error)
                    return
                if self.live:
                    self.live = False
                    pause = RETRY_SECONDS[0]
                    _log.error("lost Docker's events: {error}", error=error)
                await deferLater(self._reactor, pause, lambda: None)
                pause = min(2 * pause, longest)

    async def _follow_once(self, first: Deferred[None]) -> None:
        filters = {"type": ["container"], "label": [LABEL_ID], "event": EVENTS}
        stream: ByteStream = await self._engine.stream("GET", "/events", {"filters": filters})
        try:
            await self.resync()
            self.live = True
            if not first.called:
                first.callback(None)
            async for line in stream.lines():
                event = json.loads(line)
                id = event["Actor"]["Attributes"].get(LABEL_ID, "")
                known = self._known.get(id)
                # What a call of ours has led to has mostly been looked at by then.
                if id and (known is None or known.seen_at <= event["timeNano"]):
                    await self.refresh(id)
        finally:
            stream.close()
