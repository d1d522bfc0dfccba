# SPDX-License-Identifier: Apache-2.0
"""The placeholder among the node's mounts for a volume that kubelet has had published."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.volumes import mount_table, published
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.mounts import find_source
from infranetes.volumes.published import (
    FILE,
    MAX_FLAG,
    MAX_FLAGS,
    MAX_GROUP,
    PublishedVolume,
    check,
    check_target,
    document,
    for_pod,
    publish,
    read,
    targets,
    unpublish,
    volume_of,
)
from infranetes.volumes.tmpfs import Tmpfs, bind, unmount
from infranetes_common.errors import AlreadyExists, FailedPrecondition, InvalidArgument, Unavailable
from infranetes_common.wire import cri
from tests.harness.needs import needs_mounts, needs_root
from tests.support.file_systems import mount_slave


@needs_root
class PublishedCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.top = Path(os.path.realpath(self.mktemp()))
        self.top.mkdir(parents=True)
        self.target = str(self.top / "pods" / "mount")
        # Those of this test alone: tests that run beside it publish volumes on the same machine.
        name = f"data-{secrets.token_hex(4)}"
        self.volume = PublishedVolume(name, "xfs", ("noatime", "discard"), read_only=True, group=2000)
        self.table = MountTable()
        self.addCleanup(self.table.close)
        self.addCleanup(self.unmount_all)

    def unmount_all(self) -> None:
        points = [os.fsdecode(one.mount_point) for one in self.table.mounts()]
        for point in reversed([one for one in points if one.startswith(f"{self.top}/")]):
            subprocess.run(["umount", "-l", point], check=True)

    def read(self, path: str | Path) -> PublishedVolume | None:
        return read(str(path), self.table)

    def publish(self, volume: PublishedVolume | None = None) -> None:
        publish(self.target, volume or self.volume, self.table)

    def unpublish(self) -> None:
        unpublish(self.target, self.table)

    def bind(self, source: str | Path, target: Path) -> None:
        target.mkdir()
        subprocess.run(["mount", "--bind", source, target], check=True)

    def mounts_at(self, path: str) -> int:
        return sum(one.mount_point == os.fsencode(path) for one in self.table.mounts())


@needs_mounts
class PublishTests(PublishedCase):
    def test_what_was_published_is_read_again_also_by_another_daemon(self) -> None:
        self.publish()
        self.assertEqual(self.read(self.target), self.volume)
        other = MountTable()
        self.addCleanup(other.close)
        self.assertEqual(read(self.target, other), self.volume)
        self.assertEqual(targets(self.volume.volume, other), [self.target])
        self.assertEqual(targets(self.volume.volume[:-1], other), [])

    def test_a_volume_of_which_nothing_special_was_asked(self) -> None:
        plain = PublishedVolume("vol/zone-a/0f3")
        self.publish(plain)
        self.assertEqual(self.read(self.target), plain)

    def test_publishing_twice_is_publishing_once(self) -> None:
        self.publish()
        self.publish()
        self.assertEqual(self.mounts_at(self.target), 1)

    def test_where_kubelet_would_not_see_it_it_is_refused(self) -> None:
        slave = Path(self.target).parent
        mount_slave(self.top / "shared", slave)
        self.assertRaisesRegex(FailedPrecondition, "kubelet", self.publish)
        self.assertEqual(os.listdir(slave), [])

    def test_a_node_that_can_not_mount_says_whether_it_may(self) -> None:
        for number, kind, words in (
            (errno.EPERM, FailedPrecondition, "systemd-csi.conf"),
            (errno.EIO, Unavailable, "can't be mounted: Input/output error"),
        ):

            def fails(*_: object, number: int = number) -> None:
                raise OSError(number, os.strerror(number))

            self.patch(published, "Tmpfs", fails)
            self.assertRaisesRegex(kind, words, self.publish)

    def test_nobody_but_root_sees_it_and_nothing_runs_from_it(self) -> None:
        self.publish()
        directory, file = os.stat(self.target), os.stat(f"{self.target}/{FILE}")
        self.assertEqual([stat.S_IMODE(one.st_mode) for one in (directory, file)], [0o700, 0o600])
        flags = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC
        found = os.statvfs(self.target)
        self.assertEqual(found.f_flag & flags, flags)

    def test_directories_can_be_made_in_it_and_nothing_written_that_would_be_lost(self) -> None:
        self.publish()
        (Path(self.target) / "sub" / "path").mkdir(parents=True)
        with self.assertRaises(OSError) as caught:
            (Path(self.target) / "sub" / "file").write_bytes(b"data")
        self.assertEqual(caught.exception.errno, errno.ENOSPC)
        self.assertEqual(self.read(self.target), self.volume)

    def test_no_descriptor_is_left(self) -> None:
        self.table.mounts()  # which stays open
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            self.publish()
            self.assertEqual(self.read(self.target), self.volume)
        self.unpublish()
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)

    def test_the_same_volume_in_another_way_is_refused_and_so_is_another_volume(self) -> None:
        self.publish()
        with self.assertRaises(AlreadyExists):
            self.publish(attrs.evolve(self.volume, read_only=False))
        with self.assertRaisesRegex(
            FailedPrecondition, f"{self.volume.volume} is published there, not other"
        ):
            self.publish(PublishedVolume("other"))
        self.assertEqual(self.read(self.target), self.volume)

    def test_what_it_cannot_be_is_refused_and_leaves_nothing(self) -> None:
        wrong = [PublishedVolume(id) for id in ("", "../x", "a/../b", "a//b", "a b", "é", "x" * 129, "a\n")]
        wrong += [PublishedVolume("a", filesystem="vfat"), PublishedVolume("a", group=2**32 - 1)]
        wrong += [
            PublishedVolume("a", mount_flags=flags) for flags in (("",), ("a,b",), ("a\n",), ("x",) * 33)
        ]
        for volume in wrong:
            with self.assertRaises(InvalidArgument):
                self.publish(volume)
        for target in ("", "relative", "/", "//", "/..", "/a\0b", "/" + "x" * 5000):
            with self.assertRaises(InvalidArgument):
                publish(target, self.volume, self.table)
            with self.assertRaises(InvalidArgument):
                unpublish(target, self.table)
        self.assertEqual(os.listdir(self.top), [])


class DocumentTests(SynchronousTestCase):
    """The placeholder may be anybody's by the time it is read: of another type a value is refused."""

    GOOD = document(PublishedVolume("a", "xfs", ("discard",), read_only=True, group=7))

    def test_what_was_written_is_read(self) -> None:
        for group in (7, 0, None):
            its = {**self.GOOD, "group": group}
            self.assertEqual(volume_of(its), PublishedVolume("a", "xfs", ("discard",), True, group))

    def test_each_value_has_its_type(self) -> None:
        wrong: dict[str, tuple[object, ...]] = {
            "volume": (7, None, ["a"]),
            "filesystem": (7, None),
            "read_only": (0, "no", None),
            "mount_flags": ("discard", None, {"discard": 1}, [7]),
            "group": ("7", True, 1.5),
        }
        for field, values in wrong.items():
            for value in values:
                self.assertRaises(ValueError, volume_of, {**self.GOOD, field: value})
            rest = {key: value for key, value in self.GOOD.items() if key != field}
            self.assertRaises(KeyError, volume_of, rest)


