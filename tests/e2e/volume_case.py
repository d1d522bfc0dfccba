# SPDX-License-Identifier: Apache-2.0
"""What tests of volumes on real VMs share."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from infranetes.providers.qemu.program.process import pids_by_argument
from infranetes.volumes import published, published_devices
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.published import PublishedVolume
from infranetes_common.wire import cri
from tests.e2e.pod_case import PodCase
from tests.infranetes.daemon.case import reactor
from tests.support.empty_dirs import EmptyDirCase
from tests.support.file_systems import loop_device

GROUP = 4711
DISK_GROUP = 6  # Debian's `disk`
_OWNER = f"0 {DISK_GROUP} 660"
_TEXT = "kept by the disk itself"
_WRITE = (
    f"echo '{_TEXT}' | dd of=/dev/xvda bs=512 seek=8 conv=notrunc 2>/dev/null && "
    "echo lent | dd of=/dev/node bs=512 2>/dev/null && "
    "test -b /dev/xvda && echo written; exec sleep 1000"
)
_AS_USER = "if id -u | dd of=/dev/xvda bs=512 seek=16 conv=notrunc 2>/dev/null; then echo y; else echo n; fi"
_READ = (
    "stat -c '%u %g %a' /dev/xvda; "
    "dd if=/dev/xvda bs=512 skip=8 count=1 2>/dev/null | tr -d '\\000'; "
    "if echo lost | dd of=/dev/xvda bs=512 2>/dev/null; then echo written; else echo refused; fi; "
    "exec sleep 1000"
)
_EMPTY_DIR = 300  # MiB: more than a volume that is copied to the VM may have


class VolumesCase(PodCase):
    """A test case with a directory of volumes. :ivar volumes: that directory."""

    def setUp(self) -> None:
        super().setUp()
        self.volumes = self.make_volumes()
        self.config["providers"]["qemu"]["volumes_dir"] = str(self.volumes)
        self.table = MountTable()
        self.addCleanup(self.table.close)

    def make_volumes(self) -> Path:
        """Make the directory of volumes."""
        directory = self.root / "volumes"
        directory.mkdir(mode=0o700)
        return directory

    def make_volume(self, id: str, size: int) -> Path:
        """Make a sparse volume of `size` bytes, and return its file."""
        file = self.volumes / f"{id}.raw"
        file.touch(mode=0o600)
        os.truncate(file, size)
        return file


class VolumeCase(VolumesCase):
    """A test case with a volume, published as kubelet requests it.

    :ivar file: the volume. :ivar published: where it was published last.
    """

    size = 64 << 20
    filesystem = "ext4"

    def setUp(self) -> None:
        super().setUp()
        self.file = self.make_volume("pvc-1", self.size)

    def publish(self, pod: str, *, group: int | None = None) -> Path:
        """Publish the volume for a pod; return where."""
        target = self.root / f"kubelet/pods/{pod}/volumes/kubernetes.io~csi/data/mount"
        volume = PublishedVolume("pvc-1", self.filesystem, mount_flags=("noatime",), group=group)
        published.publish(str(target), volume, self.table)
        self.addCleanup(published.unpublish, str(target), self.table)
        self.published = target
        return target

    def mounting(self, source: Path, name: str, script: str, **fields: Any) -> cri.ContainerConfig:
        """Return a container that mounts the volume at /data."""
        mount = cri.Mount(container_path="/data", host_path=str(source))
        config: cri.ContainerConfig = self.box(name, script, mounts=[mount], **fields)
        return config

    def is_free(self) -> bool:
        """Return whether another VM could have the volume."""
        with self.file.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def qemu_of(self, sandbox: str) -> int:
        """Return the id of the QEMU process of the sandbox's VM."""
        [directory] = (self.root / "state" / "qemu" / "vms").glob("[!.]*")
        [pids] = pids_by_argument([f"guest=infranetes-{directory.name}"]).values()
        return pids[0]


class RawVolumeCase(VolumesCase):
    """A test case with a raw volume, published and locked as by kubelet, and a device of the node's.

    :ivar raw_file: the volume. :ivar node_disk: the device's content.
    """

    raw_size = 16 << 20

    def setUp(self) -> None:
        super().setUp()
        self.raw_file = self.make_volume("raw-1", self.raw_size)
        self.node_disk = self.root / "disk"
        self.node_disk.write_bytes(bytes(self.raw_size))
        self.node_device = loop_device(self, self.node_disk)
        self.config["providers"]["qemu"]["devices"] = [self.node_device]

    def publish_raw(self, pod: str, *, read_only: bool = False) -> Path:
        """Publish the raw volume for a pod, and hold kubelet's lock on it; return kubelet's link."""
        target = self.root / f"kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pv/{pod}"
        published_devices.publish(str(target), PublishedVolume("raw-1", "", read_only=read_only), self.table)
        link = self.root / f"kubelet/pods/{pod}/volumeDevices/kubernetes.io~csi/pv"
        link.parent.mkdir(parents=True)
        link.symlink_to(target)
        self.addCleanup(published_devices.unpublish, str(target), self.table)
        loop_device(self, target)
        return link

    def unpublish_raw(self, pod: str) -> None:
        """Free the raw volume for the next pod; kubelet's lock is released later."""
        target = self.root / f"kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pv/{pod}"
        published_devices.unpublish(str(target), self.table)

    def raw_volume(self, link: Path, permissions: str = "mrw") -> cri.Device:
        """Return the raw volume as a container's device."""
        return cri.Device(container_path="/dev/xvda", host_path=str(link), permissions=permissions)

    def lent_device(self) -> cri.Device:
        """Return the node's device as a container's device."""
        return cri.Device(container_path="/dev/node", host_path=self.node_device, permissions="rw")


