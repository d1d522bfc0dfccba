# SPDX-License-Identifier: Apache-2.0
"""Volumes of real VMs: all kinds of them from pod to pod, snapshots while a VM writes, and NFS.

A snapshot has all flushed data, and an intact file system. In the tests of NFS the server is real and the
node's own mounts are fake: its kernel may have no NFS, and the daemon only looks at the mount table, never at
the content of mounts. So it gets a table with lines as Linux writes them for the server's exports.

A pod whose image is the VM itself has volumes too: its units wait for them, also when the VM reboots by
itself. Normally a QEMU VM that reboots has ended. Here QEMU lets it reboot, as clouds do. A `run_dir` that
outlives a reboot stands for a cloud's user data, from which the agent gets its identity again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.csi.config import CsiConfig
from infranetes.guest import image as images
from infranetes.guest.image import GuestImage
from infranetes.machines.agent.client import AgentClient
from infranetes.providers.interface import Instance
from infranetes.providers.qemu.provider import QemuProvider
from infranetes.volumes import mount_table, published
from infranetes.volumes.published import PublishedVolume
from infranetes_common.concurrency import Flight, start
from infranetes_common.errors import InfranetesError
from infranetes_common.filesync.manifest import Bounds, Change, ordered
from infranetes_common.filesync.scan import read, scan
from infranetes_common.filesync.tree import Tree
from infranetes_common.filesync.wire import PREFIX
from infranetes_common.wire import cri, csi
from infranetes_common.wire.csi_rpcs import ControllerStub
from tests.e2e.pod_case import PodCase
from tests.e2e.qemu_case import IMAGES, QemuCase
from tests.e2e.volume_case import VolumeCase, VolumeKindsCase
from tests.harness.durations import slow
from tests.harness.needs import needs
from tests.infranetes.csi.case import capability
from tests.infranetes.daemon import case
from tests.infranetes.daemon.case import reactor
from tests.support.disk_space import copy
from tests.support.ganesha import GANESHA, NfsServer
from tests.support.nfs3 import Nfs3Server
from txgrpc import Channel, Code, GrpcError


@slow(60, "two emulated VMs have nine containers")
class VolumeKindTests(VolumeKindsCase):
    async def test_a_pod_has_all_kinds_of_volumes_and_the_next_one_what_it_wrote(self) -> None:
        await self.check_all_kinds()


_FILLED = 96 << 20
# A record is acknowledged once it is flushed.
_WRITE = (
    "i=0; while i=$((i+1)); do printf '%08d\\n' $i >>/data/log && sync /data/log && echo $i || exit 1; done"
)


@slow(100, "a volume is copied while an emulated VM writes to it")
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

    def controller(self) -> ControllerStub:
        channel = Channel(reactor, UNIXClientEndpoint(reactor, CsiConfig(str(self.root / "kubelet")).socket))
        self.addCleanup(channel.close)
        return ControllerStub(channel)

    def take(self, controller: ControllerStub, name: str) -> Deferred[csi.CreateSnapshotResponse]:
        request = csi.CreateSnapshotRequest(name=name, source_volume_id="pvc-1")
        return controller.CreateSnapshot(request, timeout=120)

    async def restore(self, controller: ControllerStub, snapshot: str) -> None:
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


_CLIENT = "/sys/fs/nfs/net/nfs_client/identifier"  # the name by which servers know the VM's kernel
_TIMES = "acregmin=1,acregmax=1,acdirmin=1,acdirmax=1"
_V4 = (
    f"rw,vers=4.2,rsize=262144,wsize=262144,namlen=255,{_TIMES},hard,proto=tcp,port=%d,timeo=600,retrans=2,"
    "sec=sys,clientaddr=%s,local_lock=none,addr=%s"
)
_V3 = (
    f"rw,vers=3,rsize=65536,wsize=65536,namlen=255,{_TIMES},hard,nolock,proto=tcp,port=%d,timeo=600,retrans=2,"
    "sec=sys,mountaddr=%s,mountvers=3,mountport=%d,mountproto=tcp,local_lock=all,addr=%s"
)
# Takes a lock on a file's first byte and keeps it, or reports that it is held by another.
_LOCK = r"""
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
int main(int count, char **words) {
    struct flock wanted = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    int file = open(words[1], O_RDWR | O_CREAT, 0666);
    if (file < 0 || fcntl(file, F_SETLK, &wanted) < 0) { perror("refused"); return 1; }
    puts("locked"); fflush(stdout);
    if (count > 2) pause();
    return 0;
}
"""
_BOUND = 60.0  # seconds within which calls are answered without the server, even if all is slow without KVM


@needs(GANESHA)
class NfsTests(PodCase):
    """Two pods with the same host name and the same volume."""

    def setUp(self) -> None:
        super().setUp()
        self.data, self.other, self.old = [self.root / name for name in ("data", "other", "old")]
        for directory in (self.data / "part", self.other, self.old):
            directory.mkdir(parents=True)
        self.server = NfsServer({"/data": self.data, "/other": self.other})
        self.addCleanup(self.server.end)
        self.old_server = Nfs3Server(self.old)
        self.addCleanup(self.old_server.end)
        table = self.root / "mountinfo"
        node = Path(mount_table.TABLE).read_bytes()
        self.root_mount = mount_table.mount_of(mount_table.parse(node), b"/").id
        self.numbers = count(100_000)
        lines = [self.mounted(pod, volume, at, own) for pod in ("web", "db") for volume, at, own in (
            ("/data", "volumes/kubernetes.io~nfs/data", "rw,relatime"),
            ("/data/part", "volume-subpaths/data/main/0", "rw,relatime"),
            ("/data", "volumes/kubernetes.io~csi/looked-at/mount", "ro,relatime"),
            ("/other", "volumes/kubernetes.io~csi/other/mount", "rw,relatime"),
            ("/none", "volumes/kubernetes.io~csi/none/mount", "rw,relatime"),
            ("/mount", "volumes/kubernetes.io~nfs/old", "rw,relatime"),
        )]  # fmt: skip
        table.write_bytes(node + "".join(lines).encode())
        program = (
            f"from infranetes.volumes import mount_table; mount_table.TABLE = {str(table)!r}; "
            "from twisted.scripts.twistd import run; run()"
        )
        self.patch(case, "_TWISTD", (sys.executable, "-c", program))

    def mounted(self, pod: str, export: str, at: str, own: str) -> str:
        """Return a line of the mount table."""
        number = next(self.numbers)
        device = "0:1000" if export.startswith("/data") else f"0:{number}"
        server = self.network.node
        kind, options = "nfs4", _V4 % (self.server.port, server, server)
        if export == "/mount":
            port = self.old_server.port
            kind, options = "nfs", _V3 % (port, server, port, server)
        path = f"{self.kubelet(pod)}/{at}"
        return f"{number} {self.root_mount} {device} / {path} {own} - {kind} {server}:{export} {options}\n"

    def kubelet(self, pod: str) -> Path:
        """Return kubelet's directory of a pod."""
        return self.root / "kubelet" / "pods" / f"uid-{pod}"

    def mounting(self, pod: str, name: str, script: str, **paths: str) -> cri.ContainerConfig:
        """Return a container that mounts parts of kubelet's directory, as /data and the like."""
        mounts = [
            cri.Mount(container_path=f"/{point}", host_path=f"{self.kubelet(pod)}/{path}")
            for point, path in paths.items()
        ]
        config: cri.ContainerConfig = self.box(name, script, mounts=mounts)
        return config

    def lines_of(self, pod: str, name: str = "main") -> list[str]:
        """Return the lines that a container wrote."""
        log = self.log_directory / pod / f"{name}.log"
        return [line.split(" ", 3)[3] for line in log.read_text().splitlines()] if log.exists() else []

    async def pods(self) -> tuple[str, str]:
        web, db = [await self.run_pod(name, hostname="same") for name in ("web", "db")]
        return web, db

    def make_locker(self) -> None:
        """Put the program on the server."""
        source = self.root / "lock.c"
        source.write_text(_LOCK)
        subprocess.run(["gcc", "-static", "-o", self.data / "lock", source], check=True)

    async def timed(self, code: Code, call: Awaitable[object]) -> str:
        begun = time.monotonic()
        said = await self.refused(code, call)
        self.assertLess(time.monotonic() - begun, _BOUND)
        return said

    async def test_pods_share_a_volume_and_end_though_its_server_is_gone(self) -> None:
        self.make_locker()
        os.chown(self.data / "part", 4711, 4711)
        await self.start()
        web, db = await self.pods()
        first = self.mounting(
            "web", "main",
            "echo of-web >/data/web; echo in-part >/part/file; echo by-v3 >/old/file; "
            "stat -c %u /part; touch /looked/x; "
            f"grep -c ' nfs4 .*acregmin=1' /proc/mounts; cat {_CLIENT}; /data/lock /data/locked keep",
            data="volumes/kubernetes.io~nfs/data", part="volume-subpaths/data/main/0",
            looked="volumes/kubernetes.io~csi/looked-at/mount", old="volumes/kubernetes.io~nfs/old",
        )  # fmt: skip
        main = await self.run_container(web, first)
        await self.until(lambda: "locked" in self.lines_of("web"), "the first pod has all", seconds=30.0)
        self.assertEqual((self.data / "web").read_text(), "of-web\n")
        self.assertEqual((self.data / "part" / "file").read_text(), "in-part\n")
        self.assertEqual((self.old / "file").read_text(), "by-v3\n")
        said = self.lines_of("web")
        self.assertEqual((said[0], said[2]), ("4711", "3"), said)
        of_web = said[3]
        self.assertIn("Read-only file system", said[1])

        second = self.mounting(
            "db", "main",
            f"cat /data/web; cat {_CLIENT}; /data/lock /data/locked; echo of-db >/data/db; "
            "while sleep 0.2; do echo more >>/data/log; done",
            data="volumes/kubernetes.io~nfs/data",
        )  # fmt: skip
        await self.run_container(db, second)
        await self.until(lambda: (self.data / "log").exists(), "the second pod writes", seconds=30.0)
        await self.until(lambda: len(self.lines_of("db")) > 2, "its log is on the node", seconds=30.0)
        said = self.lines_of("db")
        self.assertEqual(said[0], "of-web")
        self.assertRegex(of_web, "^[0-9a-f]{32}$")
        self.assertNotEqual(said[1], of_web, "the server takes them for two clients")
        self.assertIn("refused", said[2])
        self.assertEqual((await self.execute(main, "cat", "/data/db")).stdout, b"of-db\n")

        none = self.mounting("web", "none", "true", none="volumes/kubernetes.io~csi/none/mount")
        words = await self.timed(Code.FAILED_PRECONDITION, self.create(web, none))
        self.assertIn("exports no such directory", words)

        self.server.hang()
        volumes = {"again": "volumes/kubernetes.io~nfs/data", "new": "volumes/kubernetes.io~csi/other/mount"}
        refused = [
            start(
                self.timed(
                    Code.DEADLINE_EXCEEDED, self.create(db, self.mounting("db", name, "true", data=path))
                )
            )
            for name, path in volumes.items()
        ]
        for each in refused:
            self.assertIn("does not answer this VM", await each)
        begun = time.monotonic()
        await self.stop_pod(db)
        self.assertLess(time.monotonic() - begun, _BOUND)
        self.assertIn("may be missing on its NFS volumes", self.log)
        self.server.go_on()
        await self.stop_pod(web)
        await self.remove_pod(db)