class BoundTests(SynchronousTestCase):
    """The least and the most that a volume may have, and what is just over it."""

    def test_of_a_description(self) -> None:
        plain = PublishedVolume("a", "xfs")
        good: list[dict[str, Any]] = [
            {"mount_flags": ("x",)},
            {"mount_flags": ("x" * MAX_FLAG,)},
            {"mount_flags": ("x",) * MAX_FLAGS},
            {"group": 0},
            {"group": MAX_GROUP},
            {"filesystem": ""},
        ]
        for changes in good:
            check(attrs.evolve(plain, **changes))
        bad: list[dict[str, Any]] = [
            {"mount_flags": ("",)},
            {"mount_flags": ("x" * (MAX_FLAG + 1),)},
            {"mount_flags": ("x",) * (MAX_FLAGS + 1)},
            {"group": -1},
            {"group": MAX_GROUP + 1},
            {"filesystem": "", "mount_flags": ("x",)},
            {"filesystem": "", "group": 0},
        ]
        for changes in bad:
            self.assertRaises(InvalidArgument, check, attrs.evolve(plain, **changes))

    def test_of_a_path(self) -> None:
        check_target("/" + "x" * 4094)
        self.assertRaises(InvalidArgument, check_target, "/" + "x" * 4095)


@needs_mounts
class UnpublishTests(PublishedCase):
    def test_it_takes_the_mount_and_the_directory_away_as_often_as_asked(self) -> None:
        self.publish()
        self.unpublish()
        self.assertFalse(os.path.exists(self.target))
        self.assertEqual(self.mounts_at(self.target), 0)
        self.unpublish()
        self.publish()
        self.assertEqual(self.read(self.target), self.volume)

    def test_while_somebody_is_in_it(self) -> None:
        self.publish()
        inside = os.open(self.target, os.O_RDONLY)
        try:
            self.unpublish()
        finally:
            os.close(inside)
        self.assertFalse(os.path.exists(self.target))

    def test_what_others_have_put_there_stays(self) -> None:
        os.makedirs(self.target)
        (Path(self.target) / "file").touch()
        with self.assertRaisesRegex(Exception, "not empty"):
            self.unpublish()
        self.assertEqual(os.listdir(self.target), ["file"])
        other = self.top / "other"
        self.bind(self.top, other)
        with self.assertRaisesRegex(FailedPrecondition, "not one of Infranetes' volumes"):
            unpublish(str(other), self.table)
        self.assertEqual(self.mounts_at(str(other)), 1)


