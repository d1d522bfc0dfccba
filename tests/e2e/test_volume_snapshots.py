# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a volume that a real VM writes to have all flushed data, and an intact file system."""

from __future__ import annotations

import subprocess
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.threads import deferToThread

from infranetes.csi.config import CsiConfig
from infranetes.volumes import published
from infranetes.volumes.published import PublishedVolume
from infranetes_common.concurrency import Flight
from infranetes_common.wire import cri, csi
from tests.e2e.volume_case import VolumeCase
from tests.infranetes.csi.case import capability
from tests.infranetes.daemon.case import reactor
from txgrpc import Channel, GrpcError
from txgrpc.client import Stub

_FILLED = 96 << 20
# A record is acknowledged once it is flushed.
_WRITE = (
    "i=0; while i=$((i+1)); do printf '%08d\\n' $i >>/data/log && sync /data/log && echo $i || exit 1; done"
)


class VolumeSnapshotTests(VolumeCase):
    """Snapshots of a volume with so much data that copying it takes a while, by the driver's socket."""

    size = 256 << 20

    def setUp(self) -> None:
        super().setUp()
        self.config["csi"] = {"kubelet_dir": str(self.root / "kubelet")}
        self.fill()

    def fill(self) -> None:
        """Make a file system on the volume, with a large file."""
        subprocess.run(["mkfs.ext4", "-q", "-E", "lazy_itable_init=0", self.file], check=True)
        directory = self.root / "filled"
        directory.mkdir()
        subprocess.run(["mount", "-o", "loop", self.file, directory], check=True)
        try:
            with (directory / "large").open("wb") as large, open("/dev/urandom", "rb") as random:
                large.write(random.read(_FILLED))
        finally:
            subprocess.run(["umount", directory], check=True)

    def controller(self) -> Stub:
        channel = Channel(reactor, UNIXClientEndpoint(reactor, CsiConfig(str(self.root / "kubelet")).socket))
        self.addCleanup(channel.close)
        return channel.stub(csi.Controller)

    def take(self, controller: Stub, name: str) -> Deferred[csi.CreateSnapshotResponse]:
        request = csi.CreateSnapshotRequest(name=name, source_volume_id="pvc-1")
        taking: Deferred[csi.CreateSnapshotResponse] = controller.CreateSnapshot(request, timeout=120)
        return taking

    async def restore(self, controller: Stub, snapshot: str) -> None:
        request = csi.CreateVolumeRequest(name=f"from-{snapshot}")
        request.capacity_range.required_bytes = 2 * self.size
        request.volume_capabilities.append(capability())
        request.volume_content_source.snapshot.snapshot_id = snapshot
        await controller.CreateVolume(request, timeout=120)

    def acknowledged(self) -> int:
        """Count the records in the container's log, which lags behind the writes."""
        return len(self.lines("main"))

    async def records(self, container: str) -> int:
        """Count the records on the volume, including one that is just being written."""
        answer = await self.execute(container, "wc", "-l", "/data/log")
        self.assertEqual(answer.exit_code, 0, answer.stderr)
        return int(answer.stdout.split()[0]) + 1

    def snapshots(self) -> list[str]:
        return sorted(each.name for each in (self.file.parent / "snapshots").glob("*"))

    async def read_in_a_pod(self, *volumes: str) -> list[list[str]]:
        """Return the records on each volume, as seen by a VM that mounts it."""
        mounts = []
        for volume in volumes:
            target = self.root / f"kubelet/pods/second/volumes/kubernetes.io~csi/{volume}/mount"
            published.publish(str(target), PublishedVolume(volume, self.filesystem), self.table)
            self.addCleanup(published.unpublish, str(target), self.table)
            mounts.append(cri.Mount(container_path=f"/{volume}", host_path=str(target)))
        sandbox = await self.run_pod("web", attempt=1)
        reading = "; ".join(f"cat /{volume}/log; df -m /{volume} | tail -1" for volume in volumes)
        script = f"{reading}; exec sleep 1000"
        await self.run_container(sandbox, self.box("reader", script, attempt=1, mounts=mounts))
        end = f" /{volumes[-1]}"
        await self.until(lambda: end in "".join(self.lines("reader")), "it is read", seconds=60.0)
        found: list[list[str]] = [[]]
        for line in self.lines("reader"):
            if line.isdigit():
                found[-1].append(line)
            else:
                mib = int(line.split()[1])
                self.assertGreater(mib, 1.5 * self.size / (1 << 20), "it has grown with its disk")
                found.append([])
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)
        return found[:-1]

    async def test_it_has_what_was_acknowledged_and_the_next_daemon_ends_what_one_began(self) -> None:
        await self.start()
        first = await self.run_pod()
        container = await self.run_container(first, self.mounting(self.publish("first"), "main", _WRITE))
        await self.until(lambda: self.acknowledged() > 20, "records are written", seconds=60.0)

        before = self.acknowledged()
        controller = self.controller()
        await self.take(controller, "one")
        taken = await self.records(container)
        await self.restore(controller, "one")

        killed = Flight(self.take(controller, "two"))
        partial = self.file.parent / "snapshots" / "two.snapshot.partial" / "disk.raw"
        await self.until(lambda: partial.exists() and partial.stat().st_blocks, "it is being copied")
        await self.kill()
        await self.assertFailure(killed.join(), GrpcError)
        self.assertEqual(self.snapshots(), ["one.snapshot", "two.snapshot.partial"])
        await self.start()
        await self.until(lambda: self.snapshots() == ["one.snapshot"], "its rests are gone")
        await self.until(lambda: str(partial) not in self.open_files(first), "QEMU has ended it")
        count = self.acknowledged()
        await self.until(lambda: self.acknowledged() > count, "the pod goes on")
        again = self.acknowledged()
        controller = self.controller()
        await self.take(controller, "two")
        ended = await self.records(container)
        await self.restore(controller, "two")
        await self.stop_pod(first)
        await self.remove_pod(first)

        volumes = ("from-one", "from-two")
        found = await self.read_in_a_pod(*volumes)
        expected = zip(volumes, found, ((before, taken), (again, ended)), strict=True)
        for volume, records, (least, most) in expected:
            self.assertEqual(records, [f"{number:08d}" for number in range(1, len(records) + 1)])
            self.assertGreaterEqual(len(records), least)
            self.assertLessEqual(len(records), most, "nothing that was written after the answer")
            checked = await deferToThread(self.check, volume)
            self.assertEqual(checked.returncode, 0, checked.stdout)

    def check(self, volume: str) -> subprocess.CompletedProcess[bytes]:
        command = ["e2fsck", "-f", "-n", str(self.file.with_name(f"{volume}.raw"))]
        return subprocess.run(command, capture_output=True, check=False)

    def open_files(self, sandbox: str) -> list[str]:
        """Return the files that the QEMU of the sandbox's VM has open."""
        found = []
        for each in Path(f"/proc/{self.qemu_of(sandbox)}/fd").iterdir():
            try:
                found.append(str(each.readlink()).removesuffix(" (deleted)"))
            except FileNotFoundError:
                continue
        return found
