# SPDX-License-Identifier: Apache-2.0
"""What a user waits for, by the size of the image: with Infranetes on QEMU, and with containerd beside it.

Each pod is new: RunPodSandbox until its first container runs, then a second container, then commands. The
first pod of an image pulls it and is measured by itself; for the others it is on the node already, but their
VMs have never seen it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from twisted.internet.threads import deferToThread

from bench import content
from bench.client import Client
from bench.containerd import containerd
from bench.content import COMMAND, SIZES, TRUE
from bench.daemon import Daemon
from bench.figures import Missing, Report, say
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from tests.support.registry import Registry

PODS = 20  # of each image: the fewest of which a p95 is not the longest
COMMANDS = 3  # in each pod
PULL_SECONDS = 900.0
FIRST, SECOND, EXEC = "RunPodSandbox to a container running", "a pod's second container", "ExecSync"
TARGETS: Mapping[str, float] = {"1 MiB": 1.2, "83 MiB": 1.3, "1 GiB": 1.5}  # seconds, of the median
SECOND_TARGET, EXEC_TARGET = 0.5, 0.3  # likewise

CONTAINERD = "containerd"
Ready = Callable[[], Awaitable[float]]

prepare = content.make


async def run(reactor: IReactor, report: Report, variant: str = "") -> None:
    """:param variant: `pool`: each pod gets a VM from the pool, and containerd is not measured."""
    pool = variant == "pool"
    with content.served() as registry:
        more = "[[pool.sizes]]\ncount = 1\n" if pool else ""
        daemon = Daemon(reactor, "qemu", report.setup.qemu(), registry.host, more=more)
        try:
            say("  starting the daemon; the first time it makes the template")
            await daemon.start()
            report.accelerator = await daemon.accelerator()
            whose = "a VM of the pool" if pool else ""
            ready = partial(daemon.pool_filled, 1) if pool else _at_once
            await _all_sizes(daemon.client, daemon.logs, registry, report, ready, whose)
        finally:
            await daemon.close()
        if pool:
            return
        try:
            async with containerd(reactor, registry) as client:
                with tempfile.TemporaryDirectory(prefix="bench-logs-") as logs:
                    await _all_sizes(client, Path(logs), registry, report, _at_once, CONTAINERD)
        except Missing as missing:
            report.missing["waits, containerd"] = f"not run: {missing}"


async def _at_once() -> float:
    return 0.0


async def _all_sizes(
    client: Client, logs: Path, registry: Registry, report: Report, ready: Ready, whose: str
) -> None:
    """Measure the waits. :param ready: awaited before each pod. :param whose: whose figures they are."""
    seconds: dict[str, list[float]] = {SECOND: [], EXEC: []}
    note = f"{PODS} pods, one after the other"
    judged = whose != CONTAINERD
    for size, name in SIZES.items():
        image = registry.reference(name, "1")
        await deferToThread((logs / name).mkdir, parents=True)
        pulled = await _pull(client, logs / name, image)
        report.add("waits", f"{size}: pull to a container running", pulled, "s", note="once", whose=whose)
        ran = []
        for number in range(PODS):
            await ready()
            ran.append(await _pod(client, logs / name, f"pod-{name}-{number}", image, seconds))
        target = {50: TARGETS[size]} if judged else {}
        report.latencies("waits", f"{size}: {FIRST}", ran, (50, 95, 100), target, "s", note, whose)
    for what, target_seconds in ((SECOND, SECOND_TARGET), (EXEC, EXEC_TARGET)):
        target = {50: target_seconds} if judged else {}
        note = f"{len(seconds[what])} times, in pods of all three images"
        report.latencies("waits", what, seconds[what], (50, 95, 100), target, "s", note, whose)


async def _pull(client: Client, logs: Path, image: str) -> float:
    """Pull the image and run a container in an existing pod, like kubelet. Return how long that took."""
    pod = await client.run_pod("pull", logs)
    try:
        request = cri.PullImageRequest(image=cri.ImageSpec(image=image))
        pulled, _ = await client.timed(lambda: client.images.PullImage(request, timeout=PULL_SECONDS))
        began, _ = await client.timed(partial(client.run_container, pod, "main", image, COMMAND))
        return pulled + began
    finally:
        await client.remove_pod(pod[1])


async def _pod(client: Client, logs: Path, name: str, image: str, seconds: dict[str, list[float]]) -> float:
    """Run a pod of two containers. Return the seconds until the first ran; add the others' to `seconds`."""
    ran, pod = await client.timed(partial(client.run_pod, name, logs))
    try:
        first, container = await client.timed(partial(client.run_container, pod, "first", image, COMMAND))
        second, _ = await client.timed(partial(client.run_container, pod, "second", image, COMMAND))
        seconds[SECOND].append(second)
        for _ in range(COMMANDS):
            seconds[EXEC].append(await client.exec_sync(container, TRUE))
        return ran + first
    finally:
        await client.remove_pod(pod[1])
