# SPDX-License-Identifier: Apache-2.0
"""The throughput of a volume: fio in the pod's VM, and the same program on the node with the same file.

The volume is raw, so there is no file system in between, and both sides read and write the very same bytes;
neither uses its page cache. They take turns, so that other load of the machine affects both.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

from bench.client import Client
from bench.daemon import Daemon
from bench.figures import Missing, Report, say
from infranetes.volumes import published_devices
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.published import PublishedVolume
from infranetes_common.commands import Command
from infranetes_common.commands import run as run_program
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from tests.support import oci
from tests.support.registry import Registry

SIZE = 256 << 20
ROUNDS = 3
SECONDS = 5  # of each job, in each round
_LIMIT = 120.0
_VOLUME, _DEVICE = "fio", "/dev/volume"
_LIBRARIES = "usr/lib/fio"
# The loader is run as a program: an image of these tests has no executables other than those in bin/.
_IN_IMAGE = ("/usr/bin/ld.so", "--library-path", f"/{_LIBRARIES}", "/usr/bin/fio")


@attrs.frozen
class Job:
    """A job for fio. :ivar kind: its `rw`. :ivar more: further options."""

    name: str
    kind: str
    block: str
    depth: int = 16  # requests at a time
    more: tuple[str, ...] = ()

    def command(self, program: Sequence[str], file: str) -> list[str]:
        """Return the command line for a file or device."""
        return [
            *program,
            *("--name=bench", "--thread", "--output-format=json", "--time_based", "--direct=1"),
            *(f"--filename={file}", f"--size={SIZE}", f"--runtime={SECONDS}", f"--rw={self.kind}"),
            *(f"--bs={self.block}", "--ioengine=libaio", f"--iodepth={self.depth}", *self.more),
        ]

    def speed(self, output: str) -> float:
        """Return the requests per second that fio reports."""
        [done] = json.loads(output[output.index("{") :])["jobs"]
        return float(done["read" if "read" in self.kind else "write"]["iops"])


JOBS = (
    Job("sequential writes of 1 MiB", "write", "1M"),
    Job("sequential reads of 1 MiB", "read", "1M"),
    Job("random writes of 4 KiB", "randwrite", "4k"),
    Job("random reads of 4 KiB", "randread", "4k"),
    Job("random writes of 8 KiB, each flushed", "randwrite", "8k", 1, ("--fsync=1",)),
)

Side = Callable[[Job], Awaitable[float]]


async def run(reactor: IReactor, report: Report, rounds: int = ROUNDS) -> None:
    fio = shutil.which("fio")
    if fio is None:
        raise Missing("fio is not on this node: apt-get install fio")
    with Registry() as registry:
        image = registry.push("fio", "1", oci.image([oci.busybox_layer(), _layer(fio)], {}, compression=""))
        daemon = Daemon(reactor, "qemu", report.setup.qemu(), registry.host)
        try:
            say("  starting the daemon; the first time it makes the template")
            await daemon.start()
            report.accelerator = await daemon.accelerator()
            with _published(daemon) as (file, target):
                await _measure(reactor, daemon, report, image, file, target, rounds)
        finally:
            await daemon.close()


async def _measure(
    reactor: IReactor, daemon: Daemon, report: Report, image: str, file: Path, target: Path, rounds: int
) -> None:
    client = daemon.client
    pull = cri.PullImageRequest(image=cri.ImageSpec(image=image))
    await client.images.PullImage(pull, timeout=_LIMIT)
    pod = await client.run_pod("fio", daemon.logs, uid=_VOLUME)
    try:
        devices = [cri.Device(container_path=_DEVICE, host_path=str(target), permissions="rwm")]
        container = await client.run_container(pod, "main", image, ("/bin/sleep", "100000"), devices=devices)

        async def in_vm(job: Job) -> float:
            return job.speed(await _exec(client, container, job.command(_IN_IMAGE, _DEVICE)))

        async def on_node(job: Job) -> float:
            output = await run_program(reactor, Command(job.command(("fio",), str(file)), _LIMIT))
            if output.code:
                raise AssertionError(f"fio on the node: {output.message()}")
            return job.speed(output.stdout.decode())

        for job in JOBS:
            await _compare(job, in_vm, on_node, report, rounds)
    finally:
        await client.remove_pod(pod[1])


async def _compare(job: Job, in_vm: Side, on_node: Side, report: Report, rounds: int) -> None:
    turns = [(await in_vm(job), await on_node(job)) for _ in range(rounds)]
    note = f"medians of {rounds} turns of {SECONDS} s, {job.depth} requests at a time, {SIZE >> 20} MiB"
    for side, speeds in zip(("in the VM", "on the node"), zip(*turns, strict=True), strict=True):
        report.add("fio", job.name, statistics.median(speeds), "/s", note=note, whose=side, percent=50)
    ratio = statistics.median(there / here for there, here in turns)
    report.add("fio", f"{job.name}, VM to node", ratio, "x", note=note)


async def _exec(client: Client, container: str, command: Sequence[str]) -> str:
    request = cri.ExecSyncRequest(container_id=container, cmd=command, timeout=int(_LIMIT))
    response = await client.runtime.ExecSync(request, timeout=_LIMIT)
    if response.exit_code:
        raise AssertionError(f"fio in the VM: {response.stderr[-500:]!r}")
    return str(response.stdout.decode())


@contextmanager
def _published(daemon: Daemon) -> Iterator[tuple[Path, Path]]:
    """Yield a volume's file, all of it written, and the path where the volume is published raw for a pod."""
    directory = daemon.root / "state" / "qemu" / "volumes"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = directory / f"{_VOLUME}.raw"
    with file.open("wb") as new:
        for _ in range(SIZE >> 20):
            new.write(bytes(1 << 20))
        new.flush()
        os.fsync(new.fileno())
    target = daemon.root / f"kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/fio/{_VOLUME}"
    table = MountTable()
    try:
        published_devices.publish(str(target), PublishedVolume(_VOLUME, filesystem=""), table)
        yield file, target
    finally:
        published_devices.unpublish(str(target), table)
        table.close()


def _layer(fio: str) -> bytes:
    """Return a layer with the node's fio and the libraries that it needs."""
    listed = subprocess.run(["ldd", fio], capture_output=True, text=True, check=True).stdout
    paths = [Path(path) for path in re.findall(r"(/\S+) \(0x", listed)]
    [loader] = [path for path in paths if path.name.startswith("ld-linux")]
    files: dict[str, bytes | tuple[str, str]] = {"usr": ("dir", "755"), "usr/lib": ("dir", "755")}
    files |= {"usr/bin": ("dir", "755"), _LIBRARIES: ("dir", "755")}
    files |= {"usr/bin/fio": Path(fio).read_bytes(), "usr/bin/ld.so": loader.read_bytes()}
    files |= {f"{_LIBRARIES}/{path.name}": path.read_bytes() for path in paths if path != loader}
    return oci.layer(files)
