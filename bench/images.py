# SPDX-License-Identifier: Apache-2.0
"""The time from RunPodSandbox until a container runs, by the size of its image, on a simulated cloud.

Layers are sent to the agents over TLS; nothing is emulated. The node has the image already, as it does when
kubelet calls RunPodSandbox. All VMs of the cloud are in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from bench.client import Client, side_by_side
from bench.daemon import Daemon
from bench.density import _end_farm
from bench.figures import Report, say
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from tests.support.large_image import large
from tests.support.registry import Registry

SIMULATED: Mapping[str, object] = {"boot_seconds": 0.0, "jitter_seconds": 0.0, "images": "layers"}
# By the size in MiB when pulled: the MiB that do not compress and those that do, and the layers over busybox.
IMAGES = {1: (1, 1, 1), 83: (82, 146, 6)}
AT_ONCE = (1, 2, 10)
TIMES = 3  # for each number of pods
TARGETS = {(83, 1): 2.0}  # seconds, of the median
COMMAND = ("sleep", "100000")


async def run(reactor: IReactor, report: Report) -> None:
    with Registry() as registry:
        daemon = Daemon(reactor, "simulated", SIMULATED, registry.host)
        try:
            say("  starting the daemon")
            await daemon.start()
            for size, content in IMAGES.items():
                image = registry.push(f"mib{size}", "1", large(*content))
                await _pull(daemon.client, image, size, report)
                for count in AT_ONCE:
                    await _measure(daemon, image, size, count, report)
        finally:
            daemon.kill()
            _end_farm(daemon)
            await daemon.close()


async def _pull(client: Client, image: str, size: int, report: Report) -> None:
    request = cri.PullImageRequest(image=cri.ImageSpec(image=image))
    seconds, _ = await client.timed(lambda: client.images.PullImage(request, timeout=240.0))
    report.add("images", f"PullImage of {size} MiB, simulated", seconds, "s")


async def _measure(daemon: Daemon, image: str, size: int, count: int, report: Report) -> None:
    """Run `count` pods at once, TIMES times."""
    client = daemon.client

    async def one(number: int, turn: int) -> tuple[float, float, str]:
        name = f"pod-{size}-{count}-{turn}-{number}"
        ran, pod = await client.timed(partial(client.run_pod, name, daemon.logs))
        began, _ = await client.timed(partial(client.run_container, pod, "main", image, COMMAND))
        return ran, began, pod[1]

    ready: list[float] = []
    running: list[float] = []
    for turn in range(TIMES):
        taken = await side_by_side(count, count, partial(one, turn=turn))
        ready += [ran for ran, _, _ in taken]
        running += [ran + began for ran, began, _ in taken]
        for _, _, sandbox in taken:
            await client.remove_pod(sandbox)
    target = TARGETS.get((size, count))
    label = f"an image of {size} MiB, simulated, {count} at once"
    note = f"{TIMES} times"
    report.latencies("images", f"{label}: RunPodSandbox", ready, (50,), None, "s", note)
    report.latencies(
        "images",
        f"{label}: until its container runs",
        running,
        (50, 100),
        {50: target} if target else None,
        "s",
        note,
    )
