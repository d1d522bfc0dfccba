# SPDX-License-Identifier: Apache-2.0
"""What a pod costs where nothing is emulated, beside containerd: each call, pod by pod in turn.

VMs of the simulated provider are namespaces here, in which the real agent, conmon and crun run. As on a
cloud, each VM is sent its image's layer by TLS. The agent's own start, which a cloud's VM adds to its boot,
is taken in turn with the pods. Python's modules are compiled beforehand, as in an installation.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from twisted.internet.threads import deferToThread

from bench.client import Client
from bench.containerd import containerd
from bench.daemon import ROOT, Daemon
from bench.figures import Missing, Report, percentile, say
from infranetes_common.identity import encode
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from infranetes_simulation.machine import guest
from tests.interop.critest_images import PAUSE
from tests.support import oci
from tests.support.registry import Registry
from tests.vmserver.pki import Authority
from vmserver.identity.delivery import save

PODS = 20
COMMANDS = 3  # in each pod
RUN, CREATE, START, EXEC = "RunPodSandbox", "CreateContainer", "StartContainer", "ExecSync"
CONTAINER = f"{CREATE} and {START}"
CONTAINERD = "containerd"
TARGETS: Mapping[str, float] = {RUN: 600.0}  # milliseconds, of the median
RATIOS: Mapping[str, float] = {CONTAINER: 1.0, EXEC: 1.0}  # times containerd's median
LISTENS, PROCESSOR = "the agent, from exec until it listens", "its processor time for that"
LISTENS_TARGET = 400.0  # milliseconds, of the median
COMMAND, TRUE = ("sleep", "100000"), ("true",)
SIMULATED: Mapping[str, object] = {
    "machines": "namespaces",
    "boot_seconds": 0.0,
    "jitter_seconds": 0.0,
    "pod_cidr": "10.217.0.0/24",
    "cgroup": "infranetes-bench",
}
#: As kubelet asks for most containers: with processes of their own, not shared with the pod's others.
_LINUX = cri.LinuxContainerConfig(
    security_context=cri.LinuxContainerSecurityContext(
        namespace_options=cri.NamespaceOption(pid=cri.CONTAINER)
    )
)
_BYTECODE = ROOT / "build" / "bench" / "bytecode"
_MODULES = (  # of the processes of a VM
    "twisted.scripts.twistd",
    "twisted.plugins.vmserver_plugin",
    "vmserver.__main__",
    "vmserver.service",
    "vmserver.containers.oci",
    "infranetes_simulation.machine.hypervisor",
)
_PORT = 2476  # the agent's; not that of VMs
_LONGEST_SECONDS = 60.0
Figures = defaultdict[str, list[float]]
"""Seconds by what took them."""


def prepare() -> None:
    """Compile the modules."""
    command = [sys.executable, "-c", f"import {', '.join(_MODULES)}"]
    subprocess.run(command, cwd=ROOT, env=_compiled(), check=True)


def _compiled() -> Mapping[str, str]:
    """Return an environment in which Python keeps what it has compiled, even if this process doesn't."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(_BYTECODE), "PYTHONPATH": str(ROOT)}


async def run(reactor: IReactor, report: Report) -> None:
    with Registry() as registry, tempfile.TemporaryDirectory(prefix="bench-logs-") as logs:
        registry.push(*PAUSE, oci.busybox({"Cmd": ["sleep", "2147483647"]}))
        image = registry.push("busybox", "1", oci.busybox())
        daemon = Daemon(reactor, "simulated", SIMULATED, registry.host, environment=_compiled())
        ours, theirs, unmeasured = (Figures(list) for _ in range(3))
        try:
            say("  starting the daemon, and containerd")
            await daemon.start()
            async with containerd(reactor, registry) as client:
                clients = ((daemon.client, daemon.logs, ours), (client, Path(logs), theirs))
                for each, directory, _ in clients:
                    await _pull(each, image)
                    await _pod(each, directory, "first", image, unmeasured)
                for number in range(PODS):
                    for each, directory, figures in clients:
                        await _pod(each, directory, f"pod-{number}", image, figures)
                    listens, processor = await deferToThread(_agent)
                    ours[LISTENS].append(listens)
                    ours[PROCESSOR].append(processor)
        finally:
            await daemon.close()
    _tell(report, ours, theirs)


def _tell(report: Report, ours: Figures, theirs: Figures) -> None:
    note = f"{PODS} pods of each in turn"
    for call in (RUN, CREATE, START, CONTAINER, EXEC):
        target = {50: TARGETS[call]} if call in TARGETS else None
        report.latencies("native", call, ours[call], (50, 95), target, note=note)
        report.latencies("native", call, theirs[call], (50, 95), note=note, whose=CONTAINERD)
        ratio = percentile(ours[call], 50) / percentile(theirs[call], 50)
        report.add("native", f"{call}, relative to {CONTAINERD}'s median", ratio, "x", RATIOS.get(call))
    report.latencies("native", LISTENS, ours[LISTENS], (50, 95), {50: LISTENS_TARGET})
    report.latencies("native", PROCESSOR, ours[PROCESSOR], (50, 95))


async def _pull(client: Client, image: str) -> None:
    request = cri.PullImageRequest(image=cri.ImageSpec(image=image))
    await client.images.PullImage(request, timeout=60.0)


async def _pod(client: Client, logs: Path, name: str, image: str, figures: Figures) -> None:
    """Run a pod of one container and commands in it. Add each call's seconds to `figures`."""
    await deferToThread((logs / name).mkdir, parents=True, exist_ok=True)
    ran, pod = await client.timed(partial(client.run_pod, name, logs))
    figures[RUN].append(ran)
    try:
        create = partial(client.create_container, pod, "main", image, COMMAND, linux=_LINUX)
        created, container = await client.timed(create)
        started, _ = await client.timed(partial(client.start_container, container))
        for call, seconds in ((CREATE, created), (START, started), (CONTAINER, created + started)):
            figures[call].append(seconds)
        for _ in range(COMMANDS):
            figures[EXEC].append(await client.exec_sync(container, TRUE))
    finally:
        await client.remove_pod(pod[1])


# ---- the agent alone


def _agent() -> tuple[float, float]:
    """Start an agent whose identity is there. Return the seconds until it listens, and of processor time."""
    with tempfile.TemporaryDirectory(prefix="bench-agent-") as path:
        directory = Path(path)
        (directory / "vmserver.toml").write_text(guest.CONFIGURATION.replace(str(guest.DISK), path))
        identity = Authority().identity("bench", listen=f"127.0.0.1:{_PORT}")
        save(directory / "identity", encode(identity).decode())
        agent = [*guest.PROGRAM, str(directory / "vmserver.toml"), "--run-dir", str(directory / "run")]
        command = ["unshare", "--mount", "--uts", "--", *agent]  # it mounts, and the mounts end with it
        with (directory / "log").open("wb") as log:
            begun = time.monotonic()
            process = subprocess.Popen(command, cwd=path, env=_compiled(), stdout=log, stderr=log)
        try:
            while not _listens():
                if process.poll() is not None or time.monotonic() - begun > _LONGEST_SECONDS:
                    raise Missing(f"the agent does not listen: {(directory / 'log').read_text()[-1500:]}")
                time.sleep(0.002)
            return time.monotonic() - begun, _processor(process.pid)
        finally:
            process.terminate()
            process.wait(_LONGEST_SECONDS)


def _listens() -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", _PORT)).close()
        return True
    return False


def _processor(pid: int) -> float:
    """Return the processor time of a process and of those that it has waited for (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