@needs_mounts
class KernelTests(PublishedCase):
    """What the kernel refuses is an error with its number."""

    def refused(self, number: int, work: Callable[..., object], *args: object) -> None:
        error = self.assertRaises(OSError, work, *args)
        self.assertEqual(error.errno, number)

    def test_what_is_not_mounted_or_not_there(self) -> None:
        self.refused(errno.EINVAL, unmount, os.fsencode(self.top))
        self.refused(errno.ENOENT, unmount, os.fsencode(self.top / "missing"))
        self.refused(errno.EBADF, bind, -1, -1)
        with Tmpfs(b"x", 10) as files:
            self.refused(errno.EBADF, files.mount, -1)


@needs_mounts
class ReadTests(PublishedCase):
    def test_a_part_that_is_bound_is_known_with_its_path(self) -> None:
        self.publish()
        inner = Path(self.target) / "sub" / "with space"
        inner.mkdir(parents=True)
        self.bind(inner, self.top / "bound")
        self.assertEqual(self.read(self.top / "bound"), attrs.evolve(self.volume, below="sub/with space"))
        (inner / "more").mkdir()
        more = attrs.evolve(self.volume, below="sub/with space/more")
        self.assertEqual(self.read(self.top / "bound" / "more"), more)
        self.assertEqual(self.read(inner), attrs.evolve(self.volume, below="sub/with space"))
        self.assertEqual(targets(self.volume.volume, self.table), [self.target])

    def test_a_link_to_it_is_followed(self) -> None:
        self.publish()
        (self.top / "link").symlink_to(self.target)
        self.assertEqual(self.read(self.top / "link"), self.volume)

    def test_what_is_no_volume_is_none(self) -> None:
        self.assertIsNone(self.read(self.top))
        self.assertIsNone(self.read(self.top / "missing"))
        plain = self.top / "plain"
        plain.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "elsewhere:infranetes", plain], check=True)
        self.assertIsNone(self.read(plain))

    def test_one_whose_whole_is_hidden_or_damaged_is_an_error_and_not_a_directory_of_the_node(self) -> None:
        self.publish()
        (Path(self.target) / "sub").mkdir()
        self.bind(Path(self.target) / "sub", self.top / "bound")
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", self.target], check=True)
        with self.assertRaisesRegex(FailedPrecondition, f"volume {self.volume.volume} is published, but"):
            self.read(self.top / "bound")
        subprocess.run(["umount", self.target], check=True)
        file = Path(self.target) / FILE
        whole = file.read_text()
        wrong: list[str] = ["", "[]", "{}", whole[:-1], whole.replace(self.volume.volume, "other")]
        wrong += [json.dumps({**json.loads(whole), key: 1.5}) for key in json.loads(whole)]
        for content in wrong:
            file.write_text(content)
            with self.assertRaisesRegex(FailedPrecondition, self.volume.volume):
                self.read(self.target)
        file.unlink()
        with self.assertRaisesRegex(FailedPrecondition, self.volume.volume):
            self.read(self.target)
        file.write_text(whole)
        self.assertEqual(self.read(self.target), self.volume)


@needs_mounts
class StrangerTests(PublishedCase):
    """A mount of somebody else's, of a file system that has a source like ours.

    An NFS server may be called `infranetes`; what is mounted here is a ramfs, which takes any source, too."""

    def setUp(self) -> None:
        super().setUp()
        uid = secrets.token_hex(4)
        self.place = self.top / "pods" / uid / "volumes" / "kubernetes.io~nfs" / "data"
        self.place.mkdir(parents=True)
        source = f"infranetes:{self.volume.volume}"
        subprocess.run(["mount", "-t", "ramfs", source, self.place], check=True)
        (self.place / FILE).write_text(json.dumps(document(self.volume)))
        self.uid = uid

    def test_it_is_no_volume(self) -> None:
        self.assertIsNone(self.read(self.place))
        self.assertIsNone(self.read(self.place / FILE))
        self.assertEqual(targets(self.volume.volume, self.table), [])
        self.assertEqual(for_pod(self.uid, self.table), [])

    def test_it_is_not_unmounted(self) -> None:
        with self.assertRaisesRegex(FailedPrecondition, "a ramfs is mounted there"):
            unpublish(str(self.place), self.table)
        self.assertEqual((self.mounts_at(str(self.place)), os.listdir(self.place)), (1, [FILE]))

    def test_what_was_published_above_it_goes_alone(self) -> None:
        self.target = str(self.place)
        self.publish()
        self.assertEqual(self.read(self.place), self.volume)
        with self.assertRaisesRegex(FailedPrecondition, "a ramfs is mounted there"):
            self.unpublish()
        self.assertEqual((self.mounts_at(self.target), os.listdir(self.place)), (1, [FILE]))


