# SPDX-License-Identifier: Apache-2.0
"""The time from when QEMU is asked to attach a volume until the pod's VM has it mounted.

Each volume is used by two pods: it is blank for the first, which makes a file system on it. A volume that is
published before the pod is requested is attached while the pod's VM starts, so a container waits only for
the rest of the attachment, and for the mount. Of all figures, QEMU's processor time depends least on what
else the machine does; it is measured for CreateContainer as a whole, with a volume and without one.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import attrs

from bench.client import Pod
from bench.daemon import Daemon
from bench.figures import Report, say
from infranetes.providers.qemu.program.process import pids_by_argument
from infranetes.volumes import published
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.published import PublishedVolume
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from tests.support import oci
from tests.support.registry import Registry

VOLUMES = 3  # for each way
SIZE = 1 << 30
TARGET_SECONDS = 0.5  # of the medians
COMMAND = ("sleep", "100000")
_BLANK, _FORMATTED = "blank, ext4 is made", "ext4"
_TOOK = "volume {} is mounted in the VM of sandbox {}: ([0-9.]+) s"
_TICKS = os.sysconf("SC_CLK_TCK")


@attrs.frozen
class Taken:
    """What it took to attach one volume.

    :ivar waited: how many seconds its container waited for it.
    :ivar processor: how many seconds of processor time QEMU used while the container was created."""

    waited: float
    processor: float


async def run(reactor: IReactor, report: Report, volumes: int = VOLUMES) -> None:
    with Registry() as registry:
        image = registry.push("busybox", "1", oci.busybox())
        daemon = Daemon(reactor, "qemu", report.setup.qemu(), registry.host, [image])
        try:
            say("  starting the daemon; the first time it makes the template")
            await daemon.start()
            report.accelerator = await daemon.accelerator()
            pull = cri.PullImageRequest(image=cri.ImageSpec(image=image))
            await daemon.client.images.PullImage(pull, timeout=60.0)
            bench = _Bench(daemon, image)
            without = [await bench.without(number) for number in range(volumes)]
            report.add("attach", "QEMU's processor time without a volume", statistics.median(without), "s")
            for early in (False, True):
                await _measure(bench, report, volumes, early)
        finally:
            await daemon.close()


async def _measure(bench: _Bench, report: Report, volumes: int, early: bool) -> None:
    taken: dict[str, list[Taken]] = {_BLANK: [], _FORMATTED: []}
    for number in range(volumes):
        volume = bench.make(f"volume-{int(early)}-{number}")
        for content in taken:
            taken[content].append(await bench.mounted(volume, early))
    what = "attached with the launch: until it is mounted" if early else "attach to mounted"
    note = f"{volumes} volumes of {SIZE >> 30} GiB, one after the other"
    for content, each in taken.items():
        waited = [one.waited for one in each]
        report.latencies("attach", f"{what}, {content}", waited, (50, 100), {50: TARGET_SECONDS}, "s", note)
        used = statistics.median(one.processor for one in each)
        report.add("attach", f"{what}, {content}: QEMU's processor time", used, "s", note=note)


class _Bench:
    """Run pods with volumes, one pod at a time."""

    def __init__(self, daemon: Daemon, image: str) -> None:
        self._daemon = daemon
        self._image = image
        self._directory = daemon.root / "state" / "qemu" / "volumes"
        self._pods = 0

    def make(self, name: str) -> str:
        """Make a blank volume."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._directory / f"{name}.raw"
        file.touch(mode=0o600)
        os.truncate(file, SIZE)
        return name

    async def without(self, number: int) -> float:
        """Run a pod without a volume, and remove it. Return QEMU's processor time, as in `Taken`."""
        pod = await self._daemon.client.run_pod(f"without-{number}", self._daemon.logs)
        taken = await self._create(pod, [])
        await self._daemon.client.remove_pod(pod[1])
        return taken

    async def mounted(self, volume: str, early: bool) -> Taken:
        """Run a pod that mounts a volume, and remove it. Return what that took.

        :param early: whether the volume is published before the pod is requested."""
        client, uid = self._daemon.client, f"uid-{self._pods}"
        self._pods += 1
        target = self._daemon.root / f"kubelet/pods/{uid}/volumes/kubernetes.io~csi/data/mount"
        table = MountTable()
        publish = partial(published.publish, str(target), PublishedVolume(volume), table)
        try:
            if early:
                publish()
            pod: Pod = await client.run_pod(uid, self._daemon.logs, uid=uid)
            if not early:
                publish()
            processor = await self._create(pod, [target])
            await client.remove_pod(pod[1])
        finally:
            published.unpublish(str(target), table)
            table.close()
        [waited] = re.findall(_TOOK.format(volume, pod[1]), self._daemon.log)
        return Taken(float(waited), processor)

    async def _create(self, pod: Pod, targets: Sequence[Path]) -> float:
        """Create a container that mounts `targets`, and check that it can write to them."""
        client = self._daemon.client
        mounts = [cri.Mount(container_path="/data", host_path=str(target)) for target in targets]
        before = self._processor()
        container = await client.create_container(pod, "main", self._image, COMMAND, mounts=mounts)
        taken = self._processor() - before
        if targets:
            await client.start_container(container)
            await client.exec_sync(container, ["sh", "-c", "echo written >/data/file"])
        return taken

    def _processor(self) -> float:
        """Return the seconds of processor time that QEMU has used. There is only one VM."""
        [vm] = (self._daemon.root / "state" / "qemu" / "vms").glob("[!.]*")
        [pid] = pids_by_argument([f"guest=infranetes-{vm.name}"])[f"guest=infranetes-{vm.name}"]
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS  # utime and stime, see proc(5)
