# SPDX-License-Identifier: Apache-2.0
"""A soak test of a node with both kinds of pods: the daemon and its containerd are killed again and again.

containerd's pods, simulated VMs, and simulated VMs whose networks are containerd's shadow sandboxes take
turns. The daemon kills itself around its writes, as in `crash_soak`; containerd is killed at any moment. As
with kubelet, a call is repeated whatever its error. Once a call has seen containerd killed a few times, the
next kill waits for it, or a slow machine would never get anything done. `run` runs the test in namespaces of
its own, which end with it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import attrs
from twisted.internet import task
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.threads import deferToThread

from infranetes_common.concurrency import replace_file, start
from infranetes_common.reactors import IReactor, installed
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import RuntimeStub
from tests.infranetes.daemon.case import ROOT
from tests.interop.critest import reap
from tests.interop.critest_images import PAUSE, REGISTRIES
from tests.interop.killable import Killable
from tests.support import oci
from tests.support.crash_soak import READY_SECONDS, CrashSoak
from tests.support.infrastructure import Factory, SimulatedFarm
from tests.support.kubelet_calls import Runtime
from tests.support.mixed_calls import MixedCalls
from tests.support.registry import Registry
from txgrpc import Channel, Code, GrpcError

T = TypeVar("T")
#: Everything that a run makes (mounts, links, shims, listeners) ends with these.
NAMESPACES = (
    *("setpriv", "--pdeathsig", "KILL", "--", "unshare", "--mount", "--ipc", "--net", "--pid"),
    *("--fork", "--kill-child", "--mount-proc"),
)
IMAGE = f"{REGISTRIES[0]}/busybox:1"
VM, JOINED = "infranetes", "joined"
#: The runtime handlers of pods, in turn.
HANDLERS = ("", VM, JOINED)
REST = (0.0, 4.0)  # the shortest and the longest time for which containerd serves, in seconds
BROKEN_OFF = 4  # how often one call may see containerd killed
NETNS = Path("/run/netns")
TOLD_SECONDS = 10.0  # between two reports of the progress
PROGRESS = "progress"


class Left(TypedDict):
    """What is left of containerd's own when all pods are gone, though it lists nothing."""

    namespaces: list[str]
    addresses: list[str]
    shims: list[str]


class Found(TypedDict):
    """The outcome of a soak test, as JSON: `crash_soak.Outcome` without its faults, and some more fields.

    `lasting`: how many pods were to run all the time. `again`: how often a half-made pod was made anew."""

    pods: int
    kills: int
    killed_at: dict[str, int]
    missed: list[str]
    lasted: int
    leaked: list[str]
    lost: list[str]
    seconds: float
    lasting: int
    containerd_kills: int
    again: int
    of_containerd_itself: Left
    log: str


class Node(Killable):
    """A containerd with the CNI reference plug-ins, which keep a file for each address that they assign."""

    def network(self) -> dict[str, Any]:
        network = super().network()
        (bridge, _) = network["plugins"]
        return {**network, "plugins": [{**bridge, "ipMasq": False}]}

    def addresses(self) -> list[str]:
        """The addresses that are assigned."""
        return [path.name for path in self.root.glob("addresses/*/*") if path.name[0].isdigit()]

    def namespaces(self) -> list[str]:
        """The network namespaces of sandboxes."""
        return sorted(path.name for path in NETNS.glob("*")) if NETNS.exists() else []

    def shims(self) -> list[str]:
        """The process ids of containerd's shims, one for each sandbox."""
        found = subprocess.run(["pgrep", "-f", "containerd-shim"], capture_output=True, text=True)
        return found.stdout.split()


