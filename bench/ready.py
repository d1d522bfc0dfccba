# SPDX-License-Identifier: Apache-2.0
"""The time from a pod's creation until kubelet reports it as Ready: VMs of QEMU beside containerd's pods.

The cluster's node runs both; see docs/mixed-node.md. They take turns, so that both meet the same load. After
that, many at once, and how much of the node's memory each of those VMs takes.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from twisted.internet.threads import deferToThread

from bench.conformance import NEEDS
from bench.figures import Missing, Report, say
from infranetes_common.reactors import IReactor
from tests.cluster import images
from tests.cluster.case import Cluster
from tests.cluster.components import MIXED
from tests.cluster.paths import PROGRAMS, REGISTRY, ROOT
from tests.support import process_memory

#: Whether a pod is a VM, by whose figures these are.
KINDS = {"": True, "containerd": False}
IMAGES = {"1 MiB": f"{images.PREFIX}/{images.BUSYBOX}", "80 MiB": f"{images.PREFIX}/{images.DEBIAN}"}
PODS = 20  # the fewest of which a p95 is not the longest
AT_ONCE = 30
IDLE_SECONDS = 20.0
TARGET = 3.0  # emulated
_NEEDS = {
    **NEEDS,
    str(PROGRAMS / "kubelet"): "make cluster-tools",
    str(ROOT / "build/tools/crictl"): "make tools",
}


def prepare() -> None:
    """Make the cluster's images."""
    if shutil.which("mmdebstrap") is None:
        raise Missing("the cluster's images are made with mmdebstrap: apt-get install mmdebstrap")
    images.make(REGISTRY, say)


async def run(reactor: IReactor, report: Report) -> None:
    for program, how in _NEEDS.items():
        if shutil.which(program) is None:
            raise Missing(f"{program} is missing: {how}")
    await deferToThread(_thd_run, report)


def _thd_run(report: Report) -> None:
    flags = ("--image-dir", str(report.setup.guest()), "--accelerator", report.setup.accelerator)
    cluster = Cluster("bench", "--runtime", MIXED, "--proxy", *flags)
    try:
        say("  starting the cluster; the first time it makes the template")
        cluster.start().wait_until_ready()
        _take_no_processors(cluster)
        with Pods(cluster) as pods:
            for size, image in IMAGES.items():
                _in_turn(pods, size, image, report)
            for kind, vm in KINDS.items():
                _at_once(pods, kind, vm, report)
    finally:
        cluster.stop()


def _take_no_processors(cluster: Cluster) -> None:
    """Let the scheduler place as many VMs on the node as its memory allows, however few processors it has."""
    overhead = json.dumps({"overhead": {"podFixed": {"cpu": "0"}}})
    done = cluster.kubectl("patch", "runtimeclass", "infranetes", "--type=merge", f"--patch={overhead}")
    if done.returncode:
        raise RuntimeError(f"the RuntimeClass can't be changed: {done.stderr.decode()}")


class Pods:
    """The pods of `bench.kubelet_pods`, which runs where the node is."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._program = subprocess.Popen(
            [cluster.paths.inside, sys.executable, "-m", "bench.kubelet_pods", cluster.paths.place],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def __enter__(self) -> Pods:
        return self

    def __exit__(self, *error: object) -> None:
        self._program.kill()
        self._program.communicate()

    def _ask(self, **wanted: object) -> list[float]:
        assert self._program.stdin is not None and self._program.stdout is not None
        print(json.dumps(wanted), file=self._program.stdin, flush=True)
        if not (answer := self._program.stdout.readline()):
            raise RuntimeError("pods of the cluster can't be run; see the end of what is printed above")
        return [float(seconds) for seconds in json.loads(answer)]

    def run(self, image: str, vm: bool, count: int = 1) -> list[float]:
        """Run `count` pods at once. Return the seconds until each was ready."""
        return self._ask(image=image, vm=vm, count=count)

    def remove(self) -> list[float]:
        """Remove the pods that were run last. Return the seconds until each was gone."""
        return self._ask()


def _in_turn(pods: Pods, size: str, image: str, report: Report) -> None:
    """Run one pod of each kind in turn. The first of each kind pulls the image and is measured by itself."""
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(1 + PODS):
        for kind, vm in KINDS.items():
            taken[kind] += pods.run(image, vm)
            pods.remove()
    medians = []
    for kind, (first, *others) in taken.items():
        name = f"pod Ready by kubelet, {size}"
        report.add("ready", f"{name}, the first", first, "s", note="once", whose=kind)
        note = f"{PODS} pods of each kind, in turn"
        report.latencies("ready", name, others, (50, 95, 100), None, "s", note, kind)
        medians.append(statistics.median(others))
    ours, theirs = medians
    report.add("ready", f"pod Ready by kubelet, {size}, beside containerd", ours / theirs, "x", TARGET)


def _at_once(pods: Pods, kind: str, vm: bool, report: Report) -> None:
    before = _available()
    taken = pods.run(IMAGES["80 MiB"], vm, AT_ONCE)
    label = f"{AT_ONCE} pods at once, 80 MiB:"
    report.latencies("ready", f"{label} Ready by kubelet", taken, (50, 95, 100), None, "s", "once", kind)
    if vm:
        _tell_idle(pods, before, report)
    gone = pods.remove()
    report.latencies("ready", f"{label} gone", gone, (50, 95, 100), None, "s", "once", kind)


def _tell_idle(pods: Pods, before: float, report: Report) -> None:
    """Report what the idle VMs take of the node, and how many of them it could hold."""
    state = pods.cluster.paths.place / "var-lib" / "infranetes"
    vms = process_memory.pids_of_vms(state)
    idle = f"{len(vms)} idle VM pods:"
    time.sleep(IDLE_SECONDS)  # after they have started
    begin = sum(map(_processor_seconds, vms))
    time.sleep(IDLE_SECONDS)
    busy = (sum(map(_processor_seconds, vms)) - begin) / IDLE_SECONDS / len(vms)
    report.add("ready", f"{idle} a processor of each", busy * 1000, "m")
    found = process_memory.of_vms(state)
    each = sum(process_memory.total(memory).proportional for memory in found) / len(found)
    report.add("ready", f"{idle} PSS of each", each, "MiB")
    taken = (before - _available()) / len(found)
    report.add("ready", f"{idle} what the node has less for each", taken, "MiB")
    report.add("ready", "as many fit into the node's memory", before / taken, "", note="reckoned")


def _processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # see proc(5): utime and stime


def _available() -> float:
    """Return the node's available memory, in MiB."""
    with open("/proc/meminfo") as lines:
        (kib,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kib) / 1024
