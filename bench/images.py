# SPDX-License-Identifier: Apache-2.0
"""From RunPodSandbox until a container runs, by the size of its image, whose layers are brought into each VM.

By default on a simulated cloud, where layers are sent through the agents' TLS; `images:qemu` is on clones of
QEMU's template, which are shown them as disks. The image is on the node already, as kubelet has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from bench.client import Client, side_by_side
from bench.daemon import Daemon
from bench.density import _end_farm
from bench.figures import Missing, Report, say
from infranetes.guest.image import DEFAULT_DIR
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from tests.support.large_image import large
from tests.support.registry import Registry

SIMULATED: Mapping[str, object] = {"boot_seconds": 0.0, "jitter_seconds": 0.0, "images": "layers"}
TEMPLATES = Path("/var/lib/infranetes/bench")  # kept, so that the second run finds the template
GUEST = Path(f"{DEFAULT_DIR}-oci")
QEMU: Mapping[str, object] = {
    "image_dir": str(GUEST),
    "bridge": "infrabench0",
    "pod_cidr": "10.216.0.0/24",
    "template_dir": str(TEMPLATES),
}
# By MiB as pulled: MiB that do not compress and that do, and the layers over busybox.
IMAGES = {1: (1, 1, 1), 83: (82, 146, 6)}
AT_ONCE = {"simulated": (1, 2, 10), "qemu": (1, 2)}
TIMES = 3  # each number of pods
TARGETS = {("simulated", 83, 1): 2.0}  # seconds, of the median
COMMAND = ("sleep", "100000")


async def run(reactor: IReactor, report: Report, provider: str = "simulated") -> None:
    if provider == "qemu" and not GUEST.exists():
        raise Missing(f"there is no guest image in {GUEST}: make image-oci")
    with Registry() as registry:
        table = SIMULATED if provider == "simulated" else QEMU
        daemon = Daemon(reactor, provider, table, registry.host)
        try:
            say("  starting the daemon")
            await daemon.start()
            for size, content in IMAGES.items():
                image = registry.push(f"mib{size}", "1", large(*content))
                await _pull(daemon.client, image, size, report, provider)
                for count in AT_ONCE[provider]:
                    await _measure(daemon, image, size, count, report, provider)
        finally:
            if provider == "simulated":
                daemon.kill()
                _end_farm(daemon)
            await daemon.close()


async def _pull(client: Client, image: str, size: int, report: Report, provider: str) -> None:
    request = cri.PullImageRequest(image=cri.ImageSpec(image=image))
    seconds, _ = await client.timed(lambda: client.images.PullImage(request, timeout=240.0))
    report.add("images", f"PullImage of {size} MiB, {provider}", seconds, "s")


async def _measure(daemon: Daemon, image: str, size: int, count: int, report: Report, provider: str) -> None:
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
    target = TARGETS.get((provider, size, count))
    label = f"an image of {size} MiB, {provider}, {count} at once"
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