@needs_mounts
class MountTests(PublishedCase):
    def test_what_only_stands_for_a_volume_is_not_carried_into_a_vm(self) -> None:
        self.publish()
        (Path(self.target) / "sub").mkdir()
        for path in (self.target, f"{self.target}/sub"):
            with self.assertRaisesRegex(FailedPrecondition, self.volume.volume):
                find_source(cri.Mount(host_path=path, container_path="/data"), self.table)


@needs_mounts
class TmpfsTests(PublishedCase):
    def test_one_that_was_not_mounted_leaves_nothing(self) -> None:
        source = f"unmounted:{secrets.token_hex(4)}".encode()
        with Tmpfs(source, 65536) as made:
            made.write("file", b"content")
        self.assertNotIn(source, [one.source for one in self.table.mounts()])
        with self.assertRaises(OSError):
            Tmpfs(b"a\0b", 65536)


@needs_mounts
class OfPodTests(PublishedCase):
    """kubelet's paths tell which volumes a pod has, before it has a container."""

    def publish_at(self, path: str, volume: PublishedVolume) -> str:
        target = str(self.top / "kubelet" / "pods" / path)
        publish(target, volume, self.table)
        return target

    def found(self, uid: str) -> list[PublishedVolume]:
        return for_pod(uid, self.table)

    def setUp(self) -> None:
        super().setUp()
        self.uid = f"{secrets.token_hex(4)}-7e1b"
        self.of_csi = f"{self.uid}/volumes/kubernetes.io~csi/pvc-1/mount"

    def test_those_that_csi_or_a_flexvolume_s_driver_published(self) -> None:
        self.publish_at(self.of_csi, self.volume)
        flex = PublishedVolume("a-flex", group=7)
        self.publish_at(f"{self.uid}/volumes/infranetes.io~volume/data", flex)
        self.assertEqual(self.found(self.uid), [flex, self.volume])

    def test_no_other_pod_s(self) -> None:
        self.publish_at(self.of_csi, self.volume)
        for uid in (self.uid[:-1], self.uid[1:], f"{self.uid}0", ".*", "", "x" * 5000):
            self.assertEqual(self.found(uid), [], uid)

    def test_a_volume_is_found_once_and_a_bound_part_of_it_is_none(self) -> None:
        target = self.publish_at(self.of_csi, self.volume)
        parts = self.top / "kubelet" / "pods" / self.uid / "volume-subpaths" / "pvc-1" / "main"
        parts.mkdir(parents=True)
        os.mkdir(f"{target}/part")
        self.bind(f"{target}/part", parts / "0")
        self.assertEqual(self.found(self.uid), [self.volume])
        unpublish(target, self.table)
        self.assertEqual(self.found(self.uid), [])

    def test_what_others_mount_there_is_no_volume(self) -> None:
        place = self.top / "kubelet" / "pods" / self.uid / "volumes" / "kubernetes.io~csi" / "other" / "mount"
        place.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "other", place], check=True)
        self.assertEqual(self.found(self.uid), [])

    def test_a_node_whose_mounts_can_not_be_read_says_so(self) -> None:
        self.patch(mount_table, "TABLE", "/no/such")
        for name, look, kind in (
            ("targets", targets, Unavailable),
            ("for_pod", for_pod, Unavailable),
            ("read", read, FailedPrecondition),
        ):
            table = MountTable()
            with self.assertRaises(kind, msg=name) as caught:
                look(self.uid, table)
            self.assertIn("No such file", str(caught.exception))

    def test_one_that_can_not_be_read_does_not_hide_the_others(self) -> None:
        broken = self.publish_at(f"{self.uid}/volumes/kubernetes.io~csi/pvc-0/mount", PublishedVolume("odd"))
        self.publish_at(self.of_csi, self.volume)
        hidden = Path(broken)
        subprocess.run(["mount", "-t", "tmpfs", "hiding", hidden], check=True)
        self.assertEqual(self.found(self.uid), [self.volume])
