# SPDX-License-Identifier: Apache-2.0
"""The memory of idle pods on clones of QEMU's template: on the node and in the guest.

What clones share is counted once, so a single VM says little: a pod's own cost is the memory that it has
written to.
"""

from __future__ import annotations

from functools import partial

from twisted.internet.task import deferLater

from bench.client import Client, Pod
from bench.daemon import Daemon
from bench.figures import Report, say
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from tests.support import oci, process_memory
from tests.support.process_memory import Kind, Memory
from tests.support.registry import Registry

COUNTS = (1, 4, 8)
IDLE_SECONDS = 20.0
TARGET = 60.0  # MiB of PSS per pod, with the largest number of pods
COMMAND = ("sleep", "100000")
CONTAINERS = 2
_SHOWN = ("MemTotal", "MemFree", "MemAvailable", "AnonPages", "Slab")


async def run(reactor: IReactor, report: Report, containers: str = "") -> None:
    docker = containers == "docker"
    with Registry() as registry:
        image = registry.push("busybox", "1", oci.busybox())
        daemon = Daemon(reactor, "qemu", report.setup.qemu(docker), registry.host)
        try:
            say("  starting the daemon; the first time it makes the template")
            await daemon.start()
            report.accelerator = await daemon.accelerator()
            pull = cri.PullImageRequest(image=cri.ImageSpec(image=image))
            await daemon.client.images.PullImage(pull, timeout=60.0)
            await _measure(reactor, daemon, image, report, ", with Docker" if docker else "")
        finally:
            await daemon.close()


async def _measure(reactor: IReactor, daemon: Daemon, image: str, report: Report, suffix: str) -> None:
    pods: list[Pod] = []
    took: list[float] = []
    try:
        for count in COUNTS:
            while len(pods) < count:
                run_pod = partial(daemon.client.run_pod, f"pod-{len(pods)}", daemon.logs)
                seconds, pod = await daemon.client.timed(run_pod)
                pods.append(pod)
                took.append(seconds)
            await deferLater(reactor, IDLE_SECONDS)
            _report_pods(report, process_memory.of_vms(daemon.root / "state"), suffix)
        report.latencies("memory", f"RunPodSandbox{suffix}", took, (50,), None, "s")
        await _report_guest(reactor, daemon.client, pods[0], image, report, suffix)
    finally:
        for _, sandbox in pods:
            await daemon.client.remove_pod(sandbox)


def _report_pods(report: Report, found: list[dict[Kind, Memory]], suffix: str) -> None:
    """Add the means of these VMs."""
    count = len(found)
    label = f"{count} idle pod{'s' if count > 1 else ''}{suffix}"
    each = [process_memory.total(memory) for memory in found]
    proportional = sum(memory.proportional for memory in each) / count
    target = TARGET if count == COUNTS[-1] else None
    report.add("memory", f"{label}: PSS of each", proportional, "MiB", target)
    report.add("memory", f"{label}: of its own", sum(memory.private for memory in each) / count, "MiB")
    for kind in Kind:
        written = sum(memory[kind].written for memory in found) / count
        report.add("memory", f"{label}: written to, {kind.value}", written, "MiB")


async def _report_guest(
    reactor: IReactor, client: Client, pod: Pod, image: str, report: Report, suffix: str
) -> None:
    """Add what a guest says of its memory when it has two containers."""
    for number in range(CONTAINERS):
        container = await client.run_container(pod, f"c{number}", image, COMMAND)
    await deferLater(reactor, IDLE_SECONDS)
    request = cri.ExecSyncRequest(container_id=container, cmd=["cat", "/proc/meminfo"], timeout=30)
    response = await client.runtime.ExecSync(request, timeout=60.0)
    lines = response.stdout.decode().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    for name in _SHOWN:
        label = f"a guest with {CONTAINERS} containers{suffix}: {name}"
        report.add("memory", label, kib[name] / 1024, "MiB")