_REBOOT_SECONDS = 400.0  # without KVM, on a machine that is busy with other work
_ID, _SECRET = "c" * 32, "5" * 32  # the ids of the container and of the secret's volume
_AGENT = 'provider = "machine"\nrun_dir = "/var/lib/vmserver/run"\n'
_UNIT = """\
[Unit]
Description=Note each boot on the volume
StartLimitIntervalSec=0

[Service]
ExecStartPre=mountpoint -q /data
ExecStart=sh -c 'cat /proc/sys/kernel/random/boot_id >>/data/boots && sync && exec sleep infinity'
Restart=on-failure
RestartSec=3

[Install]
WantedBy=multi-user.target
"""
_BOUNDS = Bounds(16, 4096)
_SECONDS = 120.0
_KERNEL = "root=/dev/vda rw console=ttyS0 quiet fsck.mode=skip net.ifnames=0 panic=-1 no_timer_check"


@contextmanager
def mounted(disk: Path, at: Path) -> Iterator[Path]:
    """Mount an image's file system at a path."""
    at.mkdir()
    subprocess.run(["mount", "-o", "loop", disk, at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True)


@slow(250, "its VMs are emulated where there is no KVM")
class VmImageVolumeTests(QemuCase, TestCase):
    def setUp(self) -> Any:
        begun = super().setUp()
        self.open_dir.chmod(0o755)
        image = self.machine_image()
        volumes = self.state_dir / "volumes"
        volumes.mkdir(mode=0o700)
        (volumes / "pvc-1.raw").touch(mode=0o600)
        os.truncate(volumes / "pvc-1.raw", 64 << 20)
        self.settings.update(
            image_dir=str(image.directory.parent),
            template_dir=str(self.open_dir / "templates"),
            volumes_dir=str(volumes),
            qemu=self.wrapper(
                'args=(); for each; do [ "$each" = -no-reboot ] || args+=("$each"); done; '
                'case "$*" in *defer*) args+=('
                f'-kernel {image.kernel} -initrd {image.initrd} -append "{_KERNEL}");; esac; '
                'set -- "${args[@]}"'
            ),
        )
        return begun

    def machine_image(self) -> GuestImage:
        """Return the guest image as a pod's own, whose agent's only container is the VM, which has a unit."""
        made = images.current(IMAGES)
        directory = self.open_dir / "images" / "machine"
        directory.parent.mkdir()
        copy(made.directory, directory)
        for each in (directory.parent, directory):
            each.chmod(0o755)
        image = attrs.evolve(made, directory=directory, key=secrets.token_hex(12), providers=("machine",))
        images.write(image)
        (directory.parent / images.CURRENT).symlink_to(directory.name)
        with mounted(image.disk, self.open_dir / "root") as root:
            (root / "etc/infranetes/vmserver.toml").write_text(_AGENT)
            (root / "etc/systemd/system/boots.service").write_text(_UNIT)
            wants = root / "etc/systemd/system/multi-user.target.wants"
            (wants / "boots.service").symlink_to("../boots.service")
        return image

    def client(self, instance: Instance) -> AgentClient:
        return AgentClient(instance.sandbox_id, self.channel(instance))

    async def machine(self, provider: QemuProvider) -> tuple[Instance, AgentClient]:
        """Launch a VM that is a running container, with the volume at /data, and a secret."""
        instance = await self.running(provider, self.spec())
        await self.agent_info(instance)
        client = self.client(instance)
        serial = await self.within(provider.volumes.attach(instance.id, "pvc-1", False))
        await client.mount_disk(serial, "ext4", ["noatime"])
        await self.bring_secret(client)
        mounts = [
            cri.Mount(container_path="/data", host_path=PREFIX + serial),
            cri.Mount(container_path="/secret", host_path=PREFIX + _SECRET, readonly=True),
        ]
        config = cri.ContainerConfig(mounts=mounts)
        await client.create(_ID, "sha256:" + "0" * 64, config, cri.PodSandboxConfig())
        await client.start(_ID)
        return instance, client

    async def bring_secret(self, client: AgentClient) -> None:
        """Put a secret into the VM's memory."""
        directory = self.open_dir / "secret"
        directory.mkdir(exist_ok=True)
        (directory / "key").write_text("hidden\n")
        tree = Tree(directory, file=False, setid=False)

        async def changes() -> AsyncIterator[Change]:
            for change in read(tree, ordered(scan(tree, _BOUNDS).values())):
                yield change

        await client.put_volume(_SECRET, file=False, in_memory=True, bounds=_BOUNDS, changes=changes())

    async def ran(self, client: AgentClient, *command: str) -> str:
        """Run a command in the VM, and return its output."""
        return (await client.exec_sync(_ID, command, 20, 30.0, 4096)).stdout.decode()

    async def lines(self, client: AgentClient, path: str, count: int, seconds: float = _SECONDS) -> list[str]:
        """Wait until a file in the VM has so many lines, and return them."""
        until = reactor.seconds() + seconds
        found: list[str] = []
        while len(found) < count:
            self.assertLess(reactor.seconds(), until, f"{path}: {found}")
            await self.sleep(1.0)
            with contextlib.suppress(InfranetesError):  # the VM may be rebooting
                found = (await self.ran(client, "cat", path)).split()
        self.assertEqual(len(found), count)
        return found

    async def test_its_units_have_them_after_a_reboot_too_and_the_next_pod_what_they_wrote(self) -> None:
        provider = await self.started()
        assert isinstance(provider, QemuProvider)
        instance, client = await self.machine(provider)
        first = await self.lines(client, "/data/boots", 1)
        self.assertEqual(await self.lines(client, "/secret/key", 1), ["hidden"])
        await self.ran(client, "systemctl", "--no-block", "reboot")
        second = await self.lines(client, "/data/boots", 2, _REBOOT_SECONDS)
        self.assertEqual(second[:1], first)
        self.assertNotEqual(*second)
        self.assertEqual(await self.ran(client, "ls", "/secret"), "", "it was in memory")
        await self.bring_secret(client)
        self.assertEqual(await self.lines(client, "/secret/key", 1), ["hidden"])
        self.assertEqual(await self.ran(client, "stat", "-f", "-c", "%T", "/secret"), "tmpfs\n")
        await self.within(provider.destroy(instance.id))

        _, client = await self.machine(provider)
        self.assertEqual((await self.lines(client, "/data/boots", 3))[:2], second)