def of_user(*groups: int) -> cri.LinuxContainerConfig:
    """Return the `linux` of a container that does not run as root, with these supplemental groups."""
    context = cri.LinuxContainerSecurityContext(supplemental_groups=groups)
    context.run_as_user.value = context.run_as_group.value = 1000
    return cri.LinuxContainerConfig(security_context=context)


class VolumeTroubleCase(VolumeCase):
    """A test case with pods that have the volume one after another."""

    stop_seconds = 30.0
    keep = "echo kept >/data/file; sync; exec sleep 1000"
    pods = 0

    async def having(self, pod: str, script: str = keep) -> tuple[str, str]:
        """Run a pod with the volume until its script has begun; return its sandbox and container."""
        sandbox = await self.run_pod("web", attempt=self.pods)
        self.pods += 1
        container = await self.run_container(sandbox, self.mounting(self.publish(pod), pod, script))
        return sandbox, container

    async def end(self, sandbox: str) -> None:
        """Stop the pod, which must not take long."""
        began = reactor.seconds()
        await self.stop_pod(sandbox)
        self.assertLess(reactor.seconds() - began, self.stop_seconds)
        await self.remove_pod(sandbox)

    async def has_written(self, container: str) -> None:
        """Wait until the script has written its file."""

        async def there() -> bool:
            return bool((await self.execute(container, "test", "-s", "/data/file")).exit_code == 0)

        until = reactor.seconds() + 60.0
        while not await there():
            self.assertLess(reactor.seconds(), until)
            await self.sleep(0.1)
        await self.execute(container, "sync")

    async def assert_kept(self) -> None:
        """Assert that the next pod sees what was written, and can write."""
        sandbox, container = await self.having("next", "exec sleep 1000")
        self.assertEqual((await self.execute(container, "cat", "/data/file")).stdout, b"kept\n")
        wrote = await self.execute(container, "sh", "-c", "echo more >/data/more && sync")
        self.assertEqual(wrote.exit_code, 0, wrote.stderr)
        await self.end(sandbox)


class VolumeKindsCase(VolumeCase, RawVolumeCase, EmptyDirCase):
    """A test case with volumes of all kinds: a file system, raw, a device of the node's, an emptyDir."""

    async def check_all_kinds(self) -> None:
        """Check what a pod sees of them, and what the next one sees of that, whose VM ends by itself."""
        await self.start()
        first = await self.check_one_directory(_EMPTY_DIR)
        script = f"echo kept >/data/file; sync; ls -ld /data; {_WRITE}"
        config = self.mounting(self.publish("first", group=GROUP), "writer", script)
        raw = self.raw_volume(self.publish_raw("first"))
        config.devices.extend([raw, self.lent_device()])
        await self.run_container(first, config)
        await self.until(lambda: self.lines("writer")[1:] == ["written"], "it is written", seconds=60.0)
        self.assertRegex(self.lines("writer")[0], rf"^drwxrws.* {GROUP} ")
        for name, groups, said in (("without", (), "n"), ("with", (DISK_GROUP,), "y")):
            user = self.box(name, _AS_USER, devices=[raw], linux=of_user(*groups))
            await self.in_state(await self.run_container(first, user), cri.CONTAINER_EXITED)
            self.assertEqual(self.lines(name), [said])
        self.assertFalse(self.is_free(), "no other VM gets it")
        await self.stop_pod(first)
        await self.remove_pod(first)
        self.assertTrue(self.is_free())
        self.assertLess(self.file.stat().st_blocks * 512, self.size / 2, "what is not written takes no room")
        content = self.raw_file.read_bytes()
        self.assertIn(_TEXT.encode(), content)
        self.assertEqual(content[16 * 512 :][:5], b"1000\n")
        self.assertLess(self.raw_file.stat().st_blocks * 512, self.raw_size / 2, "no file system was made")
        self.assertEqual(self.node_disk.read_bytes()[:4], b"lent")
        self.unpublish_raw("first")

        second = await self.run_own_pod(attempt=1)
        script = f"ls -A /cache/a; cat /data/file; {_READ}"
        reading = self.mounting(self.publish("second", group=GROUP), "reader", script)
        reading.mounts[0].readonly = True
        reading.mounts.append(self.mount())
        reading.devices.append(self.raw_volume(self.publish_raw("second", read_only=True)))
        await self.run_container(second, reading)
        await self.until(
            lambda: self.lines("reader") == ["kept", _OWNER, _TEXT, "refused"],
            "the second pod, which may only read, sees it, and an empty emptyDir",
            seconds=60.0,
        )
        self.assertFalse(self.is_free(), "no other VM gets it")
        # It reboots the VM, which ends it, but only after the container's start has been answered.
        privileged = cri.LinuxContainerConfig(
            security_context=cri.LinuxContainerSecurityContext(privileged=True)
        )
        reboot = "sleep 5; echo b >/proc/sysrq-trigger; exec sleep 1000"
        await self.run_container(second, self.box("reboot", reboot, linux=privileged))
        await self.until(self.is_free, "its VM has ended", seconds=60.0)
        self.assertNotIn(b"lost", self.raw_file.read_bytes())
