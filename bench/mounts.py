# SPDX-License-Identifier: Apache-2.0
"""The time from kubelet's write of a changed ConfigMap until a container in a QEMU VM has logged it."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from twisted.internet.task import deferLater

from bench.daemon import Daemon
from bench.figures import Report, say
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from tests.support import oci
from tests.support.registry import Registry

CHANGES = 30
PATIENCE_SECONDS = 60.0
BOUND_SECONDS = 2.0
_READER = "while :; do read -r now </mnt/key; [ $now = $old ] || echo $now; old=$now; sleep 0.02; done"


async def run(reactor: IReactor, report: Report) -> None:
    with Registry() as registry:
        image = registry.push("busybox", "1", oci.busybox())
        daemon = Daemon(reactor, "qemu", report.setup.qemu(docker=True), registry.host, [image])
        try:
            say("  starting the daemon; the first time it makes the template")
            await daemon.start()
            report.accelerator = await daemon.accelerator()
            took = await _changes(reactor, daemon, image)
        finally:
            await daemon.close()
    note = f"{CHANGES} changes of one configmap, one after the other"
    report.latencies("mounts", "a configmap's change", took, (50, 95, 100), {100: BOUND_SECONDS}, "s", note)


async def _changes(reactor: IReactor, daemon: Daemon, image: str) -> list[float]:
    directory = daemon.root / "kubelet" / "pods" / "uid" / "volumes" / "kubernetes.io~configmap" / "config"
    _write(directory, "first")
    client = daemon.client
    await client.images.PullImage(cri.PullImageRequest(image=cri.ImageSpec(image=image)), timeout=60.0)
    pod = await client.run_pod("mounts", daemon.logs)
    mounts = [cri.Mount(container_path="/mnt", host_path=str(directory), readonly=True)]
    await client.run_container(pod, "reader", image, ("sh", "-c", f"old=none; {_READER}"), mounts=mounts)
    log = daemon.logs / "mounts" / "reader.log"
    took = []
    for number in range(CHANGES):
        await _until_in(reactor, log, "first" if not number else f"version-{number - 1}")
        await deferLater(reactor, 0.37, lambda: None)  # each time at another point of the polling interval
        began = time.monotonic()
        _write(directory, f"version-{number}")
        await _until_in(reactor, log, f"version-{number}")
        took.append(time.monotonic() - began)
    await client.remove_pod(pod[1])
    return took


async def _until_in(reactor: IReactor, log: Path, text: str) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not log.exists() or f" F {text}\n" not in log.read_text():
        if time.monotonic() > until:
            raise AssertionError(f"no {text!r} in the container's log")
        await deferLater(reactor, 0.01, lambda: None)


def _write(directory: Path, value: str) -> None:
    """Write the ConfigMap's volume as kubelet does."""
    new = directory / f"..{time.time_ns()}"
    new.mkdir(parents=True)
    (new / "key").write_text(f"{value}\n")
    data, new_data = directory / "..data", directory / "..data_tmp"
    old = directory / os.readlink(data) if data.is_symlink() else None
    new_data.symlink_to(new.name)
    new_data.rename(data)
    if old is None:
        (directory / "key").symlink_to("..data/key")
    else:
        shutil.rmtree(old)
