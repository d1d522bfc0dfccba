# SPDX-License-Identifier: Apache-2.0
"""The placeholder among the node's block devices for a raw volume that kubelet has had published."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.volumes import published, published_devices
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.mounts import find_source
from infranetes.volumes.published import PublishedVolume
from infranetes.volumes.published_devices import BACKING_FILE
from infranetes_common.errors import AlreadyExists, FailedPrecondition, InvalidArgument, Unavailable
from infranetes_common.loop_devices import LoopDevice, loop_devices_of, open_loop_device
from infranetes_common.wire import cri
from tests.harness.needs import needs_mounts, needs_root
from tests.support.file_systems import mount_slave
from tests.support.loop_devices import end_loop_device, left_of


@needs_root
class DeviceCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.top = Path(os.path.realpath(self.mktemp()))
        self.top.mkdir(parents=True)
        self.target = self.top / "publish" / "pv" / "pod"
        # Those of this test alone: tests that run beside it publish volumes on the same machine.
        self.volume = PublishedVolume(f"raw-{secrets.token_hex(4)}", "", read_only=True)
        self.table = MountTable()
        self.addCleanup(self.table.close)
        self.addCleanup(self.end_all)

    def end_all(self) -> None:
        points = [os.fsdecode(one.mount_point) for one in self.table.mounts()]
        for point in reversed([one for one in points if one.startswith(f"{self.top}/")]):
            subprocess.run(["umount", "-l", point], check=True)
        for path in self.devices():
            end_loop_device(path)

    def devices(self) -> list[str]:
        """Return the loop devices that stand for this test's volume."""
        found = []
        for path in loop_devices_of(BACKING_FILE):
            # Devices of other tests running beside this one may disappear at any time.
            with contextlib.suppress(FileNotFoundError), open_loop_device(path) as device:
                if self.volume.volume.encode() in device.read(4096):
                    found.append(path)
        return found

    def read(self, path: Path) -> PublishedVolume | None:
        return published_devices.read(str(path))

    def publish(self, volume: PublishedVolume | None = None) -> None:
        published_devices.publish(str(self.target), volume or self.volume, self.table)

    def unpublish(self) -> None:
        published_devices.unpublish(str(self.target), self.table)

    def targets(self) -> list[str]:
        return published_devices.targets(self.volume.volume)

    def mounts_at(self, path: Path) -> int:
        return sum(one.mount_point == os.fsencode(path) for one in self.table.mounts())

    def assert_published(self) -> None:
        self.assertEqual(self.read(self.target), self.volume)
        self.assertEqual(self.targets(), [str(self.target)])
        self.assertEqual(self.mounts_at(self.target), 1)
        self.assertEqual(left_of(lambda: self.devices()[1:]), [])  # an earlier one may take a moment to go
        self.assertEqual(len(self.devices()), 1)

    def assert_nothing_is_left(self) -> None:
        self.assertEqual((left_of(self.devices), self.targets(), self.mounts_at(self.target)), ([], [], 0))
        self.assertFalse(os.path.lexists(self.target))


