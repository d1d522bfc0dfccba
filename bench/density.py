# SPDX-License-Identifier: Apache-2.0
"""One daemon with 1,000 simulated pods of 3 containers: lists, memory, start-up and recovery.

With the choice `many` it is 5,000 pods of one container.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread

from bench.client import side_by_side
from bench.daemon import ROOT, Daemon
from bench.figures import Report, say
from bench.lists import processor_seconds
from bench.turns import longest
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from tests.support import oci
from tests.support.registry import Registry

PODS = {"": (1000, 3), "many": (5000, 1)}  # by the choice: pods, and containers in each
MEMORY_TARGETS = {0: 60.0, 1000: 200.0}  # MiB, by the number of pods
TURN_TARGET = 50.0  # ms
REST_SECONDS = 130.0  # two passes over the VMs fall into it
STATS, STATS_PAUSE = 10, 1.0  # figures of less than 0.25 s ago would not be asked for again
UNREACHABLE = 10
LISTS = 500
AT_ONCE = 32
SETTLE_SECONDS = 5.0  # until lost agents have been noticed and earlier work is done
RECOVERY_SECONDS = 180.0
LIST_TARGET = {99: 50.0}
START_TARGET = 10.0  # seconds until it serves
COMMAND: tuple[str, ...] = ()  # with this, the fake ContainerProvider keeps a state and runs no process
TABLE = {"boot_seconds": 0.1, "jitter_seconds": 0.1}


async def run(reactor: IReactor, report: Report, choice: str = "") -> None:
    pods, containers = PODS[choice]
    with Registry() as registry:
        image = registry.push("busybox", "1", oci.busybox())
        daemon = Daemon(reactor, "simulated", TABLE, registry.host, turns=True)
        try:
            report.add("density", "start-up with 0 pods", await daemon.start(), "s")
            await deferLater(reactor, SETTLE_SECONDS)
            _memory(daemon, report, 0)
            await _populate(reactor, daemon, image, pods, containers, report)
            await _lists(reactor, daemon, report, pods, containers, "")
            _memory(daemon, report, pods)
            await _rest(reactor, daemon, report, pods)
            await _stats(daemon, report, pods)
            ids = _make_unreachable(daemon, UNREACHABLE)
            await _lists(reactor, daemon, report, pods, containers, f", {UNREACHABLE} unreachable")
            _behave(daemon, ids, "normal")
            await _recover(reactor, daemon, report, pods, containers)
            report.add("density", f"daemon with {pods:,} pods, recovered", daemon.resident_mib(), "MiB")
        finally:
            daemon.kill()
            _end_farm(daemon)
            await daemon.close()


def _memory(daemon: Daemon, report: Report, pods: int) -> None:
    resident, target = daemon.resident_mib(), MEMORY_TARGETS.get(pods)
    report.add("density", f"daemon with {pods:,} pods", resident, "MiB", target)


async def _rest(reactor: IReactor, daemon: Daemon, report: Report, pods: int) -> None:
    """Measure what the daemon does while nobody asks: its passes over the VMs, and its pods' keepalives."""
    before, used = daemon.turns.stat().st_size, processor_seconds(daemon.pid)
    await deferLater(reactor, REST_SECONDS)
    turn, collection = longest(daemon.turns.read_text()[before:])
    spent = (processor_seconds(daemon.pid) - used) / REST_SECONDS * 100
    rest = f"{pods:,} pods at rest"
    report.add("density", f"{rest}: the longest turn, but for garbage", turn * 1000, "ms", TURN_TARGET)
    report.add("density", f"{rest}: the longest collection of garbage", collection * 1000, "ms")
    report.add("density", f"{rest}: the daemon's processor", spent, "%")


async def _stats(daemon: Daemon, report: Report, pods: int) -> None:
    method = "ListPodSandboxStats"
    found = await _measured(daemon, STATS, method, STATS_PAUSE)
    label = f"{method} of {pods:,}"
    note = f"{STATS} calls, {found['items']:,} answered, all agents in one process"
    report.latencies("density", label, found["seconds"], (50,), note=note)
    spent = found["processor_seconds"] * 1000
    report.add("density", f"{label}, processor time of the daemon", spent, "ms", note=note)


async def _populate(
    reactor: IReactor, daemon: Daemon, image: str, pods: int, containers: int, report: Report
) -> None:
    client = daemon.client
    spec = cri.ImageSpec(image=image)
    await client.images.PullImage(cri.PullImageRequest(image=spec), timeout=60.0)
    say(f"  making {pods:,} pods of {containers} containers")

    async def one(number: int) -> float:
        seconds, pod = await client.timed(lambda: client.run_pod(f"pod-{number}", daemon.logs))
        for index in range(containers):
            await client.run_container(pod, f"c{index}", image, COMMAND)
        return seconds

    start = reactor.seconds()
    await side_by_side(pods, AT_ONCE, one)
    took = reactor.seconds() - start
    report.add("density", f"making {pods:,} pods of {containers} containers, {AT_ONCE} at once", took, "s")


