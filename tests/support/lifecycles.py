"""Many pods' whole lives while their daemon is killed again and again, and what is left of them.

Each pod's life is what a kubelet asks: run, a container created, started, stopped and removed, the pod
stopped and removed; a step whose daemon dies is asked of the next one. The daemon ends itself around a
write to its store, another one each time. While it is down every VM, address and disk has to have a
record, and in the end nothing may be left; the sweep is put off for so long that it hides nothing.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread

from infranetes.control import SOCKET as CONTROL_SOCKET
from infranetes.pods.store import FILE
from infranetes_common import control, cri
from tests.infranetes.daemon.case import ROOT, images, toml
from tests.support.grounds import Make, simulated
from txgrpc import Channel, Code, GrpcError

READY_SECONDS = 60.0
STEP_SECONDS = 60.0
END_SECONDS = 20.0  # of what a cloud still has to end when the last pod is gone
PASSING = (Code.UNAVAILABLE, Code.CANCELLED, Code.DEADLINE_EXCEEDED)


@attrs.define
class Outcome:
    """What came of it."""

    pods: int = 0  # whose whole life was lived
    kills: int = 0
    killed_at: Counter[str] = attrs.field(factory=Counter)  # by the write at which it was
    leaked: list[str] = attrs.field(factory=list)  # what costs money without a record, records without an end
    lost: list[str] = attrs.field(factory=list)  # pods, and what went wrong with them
    seconds: float = 0.0


class Lifecycles:
    """One run.

    :param pods: lives, `width` at a time. :param every: writes between two kills, at the most.
    :param pool: VMs that wait for pods. :param seconds: no life begins after that, and no daemon is killed.
    :param ground: what they are lived on.
    """

    def __init__(
        self,
        reactor: Any,
        pods: int,
        width: int = 10,
        every: int = 25,
        pool: int = 0,
        seconds: float = 1e9,
        seed: int = 1,
        ground: Make = simulated,
    ) -> None:
        self._reactor = reactor
        self._names = iter(range(pods))
        self._width = width
        self._every = every
        self._pool = pool
        self._seconds = seconds
        self._random = random.Random(seed)  # noqa: S311
        self.root = Path(tempfile.mkdtemp(prefix="inf-"))
        self._ground = ground(reactor, self.root)
        self.outcome = Outcome()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._done = False
        self._begun = 0.0
        self._reference = ""

    @property
    def log(self) -> str:
        """The end of what the daemons wrote."""
        return (self.root / "daemon.log").read_text(errors="replace")[-4000:]

    async def run(self) -> Outcome:
        """Live all lives; nothing is left running."""
        self._ground.start()
        self._begun = time.monotonic()
        try:
            await self._prepare()
            supervisor = Deferred.fromCoroutine(self._supervise())
            workers = [Deferred.fromCoroutine(self._live()) for _ in range(self._width)]
            await gatherResults(workers, consumeErrors=True)
            self._done = True
            await supervisor
            await self._nothing_left()
        finally:
            self._done = True
            self._end_process()
            await self._disconnect()
            await self._ground.stop()
            self.outcome.seconds = time.monotonic() - self._begun
        return self.outcome

    async def _prepare(self) -> None:
        """What the first daemon starts with."""
        made = await images()
        self._reference = made.reference
        (self.root / "state").mkdir()
        shutil.copytree(made.path, self.root / "state" / "images")
        (self.root / "infranetes.toml").write_text(self._configuration())
        self._begun = time.monotonic()

    def clean(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _configuration(self) -> str:
        text = toml(
            {
                "socket": str(self._socket),
                "state_dir": str(self.root / "state"),
                "run_dir": str(self.root / "run"),
                "cluster": f"lives-{secrets.token_hex(4)}",
                "node": "lives",
                "provider": self._ground.provider,
                "times": {"sweep": 86400.0},
                "providers": {self._ground.provider: self._ground.table()},
                "pool": {"per_minute": 10_000, "parallel": 4},
            }
        )
        return text + (f"\n[[pool.sizes]]\ncount = {self._pool}\n" if self._pool else "")

    @property
    def _socket(self) -> Path:
        return self.root / "run" / "infranetes.sock"

    # ---- the daemons

    async def _supervise(self) -> None:
        """Start a daemon that will kill itself, and the next one when it has, until all lives are lived."""
        while not self._done:
            when = self._random.choice(("before", "after"))
            number = 0 if self._late() else self._random.randint(1, self._every)
            await deferToThread(self._spawn, when, number)
            await self._ready()
            while not self._done and self._alive():
                await self._sleep(0.02)
            if self._done:
                await deferToThread(self._end_process)
            elif self._process is not None and self._process.returncode == -signal.SIGKILL:
                self.outcome.kills += 1
                self.outcome.leaked += await self._strays()
            else:
                self.outcome.lost.append(f"a daemon ended by itself:\n{self.log}")
                self._done = True

    def _spawn(self, when: str, number: int) -> None:
        module = "tests.infranetes.daemon.crashing"
        command = [sys.executable, "-m", module, when, str(number), str(self.root / "journal")]
        command += ["--nodaemon", "--pidfile=", "infranetes", "--config", str(self.root / "infranetes.toml")]
        with open(self.root / "daemon.log", "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            )

    def _alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def _ready(self) -> None:
        await self._disconnect()
        channel = self._channel = Channel(
            self._reactor, UNIXClientEndpoint(self._reactor, str(self._socket), timeout=5)
        )
        runtime = channel.stub(cri.RuntimeService)
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
        return time.monotonic() - self._begun > self._seconds

    async def _live(self) -> None:
        for number in self._names:
            if self._done or self._late():
                return
            try:
                await self._life(f"pod-{number}", self._ground.wishes[number % len(self._ground.wishes)])
                self.outcome.pods += 1
            except Exception as error:
                self.outcome.lost.append(f"pod-{number}: {type(error).__name__}: {error}")

    async def _life(self, name: str, annotations: Mapping[str, str]) -> None:
        metadata = cri.PodSandboxMetadata(name=name, uid=name, namespace="lives")
        config = cri.PodSandboxConfig(
            metadata=metadata,
            hostname=name,
            labels={"name": name},
            annotations=annotations,
            log_directory=str(self.root / "logs"),
        )
        selector = cri.PodSandboxFilter(label_selector={"name": name})
        box = cri.ContainerConfig(
            metadata=cri.ContainerMetadata(name="main"), image=cri.ImageSpec(image=self._reference)
        )

        async def listed(runtime: Any) -> list[str]:
            request = cri.ListPodSandboxRequest(filter=selector)
            return [one.id for one in (await runtime.ListPodSandbox(request, timeout=STEP_SECONDS)).items]

        async def run(runtime: Any) -> str:
            found = await listed(runtime)
            if found:
                return found[0]
            request = cri.RunPodSandboxRequest(config=config)
            return str((await runtime.RunPodSandbox(request, timeout=STEP_SECONDS)).pod_sandbox_id)

        async def create(runtime: Any) -> str:
            request = cri.ListContainersRequest(filter=cri.ContainerFilter(pod_sandbox_id=sandbox))
            found = (await runtime.ListContainers(request, timeout=STEP_SECONDS)).containers
            if found:
                return str(found[0].id)
            make = cri.CreateContainerRequest(pod_sandbox_id=sandbox, config=box, sandbox_config=config)
            return str((await runtime.CreateContainer(make, timeout=STEP_SECONDS)).container_id)

        async def state(runtime: Any) -> int:
            request = cri.ContainerStatusRequest(container_id=container)
            return int((await runtime.ContainerStatus(request, timeout=STEP_SECONDS)).status.state)

        async def start(runtime: Any) -> None:
            if await state(runtime) == cri.CONTAINER_CREATED:
                request = cri.StartContainerRequest(container_id=container)
                await runtime.StartContainer(request, timeout=STEP_SECONDS)

        def asked(method: str, request: Any) -> Callable[[Any], Awaitable[Any]]:
            return lambda runtime: getattr(runtime, method)(request, timeout=STEP_SECONDS)

        sandbox = await self._surely(run)
        container = await self._surely(create)
        await self._surely(start)
        seen = await self._surely(state)
        if seen != cri.CONTAINER_RUNNING:
            raise AssertionError(f"its container is {cri.ContainerState.Name(seen)} and should run")
        await self._surely(
            asked("StopContainer", cri.StopContainerRequest(container_id=container, timeout=5))
        )
        await self._surely(asked("RemoveContainer", cri.RemoveContainerRequest(container_id=container)))
        await self._surely(asked("StopPodSandbox", cri.StopPodSandboxRequest(pod_sandbox_id=sandbox)))
        await self._surely(asked("RemovePodSandbox", cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox)))
        if await self._surely(listed):
            raise AssertionError("it is removed and still listed")

    async def _surely(self, step: Callable[[Any], Awaitable[Any]]) -> Any:
        """The step's result from whichever daemon lives to answer."""
        until = time.monotonic() + 10 * STEP_SECONDS
        while True:
            channel = self._channel
            try:
                if channel is not None:
                    return await step(channel.stub(cri.RuntimeService))
            except GrpcError as error:
                if error.code not in PASSING or time.monotonic() > until or self._done:
                    raise
            await self._sleep(0.05)

    # ---- what is left

    def _rows(self, table: str) -> list[Any]:
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

    async def _strays(self) -> list[str]:
        """VMs, addresses and disks without a record, while no daemon runs."""
        if not (self.root / "state" / FILE).exists():
            return []
        known = await deferToThread(self._tokens)
        held = await self._ground.held()
        return [f"{words} has no record" for words, token in held.items() if token not in known]

    async def _nothing_left(self) -> None:
        await deferToThread(self._spawn, "after", 0)
        await self._ready()
        if self._pool:
            path = str(self.root / "run" / CONTROL_SOCKET)
            channel = Channel(self._reactor, UNIXClientEndpoint(self._reactor, path, timeout=5))
            await channel.stub(control.Control).DrainPool(control.DrainPoolRequest(), timeout=STEP_SECONDS)
            await channel.close()
        until = time.monotonic() + END_SECONDS
        while await self._ground.held() and time.monotonic() < until:
            await self._sleep(0.2)
        await deferToThread(self._end_process)
        self.outcome.leaked += [f"{words} is left" for words in await self._ground.held()]
        for table in ("sandboxes", "containers", "logs", "pool"):
            self.outcome.leaked += [f"{table}: {row[:4]} is left" for row in self._rows(table)]
        for line in (self.root / "journal").read_text().splitlines():
            label, _, killed = line.partition(" ")[2].partition(": killed ")
            if killed:
                self.outcome.killed_at[f"{killed} {label}"] += 1

    async def _sleep(self, seconds: float) -> None:
        await deferLater(self._reactor, seconds, lambda: None)
