# SPDX-License-Identifier: Apache-2.0
"""A soak test: pods run and end while their daemon is killed again and again. None is lost, nothing leaks.

Each pod is run, gets a container, and is stopped and removed (`kubelet_calls`); a call whose daemon dies is
repeated to the next daemon. Each daemon kills itself just before or after a write to its store; if there is
time, one is killed at each kind of write (`LABELS`). Some pods run all the time and are checked after the
last kill. Whenever no daemon runs, every VM, address and disk must have a record; at the end none may be
left. The sweep, which would hide leaks, is put off.
"""

from __future__ import annotations

import functools
import os
import random
import secrets
import shutil
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import attrs
from twisted.internet.defer import gatherResults
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.threads import deferToThread

from infranetes.config.schema import CONTROL_SOCKET
from infranetes.pods.store.store import FILE
from infranetes_common.concurrency import sleep, start
from infranetes_common.reactors import IReactor
from infranetes_common.wire import control, cri
from infranetes_common.wire.control_rpcs import ControlStub
from infranetes_common.wire.cri_rpcs import RuntimeStub
from tests.infranetes.daemon.case import ROOT, images, toml
from tests.support import warm
from tests.support.infrastructure import Factory, simulated
from tests.support.kubelet_calls import STEP_SECONDS, KubeletCalls, Runtime, containers, pods
from txgrpc import Channel, Code, GrpcError

T = TypeVar("T")
READY_SECONDS = 60.0
END_SECONDS = 20.0  # that a cloud has to end the last VMs
LASTING = 2  # pods that run from the first daemon to the last
LABELS = (
    *(f"sandboxes {each}" for each in ("launching", "ready", "stopping", "stopped", "deleted")),
    *(f"containers {each}" for each in ("creating", "created", "starting", "running", "exited", "removing")),
    "containers deleted",
    "logs",
)
"""The kinds of writes of a pod's life, as `crashing` labels them."""
POOL_LABELS = ("pool booting", "pool idle again", "pool claimed")
STOPPED_LABELS = ("pool preparing", "pool stopping again", "pool stopped again")
TRANSIENT = (Code.UNAVAILABLE, Code.CANCELLED, Code.DEADLINE_EXCEEDED)


@attrs.define
class Outcome:
    """The result of a soak test."""

    pods: int = 0  # how many were run and removed
    kills: int = 0
    killed_at: Counter[str] = attrs.field(factory=Counter)  # kills by the write at which they happened
    missed: list[str] = attrs.field(factory=list)  # labels of writes at which no daemon was killed
    lasted: int = 0  # lasting pods that were in order after the last kill
    leaked: list[str] = attrs.field(factory=list)  # resources without a record, and records that were left
    lost: list[str] = attrs.field(factory=list)  # pods, and what went wrong with them
    faults: Counter[str] = attrs.field(factory=Counter)  # see `Infrastructure`
    seconds: float = 0.0