async def _lists(
    reactor: IReactor, daemon: Daemon, report: Report, pods: int, containers: int, suffix: str
) -> None:
    await deferLater(reactor, SETTLE_SECONDS)
    for method, expected in (("ListContainers", pods * containers), ("ListPodSandbox", pods)):
        found = await _measured(daemon, LISTS, method)
        if found["items"] != expected:
            raise AssertionError(f"{method} answered with {found['items']} of {expected}")
        label = f"{method} of {expected:,}{suffix}"
        note = f"{LISTS} calls, {found['bytes']:,} bytes each"
        report.latencies("density", label, found["seconds"], (50, 99), LIST_TARGET, note=note)
        spent = found["processor_seconds"] * 1000
        report.add("density", f"{label}, processor time of the daemon", spent, "ms", note=note)


async def _measured(
    daemon: Daemon, count: int, method: str, pause: float = 0.0
) -> dict[str, Any]:  # Any: JSON
    arguments = ["-m", "bench.lists", str(daemon.socket), str(daemon.pid), str(count), method, str(pause)]
    found: dict[str, Any] = json.loads(await deferToThread(_output, [sys.executable, *arguments]))
    return found


def _output(command: list[str]) -> bytes:
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    return bytes(done.stdout)


async def _recover(reactor: IReactor, daemon: Daemon, report: Report, pods: int, containers: int) -> None:
    """Kill the daemon; time how long the next one takes to answer, and to hear from every agent."""
    before = _vms(daemon)
    daemon.kill()
    start = reactor.seconds()
    label = f"start-up with {pods:,} pods, after SIGKILL"
    report.add("density", label, await daemon.start(), "s", target=START_TARGET)
    while (live := await _live_agents(daemon)) < pods:
        if reactor.seconds() > start + RECOVERY_SECONDS:
            raise AssertionError(f"only {live} agents are live after {RECOVERY_SECONDS:g} s")
        await deferLater(reactor, 0.1)
    took = reactor.seconds() - start
    report.add("density", f"recovery of {pods:,} pods, every agent heard from", took, "s")
    touched = len(before.items() ^ _vms(daemon).items())
    report.add("density", f"VMs of {pods:,} that the restart touched", touched, "VMs", target=0)
    running = cri.ContainerFilter(state=cri.ContainerStateValue(state=cri.CONTAINER_RUNNING))
    request = cri.ListContainersRequest(filter=running)
    answer = await daemon.client.runtime.ListContainers(request, timeout=30.0)
    if len(answer.containers) != pods * containers:
        raise AssertionError(f"{len(answer.containers)} of {pods * containers} containers are running")


async def _live_agents(daemon: Daemon) -> int:
    answer = await daemon.client.runtime.Status(cri.StatusRequest(verbose=True), timeout=30.0)
    return int(json.loads(answer.info["node"])["agents"].get("live", 0))


# ---- The simulated VMs, as their farm reports them, not the daemon


@contextlib.contextmanager
def _farm(daemon: Daemon) -> Iterator[Callable[..., dict[str, Any]]]:  # Any: JSON
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as control:
        control.settimeout(30)
        control.connect(str(daemon.root / "run" / "simulated" / "farm.sock"))
        with control.makefile("rwb") as stream:
            yield lambda **request: _ask(cast(BinaryIO, stream), request)


def _ask(stream: BinaryIO, request: dict[str, object]) -> dict[str, Any]:  # Any: JSON
    stream.write(json.dumps({"seq": 1, **request}).encode() + b"\n")
    stream.flush()
    answer: dict[str, Any] = json.loads(stream.readline())  # Any: JSON
    if not answer.get("ok"):
        raise AssertionError(f"the farm: {answer}")
    return answer


def _vms(daemon: Daemon) -> dict[str, tuple[object, ...]]:
    """Return, for each VM, what changes if it is terminated, started or recreated."""
    with _farm(daemon) as ask:
        return {vm["id"]: (vm["state"], vm["port"], vm["created_at"]) for vm in ask(op="list")["vms"]}


def _make_unreachable(daemon: Daemon, count: int) -> list[str]:
    with _farm(daemon) as ask:
        ids = [vm["id"] for vm in ask(op="list")["vms"][:count]]
    _behave(daemon, ids, "unreachable")
    return ids


def _behave(daemon: Daemon, ids: list[str], behaviour: str) -> None:
    with _farm(daemon) as ask:
        for vm_id in ids:
            ask(op="behave", id=vm_id, behaviour=behaviour)


def _end_farm(daemon: Daemon) -> None:
    with contextlib.suppress(OSError, ValueError), _farm(daemon) as ask:
        ask(op="stop")