@needs_mounts
class PublishTests(DeviceCase):
    def test_kubelet_sees_a_block_device_that_tells_which_volume_it_stands_for(self) -> None:
        for _ in range(2):
            self.publish()
            self.assert_published()
        self.assertTrue(stat.S_ISBLK(self.target.stat().st_mode))
        for _ in range(2):
            self.unpublish()
            self.assert_nothing_is_left()
        self.publish()
        self.assert_published()

    def test_it_is_known_as_its_pods_by_kubelets_path(self) -> None:
        uid = f"uid-{secrets.token_hex(4)}"
        self.target = self.target.with_name(uid)
        self.publish()
        self.assertEqual(published_devices.for_pod(uid), [self.volume])
        self.assertEqual(published_devices.for_pod(uid[:-1]), [])
        self.unpublish()
        self.assertEqual(published_devices.for_pod(uid), [])

    def test_nothing_can_be_written_to_it_that_would_be_lost(self) -> None:
        self.publish()
        with self.assertRaises(OSError) as caught, self.target.open("r+b", buffering=0) as file:
            file.write(b"x")
        self.assertIn(caught.exception.errno, (errno.EPERM, errno.EACCES, errno.EROFS))

    def test_the_same_volume_in_another_way_is_refused_and_so_is_another_volume(self) -> None:
        self.publish()
        with self.assertRaises(AlreadyExists):
            self.publish(attrs.evolve(self.volume, read_only=False))
        with self.assertRaisesRegex(FailedPrecondition, "is published there, not other"):
            self.publish(PublishedVolume("other", ""))
        self.assert_published()

    def test_what_it_cannot_be_is_refused_and_leaves_nothing(self) -> None:
        raw = self.volume
        wrong = [attrs.evolve(raw, volume="../x"), attrs.evolve(raw, group=7)]
        wrong += [attrs.evolve(raw, mount_flags=("noatime",))]
        for volume in wrong:
            self.assertRaises(InvalidArgument, self.publish, volume)
        for target in ("", "relative", "/", "/a\0b", "/" + "x" * 5000):
            for call in (published_devices.unpublish, lambda path, table: self.at(path)):
                self.assertRaises(InvalidArgument, call, target, self.table)
        self.assertEqual(os.listdir(self.top), [])

    def at(self, target: str) -> None:
        published_devices.publish(target, self.volume, self.table)

    def test_at_another_path_it_is_published_too_and_at_the_first_as_before(self) -> None:
        self.publish()
        other = self.top / "publish" / "pv" / "other"
        published_devices.publish(str(other), self.volume, self.table)
        self.assertEqual(sorted(self.targets()), sorted([str(other), str(self.target)]))
        self.assertEqual(self.read(self.target), self.volume)
        published_devices.unpublish(str(other), self.table)
        self.assert_published()

    def test_no_descriptor_is_left(self) -> None:
        self.table.mounts()  # which stays open
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            self.publish()
            self.assertEqual(self.read(self.target), self.volume)
        self.unpublish()
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)

    def test_what_others_have_put_there_stays(self) -> None:
        self.target.parent.mkdir(parents=True)
        self.target.write_text("mine")
        self.assertRaisesRegex(FailedPrecondition, "which stays", self.publish)
        self.unpublish()
        self.assertEqual(self.target.read_text(), "mine")
        self.target.unlink()
        self.target.mkdir()
        self.assertRaisesRegex(FailedPrecondition, "is a directory", self.publish)
        self.unpublish()
        subprocess.run(["mount", "--bind", self.top, self.target], check=True)
        self.assertRaisesRegex(FailedPrecondition, "no raw volume", self.publish)
        self.unpublish()
        self.assertEqual(self.mounts_at(self.target), 1)
        self.assertEqual(self.devices(), [])

    def test_one_whose_mount_somebody_has_taken_away_can_be_published_again(self) -> None:
        self.publish()
        subprocess.run(["umount", self.target], check=True)
        self.assertEqual(self.targets(), [])
        self.publish()
        self.assert_published()
        subprocess.run(["umount", self.target], check=True)
        self.unpublish()
        self.assert_nothing_is_left()

    def test_a_node_without_loop_devices_is_told_what_to_do(self) -> None:
        def missing(*_: object) -> None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/dev/loop-control")

        self.patch(published_devices, "new_loop_device", missing)
        self.assertRaisesRegex(FailedPrecondition, "load the kernel's module `loop`", self.publish)

        def denied(*_: object) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted", "/dev/loop-control")

        self.patch(published_devices, "new_loop_device", denied)
        self.assertRaisesRegex(FailedPrecondition, "systemd-csi.conf", self.publish)

    def test_where_kubelet_would_not_see_it_it_is_refused(self) -> None:
        slave = Path(self.target).parent
        mount_slave(self.top / "shared", slave)
        self.assertRaisesRegex(FailedPrecondition, "kubelet", self.publish)
        self.assertEqual(os.listdir(slave), [])

    def test_a_node_whose_devices_can_not_be_read_says_so(self) -> None:
        def fails(*_: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        self.patch(published_devices, "loop_devices_of", fails)
        for look, what in ((published_devices.targets, "volume x"), (published_devices.for_pod, "pod x")):
            self.assertRaisesRegex(Unavailable, f"{what}: .*Input/output error", look, "x")


@needs_mounts
class KubeletTests(DeviceCase):
    """What kubelet 1.36 does with the device: MapBlockVolume and UnmapBlockVolume."""

    def setUp(self) -> None:
        super().setUp()
        self.bound = self.top / "dev" / "pod"
        self.link = self.top / "volumeDevices" / "pv"

    def map(self) -> str:
        """Map the device as kubelet does. Return the loop device with which kubelet locks it."""
        for directory in (self.bound.parent, self.link.parent):
            directory.mkdir()
        self.bound.touch()
        subprocess.run(["mount", "--bind", self.target, self.bound], check=True)
        self.link.symlink_to(self.target)
        subprocess.run(["losetup", "--find", self.bound], check=True)
        [lock] = loop_devices_of(str(self.bound))
        return lock

    def unmap(self, lock: str) -> None:
        subprocess.run(["losetup", "--detach", lock], check=True)
        self.link.unlink()
        subprocess.run(["umount", self.bound], check=True)

    def test_its_lock_is_not_in_the_way_and_its_links_are_followed(self) -> None:
        self.publish()
        lock = self.map()
        for path in (self.link, self.bound, self.target):
            self.assertEqual(self.read(path), self.volume)
        self.assertIsNone(self.read(Path(lock)), "what kubelet holds is no volume")
        self.publish()  # kubelet may repeat the call at any time
        self.assert_published()
        self.unmap(lock)
        self.unpublish()
        self.assert_nothing_is_left()
        self.assertEqual(loop_devices_of(str(self.bound)), [])

    def test_a_lock_that_kubelet_gives_up_late_leaves_nothing(self) -> None:
        self.publish()
        lock = self.map()
        self.unpublish()
        self.assertEqual((self.mounts_at(self.target), self.targets()), (0, []))
        self.unmap(lock)
        self.assert_nothing_is_left()


class ReadTests(DeviceCase):
    def test_what_is_no_raw_volume_is_none(self) -> None:
        (self.top / "file").touch()
        for path in (self.top, self.top / "file", self.top / "missing", Path("/dev/null")):
            self.assertIsNone(self.read(path))
        os.truncate(self.top / "file", 4096)
        other = subprocess.run(
            ["losetup", "--find", "--show", self.top / "file"], check=True, capture_output=True, text=True
        ).stdout.strip()
        self.addCleanup(subprocess.run, ["losetup", "--detach", other], check=True)
        self.assertIsNone(self.read(Path(other)))

    def test_a_loop_device_of_nothing_is_none_and_one_that_fails_is_an_error(self) -> None:
        self.patch(published_devices, "is_loop_device", lambda status: True)
        for number, fails in ((errno.ENXIO, False), (errno.ENOENT, False), (errno.EIO, True)):

            def opened(path: str, number: int = number) -> None:
                raise OSError(number, os.strerror(number))

            self.patch(published_devices, "open_loop_device", opened)
            if fails:
                self.assertRaisesRegex(FailedPrecondition, "can't be looked at", self.read, self.top)
            else:
                self.assertIsNone(self.read(self.top))

    @needs_mounts
    def test_one_that_does_not_say_what_it_stands_for_is_an_error_until_it_is_unpublished(self) -> None:
        whole = published.document

        def without(field: str) -> Callable[[PublishedVolume], dict[str, object]]:
            return lambda volume: {key: value for key, value in whole(volume).items() if key != field}

        for field in ("filesystem", "read_only"):
            self.patch(published_devices, "document", without(field))
            self.publish()
            with self.assertRaisesRegex(FailedPrecondition, "does not say which"):
                self.read(self.target)
            self.unpublish()
            self.assert_nothing_is_left()

    @needs_mounts
    def test_it_is_not_carried_into_a_vm(self) -> None:
        self.publish()
        with self.assertRaises(InvalidArgument):
            find_source(cri.Mount(host_path=str(self.target), container_path="/data"), self.table)
        self.assertIsNone(published.read(str(self.target), self.table))


@needs_mounts
class InterruptedTests(DeviceCase):
    """The daemon is killed after a step, or the next one fails: nothing leaks, and the next call does it."""

    PUBLISHING = ((published_devices, "open_path"), (published_devices, "bind"), (LoopDevice, "keep"))
    UNPUBLISHING = ((LoopDevice, "end"), (published_devices, "unmount"), (os, "unlink"))

    def killed(self, work: Callable[[], None], holder: object, name: str) -> None:
        """Do work in a process that is killed after it has made one call."""
        if not (child := os.fork()):
            step = getattr(holder, name)

            def last(*arguments: object, **more: object) -> None:
                step(*arguments, **more)
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(holder, name, last)
            self.table = MountTable()  # the inherited file, shared with the parent, reports a change once
            try:
                work()
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        self.assertEqual(os.waitstatus_to_exitcode(status), -signal.SIGKILL, f"{name} was not called")

    def failing(self, work: Callable[[], None], holder: object, name: str) -> None:
        def fails(*_: object, **__: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        patched = self.patch(holder, name, fails)
        self.assertRaises(Unavailable, work)
        patched.restore()

    def interrupted(self, work: Callable[[], None], steps: tuple[tuple[object, str], ...]) -> Iterator[None]:
        """Interrupt work after each of its steps, and fail it at each; yield each time."""
        for holder, name in steps:
            self.killed(work, holder, name)
            yield
            self.failing(work, holder, name)
            yield

    def test_publishing_goes_on_where_it_was(self) -> None:
        for _ in self.interrupted(self.publish, self.PUBLISHING):
            self.publish()
            self.assert_published()
            self.unpublish()
            self.assert_nothing_is_left()

    def test_what_publishing_has_left_is_unpublished(self) -> None:
        for _ in self.interrupted(self.publish, self.PUBLISHING):
            self.unpublish()
            self.assert_nothing_is_left()

    def test_unpublishing_goes_on_where_it_was(self) -> None:
        self.publish()
        for _ in self.interrupted(self.unpublish, self.UNPUBLISHING):
            self.unpublish()
            self.assert_nothing_is_left()
            self.publish()

    def test_what_unpublishing_has_left_is_published_again(self) -> None:
        self.publish()
        for _ in self.interrupted(self.unpublish, self.UNPUBLISHING):
            self.publish()
            self.assert_published()

    def test_a_device_that_has_become_somebody_elses_meanwhile_is_left_to_them(self) -> None:
        for work in (self.publish, self.unpublish):
            device = self.left_to_another_file()
            try:
                self.assertIsNone(self.read(self.target))
                self.assertEqual(self.targets(), [])
                work()
                self.assertIn(device, loop_devices_of(str(self.top / "file")))
            finally:
                subprocess.run(["losetup", "--detach", device], check=True)
        self.assert_nothing_is_left()

    def left_to_another_file(self) -> str:
        """Return the device of an interrupted publishing; by now, `file` has that device."""
        (self.top / "file").write_bytes(bytes(4096))
        for _ in range(20):  # another test may take the device first
            self.unpublish()
            self.killed(self.publish, published_devices, "bind")
            device = f"/dev/loop{os.minor(os.stat(self.target).st_rdev)}"
            if not subprocess.run(["losetup", device, self.top / "file"], check=False).returncode:
                return device
        raise AssertionError(f"{device} is always taken by another test")