class CrashSoak:
    """One soak test.

    :param pods: how many pods are run, `width` at a time.
    :param every: the highest number of writes between two kills.
    :param pool: how many VMs wait for pods. :param stopped: how many more wait stopped.
    :param seconds: the time after which no pod is begun and no daemon is killed.
    :param patience: seconds for which the test goes on after that while a label is `missed`.
    :param infrastructure: makes what the VMs run on.
    :cvar launcher: the module that is run as the daemon, with `crashing`'s arguments.
    :cvar lasting: how many pods run from the first daemon to the last.
    """

    launcher = "tests.infranetes.daemon.crashing"
    lasting = LASTING

    def __init__(
        self,
        reactor: IReactor,
        pods: int,
        width: int = 10,
        every: int = 25,
        pool: int = 0,
        seconds: float = 1e9,
        seed: int = 1,
        patience: float = 0.0,
        infrastructure: Factory = simulated,
        stopped: int = 0,
    ) -> None:
        self._reactor = reactor
        self._names = iter(range(pods))
        self._width = width
        self._every = every
        self._pool = pool
        self._seconds = seconds
        self._patience = patience
        self._lasting: dict[str, tuple[str, str]] = {}
        self._stopped = stopped
        self._labels = LABELS + (POOL_LABELS if pool else ()) + (STOPPED_LABELS if stopped else ())
        self._random = random.Random(seed)  # noqa: S311
        self.root = Path(tempfile.mkdtemp(prefix="inf-"))
        self._infrastructure = infrastructure(reactor, self.root)
        self.outcome = Outcome()
        self._process: warm.Process | None = None
        self._channel: Channel | None = None
        self._done = False
        self._begun = 0.0

    @property
    def log(self) -> str:
        """The end of the daemons' log."""
        return (self.root / "daemon.log").read_text(errors="replace")[-4000:]

    async def run(self) -> Outcome:
        """Run the whole test, and leave no process behind."""
        self._infrastructure.start()
        self._begun = time.monotonic()
        try:
            await self._prepare()
            supervisor = start(self._supervise())
            await self._begin_lasting()
            faults = start(self._infrastructure.inject_faults(lambda: self._done))
            self._begun = time.monotonic()
            workers = [start(self._run_pods()) for _ in range(self._width)]
            await gatherResults(workers, consumeErrors=True)
            self._done = True
            await gatherResults([supervisor, faults], consumeErrors=True)
            await self._check_nothing_left()
            self.outcome.faults = self._infrastructure.faults
        finally:
            self._done = True
            self._end_process()
            await self._disconnect()
            await self._infrastructure.stop()
            self.outcome.seconds = time.monotonic() - self._begun
        return self.outcome

    async def _prepare(self) -> None:
        """Make the images and the configuration that the first daemon starts with."""
        made = await images()
        self._kubelet = KubeletCalls(self._ask, made.reference, self.root / "logs")
        (self.root / "state").mkdir()
        shutil.copytree(made.path, self.root / "state" / "images")
        (self.root / "infranetes.toml").write_text(self._configuration())
        self._begun = time.monotonic()

    def clean(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _table(self) -> dict[str, object]:
        return {
            "socket": str(self._socket),
            "state_dir": str(self.root / "state"),
            "run_dir": str(self.root / "run"),
            "cluster": f"soak-{secrets.token_hex(4)}",
            "node": "soak",
            "provider": self._infrastructure.provider,
            "times": {"sweep": 86400.0, **self._infrastructure.times},
            "providers": {self._infrastructure.provider: self._infrastructure.table()},
            "pool": {"per_minute": 10_000, "parallel": 4},
        }

    def _configuration(self) -> str:
        text = toml(self._table())
        size = f"\n[[pool.sizes]]\ncount = {self._pool}\nstopped = {self._stopped}\n"
        return text + (size if self._pool or self._stopped else "")

    @property
    def _socket(self) -> Path:
        return self.root / "run" / "infranetes.sock"

    # ---- the daemons

    async def _supervise(self) -> None:
        """Start daemons that kill themselves, one after another, until the pods are done."""
        while not self._done:
            when = self._random.choice(("before", "after"))
            number = "0" if self._late() else str(self._random.randint(1, self._every))
            if number != "0" and self.outcome.missed and self._random.random() < 0.8:
                number = f"{4 * self._every},{self._random.choice(self.outcome.missed)}"
            await deferToThread(self._spawn, when, number)
            await self._ready()
            while not self._done and self._alive():
                await self._sleep(0.02)
            if self._done:
                await deferToThread(self._end_process)
            elif self._process is not None and self._process.returncode == -signal.SIGKILL:
                self.outcome.kills += 1
                self._count_kills()
                self.outcome.leaked += await self._unrecorded()
            elif not self._infrastructure.may_end_daemon(self.log):  # if so, start another, as systemd does
                self.outcome.lost.append(f"a daemon ended by itself:\n{self.log}")
                self._done = True

    def _count_kills(self) -> None:
        """Count kills in the journal that daemons write."""
        journal = self.root / "journal"
        self.outcome.killed_at.clear()
        for line in journal.read_text().splitlines() if journal.exists() else []:
            label, _, killed = line.partition(" ")[2].partition(": killed ")
            if killed:
                self.outcome.killed_at[f"{killed} {label}"] += 1
        hit = {moment.partition(" ")[2] for moment in self.outcome.killed_at}
        self.outcome.missed = [label for label in self._labels if label not in hit]

    def _spawn(self, when: str, number: str) -> None:
        arguments = ["-m", self.launcher, when, number, str(self.root / "journal")]
        arguments += [
            "--nodaemon",
            "--pidfile=",
            "infranetes",
            "--config",
            str(self.root / "infranetes.toml"),
        ]
        with open(self.root / "daemon.log", "ab") as log:
            self._process = warm.Process(arguments, log.fileno(), ROOT, os.environ)

    def _alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def _ready(self) -> None:
        await self._disconnect()
        channel = self._channel = Channel(
            self._reactor, UNIXClientEndpoint(self._reactor, str(self._socket), timeout=5)
        )
        runtime = RuntimeStub(channel)
        until = time.monotonic() + READY_SECONDS
        while self._alive() and time.monotonic() < until:
            try:
                status = await runtime.Status(cri.StatusRequest(), timeout=5.0)
                if all(each.status for each in status.status.conditions):
                    return
            except GrpcError:
                pass
            await self._sleep(0.02)

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    # ---- the pods

    def _late(self) -> bool:
        most = self._seconds + (self._patience if self.outcome.missed else 0.0)
        return time.monotonic() - self._begun > most

    async def _run_pods(self) -> None:
        """Run one pod after another while there is time, but at least one."""
        for count, number in enumerate(self._names):
            if self._done or (count and self._late()):
                return
            try:
                annotations = self._infrastructure.annotations
                await self._run_pod(number, annotations[number % len(annotations)])
                self.outcome.pods += 1
            except Exception as error:
                self.outcome.lost.append(f"pod-{number}: {type(error).__name__}: {error}")

    def _handler(self, number: int) -> str:
        """The runtime handler of the pod with that number."""
        return ""

    async def _run_pod(self, number: int, annotations: Mapping[str, str]) -> None:
        name = f"pod-{number}"
        sandbox, container = await self._kubelet.run(name, annotations, self._handler(number))
        if await self._infrastructure.end_vm(sandbox, number):
            await self._until_lost(name, sandbox, container)
        await self._end(name, sandbox, container)

    async def _end(self, name: str, sandbox: str, container: str) -> None:
        await self._kubelet.remove(name, sandbox, container)

    async def _begin_lasting(self) -> None:
        """Run the lasting pods."""
        for number in range(self.lasting):
            name, annotations = f"lasting-{number}", self._infrastructure.annotations[0]
            try:
                self._lasting[name] = await self._kubelet.run(name, annotations, self._handler(number))
            except Exception as error:
                self.outcome.lost.append(f"{name}: {type(error).__name__}: {error}")

    async def _check_lasting(self) -> None:
        """Check that the last daemon still has the lasting pods as they were, and can remove them."""
        for name, (sandbox, container) in self._lasting.items():
            try:
                sandboxes = await self._ask(functools.partial(pods, name=name))
                if sandboxes != {sandbox: cri.SANDBOX_READY}:
                    raise AssertionError(f"its sandboxes are {sandboxes}")
                until = time.monotonic() + READY_SECONDS
                wanted = {container: cri.CONTAINER_RUNNING}
                found: dict[str, int] = {}
                while found != wanted and time.monotonic() < until:
                    found = await self._ask(functools.partial(containers, sandbox=sandbox))
                    await self._sleep(0.05)
                if found != wanted:
                    raise AssertionError(f"its containers are {found}")
                await self._end(name, sandbox, container)
                self.outcome.lasted += 1
            except Exception as error:
                self.outcome.lost.append(f"{name}: {type(error).__name__}: {error}")

    async def _until_lost(self, name: str, sandbox: str, container: str) -> None:
        """Wait until a pod whose VM was ended is listed as not ready, and its container as exited."""
        until = time.monotonic() + 3 * STEP_SECONDS  # the cloud may not answer for a while
        over = ({sandbox: cri.SANDBOX_NOTREADY}, {container: cri.CONTAINER_EXITED})
        while True:
            sandboxes = await self._ask(functools.partial(pods, name=name))
            seen = (sandboxes, await self._ask(functools.partial(containers, sandbox=sandbox)))
            if seen == over:
                return
            if time.monotonic() > until:
                raise AssertionError(f"its VM was ended, and that is not shown: {seen}, not {over}")
            await self._sleep(0.1)

    async def _ask(self, step: Callable[[Runtime], Awaitable[T]]) -> T:
        """Return the step's result from the first daemon that lives long enough to answer."""
        until = time.monotonic() + 10 * STEP_SECONDS
        while True:
            channel = self._channel
            try:
                if channel is not None:
                    return await step(RuntimeStub(channel))
            except GrpcError as error:
                if (
                    error.code not in (*TRANSIENT, *self._infrastructure.transient)
                    or time.monotonic() > until
                    or self._done
                ):
                    raise
            await self._sleep(0.05)

    # ---- leaks

    def _rows(self, table: str) -> list[tuple[object, ...]]:
        with sqlite3.connect(self.root / "state" / FILE) as store:
            found = store.execute(f"SELECT * FROM {table}").fetchall()  # noqa: S608
        store.close()
        return found

    def _tokens(self) -> set[str]:
        with sqlite3.connect(self.root / "state" / FILE) as store:
            rows = store.execute("SELECT token FROM sandboxes UNION ALL SELECT token FROM pool").fetchall()
        store.close()
        tokens = [row[0] for row in rows]
        if len(tokens) != len(set(tokens)):
            self.outcome.leaked.append("a VM has two records")
        return set(tokens)

    async def _unrecorded(self) -> list[str]:
        """The VMs, addresses and disks without a record. Call it while no daemon runs."""
        if not (self.root / "state" / FILE).exists():
            return []
        recorded = await deferToThread(self._tokens)
        held = await self._infrastructure.resources()
        return [f"{name} has no record" for name, token in held.items() if token not in recorded]

    async def _held(self) -> list[str]:
        """Everything that is still held; once all pods are removed, these are leaks."""
        return list(await self._infrastructure.resources())

    async def _check_nothing_left(self) -> None:
        await deferToThread(self._spawn, "after", "0")
        await self._ready()
        await self._check_lasting()
        if self._pool or self._stopped:
            path = str(self.root / "run" / CONTROL_SOCKET)
            channel = Channel(self._reactor, UNIXClientEndpoint(self._reactor, path, timeout=5))
            await ControlStub(channel).DrainPool(control.DrainPoolRequest(), timeout=STEP_SECONDS)
            await channel.close()
        until = time.monotonic() + END_SECONDS
        while await self._held() and time.monotonic() < until:
            await self._sleep(0.2)
        await deferToThread(self._end_process)
        self.outcome.leaked += [f"{name} is left" for name in await self._held()]
        for table in ("sandboxes", "containers", "logs", "pool"):
            self.outcome.leaked += [f"{table}: {row[:4]} is left" for row in self._rows(table)]
        self._count_kills()

    async def _sleep(self, seconds: float) -> None:
        await sleep(self._reactor, seconds)
