# SPDX-License-Identifier: Apache-2.0
"""Pods with Docker on clones of QEMU's template: until they are ready, until containers run, and ExecSync.

Measured with an image that the template has (`images.preload`), and with one that is sent to each VM.
"""

from __future__ import annotations

from functools import partial

from bench.client import Client, Pod
from bench.daemon import Daemon, resident_mib
from bench.figures import Missing, Report, say
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from tests.support import oci
from tests.support.registry import Registry

PODS, SENT_PODS = 20, 6
RUN, CREATE, START = "RunPodSandbox", "CreateContainer", "StartContainer"
RUNS, EXEC = "until its container runs", "ExecSync"
TARGETS = {RUN: 1.0, RUNS: 3.5, EXEC: 1.5}  # seconds, of the median
PRELOADED, SENT = "", ", its image sent into the VM"
COMMAND = ("sleep", "100000")


async def run(reactor: IReactor, report: Report, pods: int = PODS) -> None:
    with Registry() as registry:
        image = registry.push("busybox", "1", oci.busybox())
        sent = registry.push(
            "sent", "1", oci.image([oci.busybox_layer() + bytes(512)], {"Env": ["PATH=/bin"]})
        )
        daemon = Daemon(reactor, "qemu", report.setup.qemu(docker=True), registry.host, [image])
        try:
            say("  starting the daemon; the first time it makes the template")
            report.add("pods", "start-up with the template made or found", await daemon.start(), "s")
            report.accelerator = await daemon.accelerator()
            await _measure(daemon, image, report, pods, PRELOADED)
            await _measure(daemon, sent, report, min(pods, SENT_PODS), SENT)
        finally:
            await daemon.close()


async def _measure(daemon: Daemon, image: str, report: Report, pods: int, how: str) -> None:
    client = daemon.client
    pull = cri.PullImageRequest(image=cri.ImageSpec(image=image))
    await client.images.PullImage(pull, timeout=60.0)
    took: dict[str, list[float]] = {each: [] for each in (RUN, CREATE, START, RUNS, EXEC)}
    for number in range(pods):
        name = f"pod-{number}-{len(how)}"
        ran, pod = await client.timed(partial(client.run_pod, name, daemon.logs))
        try:
            create = partial(client.create_container, pod, "main", image, COMMAND)
            created, container = await client.timed(create)
            started, _ = await client.timed(partial(client.start_container, container))
            execed = await client.exec_sync(container, ["true"])
            for what, seconds in (
                (RUN, ran),
                (CREATE, created),
                (START, started),
                (RUNS, ran + created + started),
                (EXEC, execed),
            ):
                took[what].append(seconds)
            if number == 0 and how is PRELOADED:
                report.add("pods", "vmserver in the guest", await _guest_memory(client, pod, image), "MiB")
        finally:
            await client.remove_pod(pod[1])
    note = f"{pods} pods, one after the other"
    for what, seconds_each in took.items():
        targets = {50: TARGETS[what]} if what in TARGETS else None
        if how is PRELOADED or what in (CREATE, RUNS):
            report.latencies("pods", what + how, seconds_each, (50, 95), targets, "s", note)


async def _guest_memory(client: Client, pod: Pod, image: str) -> float:
    """Return vmserver's resident memory, as seen by a container in the VM's own PID namespace."""
    options = cri.NamespaceOption(pid=cri.NODE)
    security = cri.LinuxContainerSecurityContext(namespace_options=options)
    linux = cri.LinuxContainerConfig(security_context=security)
    container = await client.run_container(pod, "look", image, COMMAND, linux=linux)
    script = (
        "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -q vmserver && cat $p/status; done; true"
    )
    request = cri.ExecSyncRequest(container_id=container, cmd=["sh", "-c", script], timeout=30)
    response = await client.runtime.ExecSync(request, timeout=60.0)
    output = response.stdout.decode(errors="replace")
    if "VmRSS:" not in output:
        raise Missing(f"the guest shows no vmserver: {output[-300:]!r}")
    return resident_mib(output)