class MixedFarm(SimulatedFarm):
    """The simulated farm, with calls that are repeated after any error, as kubelet's are."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.transient = tuple(Code)

    def table(self) -> dict[str, object]:
        return {**super().table(), "images": "layers"}


class MixedSoak(CrashSoak):
    """One soak test. See `CrashSoak`.

    :param cgroup: the parent of the control groups of containerd's pods.
    :param told: the file to which the progress is written."""

    launcher = "tests.support.mixed_daemon"
    lasting = len(HANDLERS)

    def __init__(
        self, reactor: IReactor, pods: int, width: int, seconds: float, seed: int, cgroup: str, told: Path
    ) -> None:
        farm: Factory = lambda _, root: MixedFarm(root)  # noqa: E731
        super().__init__(reactor, pods, width, seconds=seconds, seed=seed, infrastructure=farm)
        self.containerd = Node(self.root / "c")
        self.containerd_kills = 0
        self._registry = Registry()
        self._moments = random.Random(seed)  # noqa: S311
        self._told = told
        self._asked: dict[object, int] = {}  # by call under way: how often containerd was killed before it
        self._calls = MixedCalls(self._ask, IMAGE, self.root / "logs", cgroup)

    @property
    def again(self) -> int:
        """How often a pod that was half made was made anew."""
        return len(self._calls.again)

    async def _prepare(self) -> None:
        self._kubelet = self._calls
        await deferToThread(self._thd_prepare)
        self._begun = time.monotonic()
        self._killer = start(self._kill_containerd())
        self._teller = start(self._tell())

    def _thd_prepare(self) -> None:
        (self.root / "logs").mkdir()
        (self.root / "infranetes.toml").write_text(self._configuration())
        self._registry.start()
        idle = oci.busybox({"Cmd": ["sleep", "2147483647"]})
        self._registry.push(*PAUSE, idle)
        self._registry.push("busybox", "1", idle)
        self.containerd.start(self._registry)
        pulled = self.containerd.crictl("pull", IMAGE)
        if pulled.returncode:
            raise RuntimeError(f"crictl pull: {pulled.stderr}")

    def _table(self) -> dict[str, object]:
        joined = {"handlers": {JOINED: {"network": "cni"}}, "cgroup_driver": "cgroupfs"}
        return {**super()._table(), "delegate": {"socket": str(self.containerd.socket)}, **joined}

    async def _tell(self) -> None:
        """Write the progress, again and again."""
        begun = time.monotonic()
        while not self._done:
            found = self.outcome
            words = (
                f"{time.monotonic() - begun:.0f} s: {found.pods} pods, {found.kills} kills of the daemon, "
                f"{self.containerd_kills} of containerd"
            )
            replace_file(self._told, "\n".join([words, *found.leaked, *found.lost]), durable=False)
            await self._sleep(TOLD_SECONDS)

    async def _ask(self, step: Callable[[Runtime], Awaitable[T]]) -> T:
        call = object()
        self._asked[call] = self.containerd_kills
        try:
            return await super()._ask(step)
        finally:
            del self._asked[call]

    def _has_waited(self) -> bool:
        """Return whether some call has seen as many kills as it may."""
        return any(self.containerd_kills - before >= BROKEN_OFF for before in self._asked.values())

    async def _kill_containerd(self) -> None:
        """Kill containerd at random moments after it has begun to serve, while there are pods to run."""
        while not self._done and not self._late():
            await self._sleep(self._moments.uniform(*REST))
            while self._has_waited() and not self._done:
                await self._sleep(0.05)
            if self._done:
                return
            await deferToThread(self.containerd.kill)
            self.containerd_kills += 1
            await self._sleep(self._moments.choice((0.0, 0.5)))
            await deferToThread(self.containerd.again)
            await self._serves()

    async def _check_nothing_left(self) -> None:
        await self._killer  # calls that fail from here on are not repeated
        await super()._check_nothing_left()

    async def _serves(self) -> None:
        endpoint = UNIXClientEndpoint(self._reactor, str(self.containerd.socket), timeout=5)
        channel = Channel(self._reactor, endpoint)
        try:
            until = time.monotonic() + READY_SECONDS
            while time.monotonic() < until:
                with contextlib.suppress(GrpcError):
                    await RuntimeStub(channel).Version(cri.VersionRequest(), timeout=5.0)
                    return
                await self._sleep(0.1)
        finally:
            await channel.close()

    def _handler(self, number: int) -> str:
        return HANDLERS[number % len(HANDLERS)]

    async def _held(self) -> list[str]:
        return [*await super()._held(), *await deferToThread(self._thd_listed)]

    def _thd_listed(self) -> list[str]:
        """List containerd's sandboxes and containers, asked on its own socket."""
        left = []
        for command, key in (("pods", "items"), ("ps", "containers")):
            words = (command, "-o", "json") if command == "pods" else (command, "-a", "-o", "json")
            shown = self.containerd.crictl(*words)
            if shown.returncode:
                return [f"containerd, which does not answer: {shown.stderr}"]
            for each in json.loads(shown.stdout)[key]:
                left.append(f"containerd's {each['metadata']['name']}, {each['labels']}, {each['state']},")
        return left

    def end(self) -> None:
        """End containerd and the registry; the pods' processes end with the namespaces."""
        self.containerd.end()
        self._registry.stop()


