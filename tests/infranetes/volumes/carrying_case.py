# SPDX-License-Identifier: Apache-2.0
"""Volumes that are carried between a directory of the node and one that stands for the VM's, on a clock.

Trees, plans, changes and records are the real ones. What would be done in threads is done at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs
from twisted.internet.defer import Deferred, DeferredQueue, execute
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.volumes import own, sync, volumes
from infranetes_common.errors import InfranetesError, NotFound
from infranetes_common.filesync.apply import Applier
from infranetes_common.filesync.manifest import Bounds, Change, Entry, Manifest
from infranetes_common.filesync.scan import read, scan
from infranetes_common.filesync.tree import Tree
from tests.support.threads import in_this_thread

T = TypeVar("T")
BOUNDS = Bounds(1000, 1_000_000)


class Lanes:
    """Do all calls at once, in this thread."""

    def __init__(self, *_: object) -> None:
        self.closed = False

    def run(self, lane: str, seconds: float, work: Callable[..., T], *args: Any) -> Deferred[T]:
        return execute(work, *args)

    def later(self, lane: str, work: Callable[[], None]) -> None:
        work()

    def close(self) -> None:
        self.closed = True


class Agent:
    """An agent whose VM's volumes are directories.

    :ivar calls: the calls so far. :ivar made: what each volume was made with.
    :ivar failing: the errors of calls, by their names. :ivar held: calls of these names wait for their
        Deferred. :ivar watched: the volumes of the call that watches now; None: there is none.
    :ivar watching: how many there are.
    :ivar reports: what has changed in the VM. :ivar reading: whether there is a call that reads.
    :ivar lie: what is sent in place of a change."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self.calls: list[str] = []
        self.made: dict[str, tuple[bool, bool, int, int]] = {}
        self.failing: dict[str, InfranetesError] = {}
        self.held: dict[str, Deferred[None]] = {}
        self.watched: tuple[str, ...] | None = None
        self.watching = 0
        self.reading = False
        self.lie: Callable[[Change], Change] = lambda change: change
        self.reports: DeferredQueue[str | InfranetesError] = DeferredQueue()

    def path(self, id: str) -> Path:
        return self._top / id

    def _tree(self, id: str) -> Tree:
        return Tree(self.path(id), file=self.made[id][0], setid=True)

    async def _begin(self, call: str) -> None:
        self.calls.append(call)
        if call in self.held:
            await self.held[call]
        if call in self.failing:
            raise self.failing[call]

    async def list_volume(self, id: str, bounds: Bounds) -> Manifest:
        await self._begin("list")
        if not self.path(id).exists():
            raise NotFound(id)
        return scan(self._tree(id), bounds)

    async def put_volume(
        self,
        id: str,
        *,
        file: bool,
        in_memory: bool,
        size_limit: int,
        huge_page_size: int,
        bounds: Bounds,
        changes: AsyncIterator[Change],
    ) -> None:
        await self._begin("put")
        self.made[id] = (file, in_memory, size_limit, huge_page_size)
        if file:
            self.path(id).touch()
        else:
            self.path(id).mkdir(exist_ok=True)
        applier = Applier(self._tree(id), bounds)
        async for change in changes:
            applier.feed([change])
        applier.finish()
        applier.check_whole()

    async def read_volume(self, id: str, entries: Iterable[Entry]) -> AsyncGenerator[Change, None]:
        await self._begin("read")
        self.reading = True
        try:
            for change in read(self._tree(id), entries):
                yield self.lie(change)
        finally:
            self.reading = False

    async def remove_volume(self, id: str) -> None:
        await self._begin("remove")
        shutil.rmtree(self.path(id), ignore_errors=True)

    async def watch_volumes(self, ids: Sequence[str], bounds: Bounds) -> AsyncGenerator[str, None]:
        await self._begin("watch")
        self.watched = tuple(ids)
        self.watching += 1
        try:
            while True:
                told = await self.reports.get()
                if isinstance(told, InfranetesError):
                    raise told
                yield told
        finally:
            self.watching -= 1
            self.watched = None if not self.watching else self.watched


@attrs.define(eq=False)
class Heard:
    """Whether the sandbox's agent is heard of."""

    live: bool = True


class OneSandbox:
    """A sandbox that runs."""

    def __init__(self, id: str, agent: Agent) -> None:
        self.id = id
        self.client: Agent | None = agent
        self.watch: Heard | None = Heard()
        self.containers: dict[str, object] = {}
        self.config: Any = None


@attrs.frozen
class OneContainer:
    id: str
    sandbox: Sandbox
    adopts: bool = False


class CarryingCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.top = Path(os.path.realpath(self.mktemp()))
        self.node, self.vm = self.top / "node", self.top / "vm"
        for path in (self.node, self.vm):
            path.mkdir(parents=True)
        self.agent = Agent(self.vm)
        self.fake = OneSandbox("s1", self.agent)
        self.sandbox = cast(Sandbox, self.fake)
        for module in (sync, volumes, own):
            self.patch(module, "run_in_thread", in_this_thread)

    def container(self, id: str) -> Container:
        made = OneContainer(id, self.sandbox)
        self.fake.containers[id] = made
        return cast(Container, made)
