# SPDX-License-Identifier: Apache-2.0
"""A pod from its creation until kubelet says that it is Ready: with Infranetes on QEMU, then with containerd.

Two clusters, one after the other, differ in kubelet's runtime alone; see docs/cluster.md. The image is the
Debian of 80 MiB. The first pod pulls it and is measured by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys

from twisted.internet.threads import deferToThread

from bench.conformance import NEEDS
from bench.figures import Missing, Report, say
from infranetes_common.reactors import IReactor
from tests.cluster import images
from tests.cluster.case import Cluster
from tests.cluster.components import PROGRAMS
from tests.cluster.paths import REGISTRY, ROOT

#: By the name of kubelet's runtime: where it has the images from.
RUNTIMES = {"infranetes": images.PREFIX, "containerd": images.DIRECT}
PODS = 5
SECONDS = 900.0
TARGET = 1.5
_NEEDS = {
    **NEEDS,
    str(PROGRAMS / "kubelet"): "make cluster-tools",
    str(ROOT / "build/tools/crictl"): "make tools",
}


def prepare() -> None:
    """Have the cluster's images."""
    if shutil.which("mmdebstrap") is None:
        raise Missing("the cluster's images are made with mmdebstrap: apt-get install mmdebstrap")
    images.make(REGISTRY, say)


async def run(reactor: IReactor, report: Report, pods: int = PODS) -> None:
    for program, how in _NEEDS.items():
        if shutil.which(program) is None:
            raise Missing(f"{program} is missing: {how}")
    flags = ("--image-dir", str(report.setup.guest()), "--accelerator", report.setup.accelerator)
    medians = {}
    for runtime in RUNTIMES:
        say(f"  a cluster with {runtime}")
        first, *others = await deferToThread(_thd_times, runtime, flags, pods + 1)
        medians[runtime] = statistics.median(others)
        report.add("ready", f"pod Ready by kubelet, pulling 80 MiB, {runtime}", first, "s", note="once")
        note = f"{pods} pods, one after the other; an image of 80 MiB"
        label = f"pod Ready by kubelet, {runtime}"
        report.latencies("ready", label, others, (50, 100), None, "s", note)
    ours, theirs = (medians[runtime] for runtime in RUNTIMES)
    report.add("ready", "pod Ready by kubelet, beside containerd", ours / theirs, "x", TARGET)


def _thd_times(runtime: str, flags: tuple[str, ...], count: int) -> list[float]:
    cluster = Cluster("bench", "--runtime", runtime, *flags)
    try:
        cluster.start().wait_until_ready()
        image = f"{RUNTIMES[runtime]}/{images.DEBIAN}"
        command = [str(cluster.paths.inside), sys.executable, "-m", "bench.kubelet_pods"]
        done = subprocess.run(
            [*command, str(cluster.paths.place), image, str(count)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=SECONDS,
        )
        if done.returncode:
            raise RuntimeError(f"pods with {runtime}: {done.stderr[-1500:]}")
        return [float(seconds) for seconds in json.loads(done.stdout)]
    finally:
        cluster.stop()
