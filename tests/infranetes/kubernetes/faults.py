# SPDX-License-Identifier: Apache-2.0
"""Faults on the way from an API server to a kernel, one after the other, with a daemon in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Generic, TypeVar

from hypothesis import strategies as st
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.threads import blockingCallFromThread
from twisted.trial.unittest import TestCase

from infranetes.kubernetes import watch
from infranetes_common.concurrency import deferred, run_in_thread
from infranetes_common.reactors import installed
from tests.infranetes.kubernetes.api_server import SimulatedApiServer

reactor = installed()
T = TypeVar("T")
HEAL_SECONDS = 60.0  # within which all is as it should be once nothing fails any more

Step = tuple[object, ...]
COUNTS = st.integers(1, 3)
#: What may befall the API server and the daemon, beside what each test has of its own.
OF_SERVER = (
    st.tuples(st.just("status"), st.sampled_from((0, 401, 403, 410, 429, 500))),
    st.tuples(st.just("trickle"), st.sampled_from((0, 50))),
    st.tuples(
        st.sampled_from(("away", "back", "compact", "expire", "close", "abort", "daemon", "agent", "mend"))
    ),
    st.tuples(st.just("wait"), st.sampled_from((0.0, 0.01, 0.1))),
)


def thd_awaited(work: Callable[[], Deferred[T]]) -> T:
    """Return the result of work that is done in the reactor's thread."""
    found: T = blockingCallFromThread(reactor, work)  # type: ignore[arg-type]  # as if it returned no Deferred
    return found


class Bed:
    """A test bed: the API server, and what a test has of its own. Methods that block are called `thd_`.

    :ivar away: whether the API server is."""

    def __init__(self, directory: Path) -> None:
        self.kubeconfig = directory / "kubeconfig"
        self.server = SimulatedApiServer(reactor)
        self.server.start()
        self.port = int(self.server.url.rpartition(":")[2])
        self.server.kubeconfig(self.kubeconfig)
        self.away = False

    def thd_make_network(self) -> None:
        """Make the network in which the kernel's tables are."""
        raise NotImplementedError

    def thd_remove_network(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Start the daemon."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop the daemon as if it were killed."""
        raise NotImplementedError

    def restart_daemon(self) -> None:
        """Start the next daemon."""
        self.stop()
        self.start()

    def restart_agent(self) -> None:
        """Replace the agent by one without any state, on the same kernel."""
        raise NotImplementedError


B = TypeVar("B", bound=Bed)


class FaultCase(TestCase, Generic[B]):
    """A test of steps, each of which a thread has done.

    :cvar pausing: modules whose pauses are made short. :ivar bed: as `make_bed` made it."""

    timeout = 900
    pausing: ClassVar[Sequence[ModuleType]]
    bed: B

    @deferred
    async def setUp(self) -> None:
        for module in (watch, *self.pausing):
            self.patch(module, "FIRST_PAUSE", 0.01)
            self.patch(module, "LONGEST_PAUSE", 0.05)
        directory = Path(self.mktemp())
        directory.mkdir()
        self.bed = self.make_bed(directory)
        await run_in_thread(reactor, self.bed.thd_make_network)
        self.bed.start()
        self.addCleanup(self.end)

    def make_bed(self, directory: Path) -> B:
        """Return a bed whose daemon is not started."""
        raise NotImplementedError

    @deferred
    async def end(self) -> None:
        self.bed.stop()
        if not self.bed.away:
            await self.bed.server.stop()
        await run_in_thread(reactor, self.bed.thd_remove_network)

    async def mend(self) -> None:
        """Have the agent compare its tables with what it put there."""
        raise NotImplementedError

    def thd_do(self, step: Step) -> None:
        """Do a step, and wait until it is done."""
        match step:
            case ("wait", float(seconds)):
                time.sleep(seconds)
            case ("mend",):
                thd_awaited(lambda: Deferred.fromCoroutine(self.mend()))
            case ("away",) if not self.bed.away:
                self.bed.away = True
                thd_awaited(self.bed.server.stop)
            case _:
                thd_awaited(lambda: maybeDeferred(self.do, step))

    def do(self, step: Step) -> None:
        """Do a step that takes no time."""
        bed = self.bed
        simple: dict[object, Callable[[], None]] = {
            "compact": bed.server.compact,
            "expire": bed.server.expire,
            "close": bed.server.close_watches,
            "abort": lambda: bed.server.close_watches(abort=True),
            "daemon": bed.restart_daemon,
            "agent": bed.restart_agent,
        }
        match step:
            case ("status", int(status)):
                bed.server.status = status
            case ("trickle", int(size)):
                bed.server.trickle = size
            case ("back",) if bed.away:
                bed.away = False
                bed.server.start(bed.port)
            case (name,) if name in simple:
                simple[name]()

    def heal(self) -> None:
        """Let nothing fail any more."""
        self.do(("back",))
        self.bed.server.status = self.bed.server.trickle = 0

    def thd_heal(self) -> None:
        """Let nothing fail any more."""
        thd_awaited(lambda: maybeDeferred(self.heal))
