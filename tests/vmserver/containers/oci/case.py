# SPDX-License-Identifier: Apache-2.0
"""Containers of conmon and crun, made without a provider."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import TestCase

from infranetes_common.concurrency import within
from infranetes_common.reactors import installed
from tests.harness.needs import needs_crun
from tests.support.crun import (
    CGROUPS,
    configuration,
    crun_for_here,
    make_rootfs,
    remove_cgroups,
    write_bundle,
)
from tests.support.waiting import until
from vmserver.containers.oci.conmon import Conmon, Exit, Monitored, Process, Watch
from vmserver.containers.oci.runtime import Crun

reactor = installed()

CONMONS = f"{CGROUPS}/conmon"


class Made:
    """A container that a test has made."""

    def __init__(self, container: Monitored, process: Process) -> None:
        self.container = container
        self.process = process
        self.exits: list[Exit] = []
        self.ended: Deferred[Exit] = Deferred()
        self.watch: Watch | None = None
        self._waiting: list[Deferred[int]] = []

    def over(self, exit: Exit) -> None:
        self.exits.append(exit)
        self.ended.callback(exit)
        for waiting in self._waiting:
            waiting.callback(exit.code)

    def exit_code(self) -> Deferred[int]:
        """Return a Deferred that fires with its exit code once it has ended."""
        if self.exits:
            return succeed(self.exits[0].code)
        self._waiting.append(Deferred())
        return self._waiting[-1]


@needs_crun
class CrunCase(TestCase):
    """A root file system, crun and conmon; what a test makes is discarded."""

    seconds = 60.0

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="infranetes-oci-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.addCleanup(remove_cgroups)
        self.rootfs = self.directory / "rootfs"
        make_rootfs(self.rootfs)
        self.program = crun_for_here(self.directory)
        self.crun = Crun(reactor, self.directory / "run", self.program)
        self.conmon = Conmon(reactor, self.crun, group=CONMONS)

    def monitored(self, *args: str, stdin: bool = False, stdin_once: bool = False, **more: Any) -> Monitored:
        """Return a container that has not been created yet."""
        id = secrets.token_hex(16)
        bundle = self.directory / id
        write_bundle(bundle, configuration(id, self.rootfs, args, **more))
        terminal = bool(more.get("terminal"))
        made = Monitored(id, bundle, bundle / "log", terminal, stdin, stdin_once)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.conmon.discard(made)))
        return made

    async def created(self, *args: str, **more: Any) -> Made:
        """Create a container, and watch it. It waits to be started."""
        container = self.monitored(*args, **more)
        made = Made(container, await self.conmon.create(container))
        made.watch = self.conmon.watch(container, made.process, made.over)
        self.addCleanup(made.watch.close)
        return made

    async def started(self, *args: str, **more: Any) -> Made:
        """Create and start a container."""
        made = await self.created(*args, **more)
        await self.crun.start(made.container.id)
        return made

    async def end(self, made: Made) -> Exit:
        """Wait for the container to end. Return how it ended."""
        return await within(reactor, self.seconds, made.ended, "the container")

    def lines(self, made: Made) -> list[str]:
        """Return the lines of its log, without times."""
        return [line.split(" ", 1)[1] for line in made.container.log.read_text().splitlines()]

    async def until(self, condition: Any, what: str) -> None:
        """Wait until `condition()` is true."""
        await until(condition, what, self.seconds)