async def soak(test: MixedSoak) -> Mapping[str, object]:
    """Run a soak test, and return its outcome, with what containerd itself has lost track of."""
    try:
        outcome = await test.run()
        await test._teller
    finally:
        await deferToThread(test.end)
    told = {key: value for key, value in attrs.asdict(outcome).items() if key != "faults"}
    own = {
        "namespaces": test.containerd.namespaces(),
        "addresses": test.containerd.addresses(),
        "shims": test.containerd.shims(),
    }
    counts = {"lasting": test.lasting, "containerd_kills": test.containerd_kills, "again": test.again}
    return {**told, **counts, "of_containerd_itself": own, "log": test.log[-3000:]}


def run(
    pods: int,
    width: int,
    seconds: float,
    limit: float = math.inf,
    seed: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> Found:
    """Run a soak test in namespaces of its own, and return its outcome.

    :param limit: seconds after which it is aborted.
    :param seed: determines the moments of the kills. :param say: called with the progress.
    :raise TimeoutError: it was aborted; the message has the progress."""
    with tempfile.TemporaryDirectory(prefix="mixed-", dir="/var/tmp") as place:  # no overlay file system
        root = Path(place)
        numbers = (str(each) for each in (pods, width, seconds, seed))
        words = [*NAMESPACES, sys.executable, "-m", "tests.support.mixed_soak", place, *numbers]
        try:
            with open(root / "errors", "wb") as errors:
                process = subprocess.Popen(
                    words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
                )
            _follow(process, root / PROGRESS, limit, say)
        finally:
            _remove_cgroups(root.name)
        result = root / "outcome.json"
        if not result.exists():
            said = (root / "errors").read_text(errors="replace")
            raise RuntimeError(f"{process.returncode}: {said[-3000:]}")
        found: Found = json.loads(result.read_text())
        return found


def _follow(
    process: subprocess.Popen[bytes], progress: Path, limit: float, say: Callable[[str], None]
) -> None:
    """Wait until the process ends, and pass on its progress. :raise TimeoutError: it takes too long."""
    begun, said = time.monotonic(), ""
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
                return
            now = progress.read_text() if progress.exists() else ""
            if now != said:
                said = now
                say(said)
            if time.monotonic() - begun > limit:
                raise TimeoutError(f"not done in {limit:.0f} s: {said}")
    finally:
        process.kill()  # which also ends everything in its namespaces
        process.wait()


def _remove_cgroups(name: str) -> None:
    for top in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()):
        for directory, _, _ in os.walk(top / name, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def main(root: Path, pods: int, width: int, seconds: float, seed: int) -> None:
    """Run the test, inside of the namespaces."""
    reap()
    tempfile.tempdir = str(root)
    subprocess.run(["mount", "-t", "tmpfs", "run", "/run"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    async def whole() -> None:
        test = MixedSoak(installed(), pods, width, seconds, seed, f"/{root.name}", root / PROGRESS)
        found = await soak(test)
        replace_file(root / "outcome.json", json.dumps(found), 0o600, durable=False)

    task.react(lambda _: Deferred.fromCoroutine(whole()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
