# SPDX-License-Identifier: Apache-2.0
"""Two, ten and thirty pods at once, until their containers run: with an image of 83 MiB and one of 1 MiB.

Whether VMs are emulated or not, there are always fewer than thirty processors, so all pods wait for each
other. What has a target is therefore how much longer the larger image takes than the smaller. No VM has seen
either image; the node has both.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

from bench import content
from bench.client import Client, side_by_side
from bench.content import COMMAND, SIZES
from bench.daemon import Daemon
from bench.figures import Report, percentile, say
from infranetes_common.concurrency import start, within
from infranetes_common.errors import DeadlineExceeded
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri

TIMES = {2: 3, 10: 1, 30: 1}  # how often, by the number of pods
ROUND_SECONDS = 400.0  # for all pods of one round, including their removal
SMALL, LARGE = "1 MiB", "83 MiB"
TARGET = 1.5

prepare = content.make


async def run(reactor: IReactor, report: Report) -> None:
    with content.served() as registry:
        daemon = Daemon(reactor, "qemu", report.setup.qemu(), registry.host)
        try:
            say("  starting the daemon; the first time it makes the template")
            await daemon.start()
            report.accelerator = await daemon.accelerator()
            images = {size: registry.reference(SIZES[size], "1") for size in (SMALL, LARGE)}
            for image in images.values():  # so that its layers are on the node
                request = cri.PullImageRequest(image=cri.ImageSpec(image=image))
                await daemon.client.images.PullImage(request, timeout=240.0)
                await _round(daemon.client, daemon.logs, "first", image, 1)
            for count in TIMES:
                try:
                    await _compare(reactor, daemon, images, count, report)
                except DeadlineExceeded as late:
                    report.missing[f"crowd, {count} at once"] = str(late)
                    break  # the pods that it did not finish would slow down the next one
        finally:
            await daemon.close()


async def _compare(
    reactor: IReactor, daemon: Daemon, images: dict[str, str], count: int, report: Report
) -> None:
    taken: dict[str, list[float]] = {size: [] for size in images}
    for turn in range(TIMES[count]):
        for size, image in images.items():
            name = f"crowd-{count}-{turn}-{SIZES[size]}"
            pods = start(_round(daemon.client, daemon.logs, name, image, count))
            what = f"running and removing {count} pods"
            seconds = await within(reactor, ROUND_SECONDS, pods, what)
            taken[size] += seconds
    note = f"{TIMES[count]} times; RunPodSandbox to the container running"
    for size, all_seconds in taken.items():
        report.latencies("crowd", f"{count} pods at once, {size}:", all_seconds, (50, 100), None, "s", note)
    ratio = statistics.median(taken[LARGE]) / statistics.median(taken[SMALL])
    report.add("crowd", f"{count} pods at once, {LARGE} beside {SMALL}", ratio, "x", TARGET, note)
    last = percentile(taken[LARGE], 100) / percentile(taken[SMALL], 100)
    report.add("crowd", f"{count} pods at once, {LARGE} beside {SMALL}, the last", last, "x", None, note)


async def _round(client: Client, logs: Path, name: str, image: str, count: int) -> list[float]:
    """Run `count` pods at once and remove them. Return the seconds of each until its container ran."""

    async def one(number: int) -> tuple[float, str]:
        ran, pod = await client.timed(partial(client.run_pod, f"{name}-{number}", logs))
        began, _ = await client.timed(partial(client.run_container, pod, "main", image, COMMAND))
        return ran + began, pod[1]

    taken = await side_by_side(count, count, one)
    await side_by_side(count, 2, lambda number: client.remove_pod(taken[number][1]))
    return [seconds for seconds, _ in taken]
