# SPDX-License-Identifier: Apache-2.0
"""What a user waits for, by the size of the image: with Infranetes on QEMU, and with containerd beside it.

Each pod is new: RunPodSandbox until its first container runs, then a second container, then commands. The
first pod of an image pulls it and is measured by itself; the others find it on the node, but their VMs have
never seen it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
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

PODS = 5  # of each image
COMMANDS = 3  # in each pod
PULL_SECONDS = 900.0
FIRST, SECOND, EXEC = "RunPodSandbox to a container running", "a pod's second container", "ExecSync"
TARGETS: Mapping[str, float] = {"1 MiB": 1.2, "83 MiB": 1.3, "1 GiB": 1.5}  # seconds, of the median
SECOND_TARGET, EXEC_TARGET = 0.5, 0.3  # likewise

prepare = content.make


async def run(reactor: IReactor, report: Report, pods: int = PODS) -> None:
    with content.served() as registry:
        daemon = Daemon(reactor, "qemu", report.setup.qemu(), registry.host)
        try:
            say("  starting the daemon; the first time it makes the template")
            await daemon.start()
            report.accelerator = await daemon.accelerator()
            await _all_sizes(daemon.client, daemon.logs, registry, report, pods, "")
        finally:
            await daemon.close()
        try:
            async with containerd(reactor, registry) as client:
                with tempfile.TemporaryDirectory(prefix="bench-logs-") as logs:
                    await _all_sizes(client, Path(logs), registry, report, pods, ", containerd")
        except Missing as missing:
            report.missing["waits, containerd"] = f"not run: {missing}"


async def _all_sizes(
    client: Client, logs: Path, registry: Registry, report: Report, pods: int, whose: str
) -> None:
    """:param whose: added to the figures' names; "": they have targets."""
    seconds: dict[str, list[float]] = {SECOND: [], EXEC: []}
    note = f"{pods} pods, one after the other"
    for size, name in SIZES.items():
        image = registry.reference(name, "1")
        await deferToThread((logs / name).mkdir, parents=True)
        pulled = await _pull(client, logs / name, image)
        report.add("waits", f"{size}: pull to a container running{whose}", pulled, "s", note="once")
        ran = []
        for number in range(pods):
            ran.append(await _pod(client, logs / name, f"pod-{name}-{number}", image, seconds))
        target = {} if whose else {50: TARGETS[size]}
        report.latencies("waits", f"{size}: {FIRST}{whose}", ran, (50, 100), target, "s", note)
    for what, target_seconds in ((SECOND, SECOND_TARGET), (EXEC, EXEC_TARGET)):
        target = {} if whose else {50: target_seconds}
        note = f"{len(seconds[what])} times, in pods of all three images"
        report.latencies("waits", f"{what}{whose}", seconds[what], (50, 100), target, "s", note)


async def _pull(client: Client, logs: Path, image: str) -> float:
    """Pull the image in a pod that runs already, as kubelet does. Returns the seconds until it runs there."""
    pod = await client.run_pod("pull", logs)
    try:
        request = cri.PullImageRequest(image=cri.ImageSpec(image=image))
        pulled, _ = await client.timed(lambda: client.images.PullImage(request, timeout=PULL_SECONDS))
        began, _ = await client.timed(partial(client.run_container, pod, "main", image, COMMAND))
        return pulled + began
    finally:
        await client.remove_pod(pod[1])


async def _pod(client: Client, logs: Path, name: str, image: str, seconds: dict[str, list[float]]) -> float:
    """Run a pod of two containers. Returns the seconds until the first ran; adds the others' to `seconds`."""
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
