# SPDX-License-Identifier: Apache-2.0
"""What it costs the calls of a pod in Debian's containerd that they are delegated by the daemon.

Each call is made in turn directly and through the daemon, one at a time, so that both meet the same load.
"""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from twisted.internet.threads import deferToThread

from bench.client import Client
from bench.containerd import containerd
from bench.daemon import Daemon
from bench.density import _end_farm
from bench.figures import Report, percentile, say
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from tests.interop.critest_images import PAUSE
from tests.support import oci
from tests.support.registry import Registry

CONTAINERS = 100
TIMES = 300  # for each call, each way
WARM_UP = 20
SECONDS = 30.0
TARGET = 1.0  # ms, by which the median may be longer
SIMULATED = {"boot_seconds": 0.0, "jitter_seconds": 0.0}

Ask = Callable[[Any], Awaitable[object]]
"""A call by a stub of the RuntimeService. Any: its methods are made from the descriptor."""


async def run(reactor: IReactor, report: Report) -> None:
    with Registry() as registry:
        await deferToThread(registry.push, *PAUSE, oci.busybox({"Cmd": ["sleep", "2147483647"]}))
        image = await deferToThread(registry.push, "busybox", "1", oci.busybox())
        async with containerd(reactor, registry) as direct:
            daemon = Daemon(reactor, "simulated", SIMULATED, more=f'[delegate]\nsocket = "{direct.socket}"\n')
            try:
                say("  starting the daemon")
                await daemon.start()
                with tempfile.TemporaryDirectory(prefix="bench-logs-") as logs:
                    await _measure(direct, daemon.client, Path(logs), image, report)
            finally:
                daemon.kill()
                _end_farm(daemon)
                await daemon.close()


async def _measure(direct: Client, through: Client, logs: Path, image: str, report: Report) -> None:
    pulled = cri.PullImageRequest(image=cri.ImageSpec(image=image))
    await through.images.PullImage(pulled, timeout=SECONDS)
    pod = await through.run_pod("theirs", logs)
    try:
        say(f"  making {CONTAINERS} containers")
        for number in range(CONTAINERS):
            await direct.create_container(pod, f"box-{number}", image, ["true"])
        status = cri.PodSandboxStatusRequest(pod_sandbox_id=pod[1])
        calls: dict[str, Ask] = {
            "Version": lambda stub: stub.Version(cri.VersionRequest(), timeout=SECONDS),
            "PodSandboxStatus": lambda stub: stub.PodSandboxStatus(status, timeout=SECONDS),
            f"ListContainers of {CONTAINERS}": lambda stub: stub.ListContainers(
                cri.ListContainersRequest(), timeout=SECONDS
            ),
        }
        for name, ask in calls.items():
            await _both(direct, through, name, ask, report)
    finally:
        await through.remove_pod(pod[1])


async def _both(direct: Client, through: Client, name: str, ask: Ask, report: Report) -> None:
    seconds: dict[str, list[float]] = {"direct": [], "through the daemon": []}
    clients = dict(zip(seconds, (direct, through), strict=True))
    for turn in range(WARM_UP + TIMES):
        for way, client in clients.items():
            taken, _ = await client.timed(partial(ask, client.runtime))
            if turn >= WARM_UP:
                seconds[way].append(taken)
    note = f"{TIMES} times each way, in turn"
    for way, taken_times in seconds.items():
        report.latencies("hop", name, taken_times, (50, 99), note=note, whose=way)
    one, other = (percentile(each, 50) for each in seconds.values())
    report.add("hop", f"{name}, the hop", (other - one) * 1000, "ms", TARGET, "of the medians")
