# SPDX-License-Identifier: Apache-2.0
"""The sources of mounts, and the records of volumes."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.volumes import mounts
from infranetes.volumes.mount_table import Location, MountTable
from infranetes.volumes.mounts import MAX_PATH, Source, find_source, for_agent, writable_submounts
from infranetes.volumes.records import VolumeRecord, VolumeRecords
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.filesync.manifest import FILE, SYMLINK, Entry
from infranetes_common.user_namespaces import IdRange, UserNamespace
from infranetes_common.wire import cri
from tests.harness.needs import needs_mounts


class MountCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.top = Path(os.path.realpath(self.mktemp()))
        self.top.mkdir()


EMPTY_DIR = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/cache"
SHARED, SLAVE = cri.PROPAGATION_BIDIRECTIONAL, cri.PROPAGATION_HOST_TO_CONTAINER


class CheckTests(SynchronousTestCase):
    """What can be mounted in a VM, and what is refused with the reason and the mount's name."""

    def mount(self, **fields: Any) -> cri.Mount:
        return cri.Mount(**{"container_path": "/data", "host_path": "/srv", **fields})

    def image(self, **fields: Any) -> cri.Mount:
        return self.mount(**{"host_path": "", "image": cri.ImageSpec(image="x"), **fields})

    def test_what_is_possible(self) -> None:
        mounts.check(
            (
                self.mount(),
                self.mount(host_path="/" + "x" * (MAX_PATH - 1)),
                self.mount(readonly=True, recursive_read_only=True),
                self.mount(host_path=EMPTY_DIR, propagation=SHARED),
                self.mount(host_path=EMPTY_DIR, propagation=SLAVE, readonly=True),
                self.image(),
                self.image(image_sub_path="a/..b/" + "x" * (MAX_PATH - 6)),
            )
        )

    def test_what_is_not(self) -> None:
        one = [cri.IDMapping(host_id=9, length=1)]
        for wrong, why in (
            (self.mount(container_path="data"), "container_path has to be an absolute path"),
            (self.mount(container_path="/data\0"), "container_path has to be an absolute path"),
            (self.mount(uidMappings=one), "gidMappings"),
            (self.mount(host_path="srv"), "host_path has to be an absolute path"),
            (self.mount(host_path="/srv\0"), "host_path has to be an absolute path"),
            (self.mount(host_path="/" + "x" * MAX_PATH), "host_path has to be an absolute path"),
            (self.mount(image_sub_path="a"), "image_sub_path is for mounts of images"),
            (self.mount(propagation=SHARED), "propagation BIDIRECTIONAL: the VM has a copy"),
            (self.mount(propagation=SLAVE), "propagation HOST_TO_CONTAINER: the VM has a copy"),
            (self.mount(recursive_read_only=True), "recursive_read_only needs readonly"),
            (
                self.mount(host_path=EMPTY_DIR, readonly=True, recursive_read_only=True, propagation=SLAVE),
                "recursive_read_only needs propagation PRIVATE",
            ),
            (self.image(image=cri.ImageSpec()), "image.image is empty"),
            (self.image(host_path="/srv"), "of an image or of a host_path, not of both"),
            (self.image(image_sub_path="/a"), "image_sub_path has to be a path within the image"),
            (self.image(image_sub_path="a/../b"), "image_sub_path has to be a path within the image"),
            (self.image(image_sub_path="a\0"), "image_sub_path has to be a path within the image"),
            (self.image(image_sub_path="x" * (MAX_PATH + 1)), "image_sub_path has to be a path within"),
            (self.image(propagation=SLAVE), "no mount can be made in an image"),
        ):
            error = self.assertRaises(InvalidArgument, mounts.check, [self.mount(), wrong])
            self.assertIn(why, str(error))
            source = wrong.image.image if wrong.HasField("image") else wrong.host_path[:256]
            self.assertIn(f"config.mounts[1] ({source} at {wrong.container_path})", str(error))

    def test_only_what_can_be_written_to_counts_by_its_path_without_detours(self) -> None:
        several = (self.mount(host_path="/srv/a/../b/"), self.mount(readonly=True), self.image())
        self.assertEqual(mounts.writable_paths(several), {"/srv/b"})


class FindTests(MountCase):
    def setUp(self) -> None:
        super().setUp()
        self.table = MountTable()
        self.addCleanup(self.table.close)

    def test_links_in_the_path_are_followed_and_what_is_missing_is_made(self) -> None:
        (self.top / "file").write_text("")
        (self.top / "link").symlink_to("file")
        found = find_source(cri.Mount(host_path=str(self.top / "link")), self.table)
        self.assertEqual((found.path, found.file), (str(self.top / "file"), True))
        made = find_source(cri.Mount(host_path=str(self.top / "a" / "b")), self.table)
        self.assertFalse(made.file)
        self.assertEqual((self.top / "a" / "b").stat().st_mode & 0o777, 0o755)

    def test_what_becomes_a_link_meanwhile_is_refused(self) -> None:
        (self.top / "link").symlink_to("/etc")
        self.patch(mounts, "resolve", lambda path, confined: path)
        wanted = cri.Mount(host_path=str(self.top / "link"))
        error = self.assertRaises(FailedPrecondition, find_source, wanted, self.table)
        self.assertIn("became a link", str(error))

    def test_sockets_devices_and_pipes_are_refused(self) -> None:
        os.mkfifo(self.top / "pipe")
        with socket.socket(socket.AF_UNIX) as listening:
            here = os.getcwd()
            os.chdir(self.top)
            self.addCleanup(os.chdir, here)
            listening.bind("socket")
            for path in ("/dev/null", str(self.top / "pipe"), str(self.top / "socket")):
                error = self.assertRaises(InvalidArgument, find_source, cri.Mount(host_path=path), self.table)
                self.assertIn(path, str(error))

    def test_the_nodes_kernel_is_not_copied(self) -> None:
        for path, fs_type in (
            ("/proc", "proc"),
            ("/proc/sys/kernel/ostype", "proc"),
            ("/sys/class", "sysfs"),
        ):
            error = self.assertRaises(InvalidArgument, find_source, cri.Mount(host_path=path), self.table)
            self.assertIn(f"{path} is of the node's kernel ({fs_type})", str(error))

    @needs_mounts
    def test_huge_pages_are_known_by_their_size(self) -> None:
        empty_dir = self.top / "pods" / "uid" / "volumes" / "kubernetes.io~empty-dir" / "pages"
        for options, limit in (("pagesize=2M", 0), ("pagesize=2M,size=8M", 8 << 20), ("pagesize=1Gi", 0)):
            empty_dir.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "-t", "hugetlbfs", "-o", options, "nodev", str(empty_dir)], check=True)
            self.addCleanup(subprocess.run, ["umount", "-l", str(empty_dir)])
            size = 1 << 30 if "Gi" in options else 2 << 20
            for path in (empty_dir, empty_dir / "part"):
                found = find_source(cri.Mount(host_path=str(path)), self.table)
                expected = (True, size, limit if path == empty_dir else 0)
                self.assertEqual((found.in_memory, found.huge_page_size, found.size_limit), expected)
        self.assertEqual(find_source(cri.Mount(host_path=str(self.top)), self.table).huge_page_size, 0)

    @needs_mounts
    def test_what_is_on_a_tmpfs_stays_in_memory(self) -> None:
        secret = self.top / "secret"
        secret.mkdir()
        self.assertFalse(find_source(cri.Mount(host_path=str(secret)), self.table).in_memory)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(secret)], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(secret)])
        self.assertTrue(find_source(cri.Mount(host_path=str(secret)), self.table).in_memory)

    @needs_mounts
    def test_an_empty_dir_in_memory_is_as_large_as_kubelet_made_it(self) -> None:
        kept = self.top / "pods" / "uid" / "volumes" / "kubernetes.io~empty-dir" / "cache"
        other = self.top / "cache"
        for directory in (kept, other):
            directory.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(directory)], check=True)
            self.addCleanup(subprocess.run, ["umount", "-l", str(directory)])
        (kept / "inner").mkdir()
        sizes = [
            find_source(cri.Mount(host_path=str(path)), self.table).size_limit
            for path in (kept, kept / "inner", other)
        ]
        self.assertEqual(sizes, [10 << 20, 0, 0])

    def test_kubelets_configuration_stays_in_memory_wherever_the_node_has_it(self) -> None:
        volumes = self.top / "pods" / "uid" / "volumes"
        for kind in ("configmap", "secret", "projected", "downward-api"):
            directory = volumes / f"kubernetes.io~{kind}" / "name"
            directory.mkdir(parents=True)
            (directory / "key").write_text("")
            for path in (directory, directory / "key"):
                self.assertTrue(find_source(cri.Mount(host_path=str(path)), self.table).in_memory, path)
        for other in ("kubernetes.io~empty-dir/name", "kubernetes.io~secretive/name", "kubernetes.io~secret"):
            self.assertFalse(
                find_source(cri.Mount(host_path=str(volumes / other)), self.table).in_memory, other
            )

    @needs_mounts
    def test_a_sub_path_of_a_configmap_too(self) -> None:
        """kubelet mounts it at a path that does not show that it is a ConfigMap's."""
        key = self.top / "pods" / "uid" / "volumes" / "kubernetes.io~configmap" / "name" / "key"
        at = self.top / "pods" / "uid" / "volume-subpaths" / "name" / "main" / "0"
        for path in (key, at):
            path.parent.mkdir(parents=True)
            path.write_text("")
        subprocess.run(["mount", "--bind", key, at], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(at)])
        self.assertTrue(find_source(cri.Mount(host_path=str(at)), self.table).in_memory)

    def test_what_is_mounted_below_a_read_only_mount_is_writable_unless_it_is_recursive(self) -> None:
        for name in ("a pipe", "disk", "locked", "one"):
            (self.top / name).mkdir() if name in ("disk", "locked") else (self.top / name).write_text("")
        (self.top / "a pipe").unlink()
        os.mkfifo(self.top / "a pipe")
        here = {
            b"": Location("8:1", b"/"),
            b"disk": Location("8:2", b"/"),
            b"disk/in": Location("8:3", b"/"),
            b"gone": Location("8:4", b"/"),
            b"locked": Location("8:5", b"/", writable=False),
            b"one": Location("8:6", b"/one"),
            b"a pipe": Location("8:7", b"/pipe"),
        }
        source = Source(str(self.top), False, False)
        mapping = [cri.IDMapping(host_id=9, length=1)]
        mount = cri.Mount(container_path="/mnt", host_path="/link/to/it", readonly=True, uidMappings=mapping)
        self.assertEqual(
            writable_submounts(mount, source, here),
            [
                cri.Mount(container_path=f"/mnt/{name}", host_path=str(self.top / name), uidMappings=mapping)
                for name in ("disk", "one")
            ],
        )
        mount.recursive_read_only = True
        self.assertEqual(writable_submounts(mount, source, here), [])
        self.assertEqual(writable_submounts(cri.Mount(container_path="/mnt"), source, here), [])

    def test_the_agent_is_told_volumes_in_place_of_paths(self) -> None:
        source = Source("/srv/x", False, False)
        ids: Any = {kind: [cri.IDMapping(host_id=9, length=1)] for kind in ("uidMappings", "gidMappings")}
        options: Any = {"readonly": True, "recursive_read_only": True, **ids}
        mount = cri.Mount(container_path="/x", host_path="/srv/link", **options)
        image = cri.Mount(container_path="/image", image=cri.ImageSpec(image="x"), **ids)
        config = cri.ContainerConfig(mounts=[image, mount])
        kept, sent = for_agent(config, {1: source.id}).mounts
        self.assertEqual(kept, image)
        self.assertEqual(sent.host_path, f"infranetes-volume:{source.id}")
        self.assertEqual((sent.readonly, sent.recursive_read_only), (True, False))
        self.assertEqual((list(sent.uidMappings), list(sent.gidMappings)), ([], []))
        self.assertEqual(config.mounts[1].host_path, "/srv/link")


class RecordTests(MountCase):
    def test_what_is_saved_is_loaded_until_it_is_forgotten(self) -> None:
        records = VolumeRecords(self.top / "volumes")
        base = {
            b"\xff": Entry(b"\xff", FILE, 0o600, 1, 2, 3, 2**62),
            b"l": Entry(b"l", SYMLINK, 0o777, 0, 0, target=b"\xfe"),
        }
        layout = {b"": Location("8:1", b"/srv/one"), b"a/\xff": Location("0:40", b"/\xfe")}
        one = VolumeRecord(Source("/srv/one", True, False), True, ("c1", "c2"), layout, base)
        users = UserNamespace(IdRange(1000, 65536), IdRange(2000, 7))
        two = VolumeRecord(Source("/srv/two", False, True), False, (), None, None, users)
        for record in (one, two, one):
            records.save("s1", record)
        records.save("s2", two)
        found = records.load()
        self.assertEqual({each.source.path: each for each in found["s1"]}, {"/srv/one": one, "/srv/two": two})
        records.delete("s1", two.source.id)
        records.keep_only(["s1"])
        self.assertEqual(records.load(), {"s1": [one]})
        records.forget("s1")
        self.assertEqual(records.load(), {})

    def test_an_unreadable_one_does_not_hold_up_the_others(self) -> None:
        records = VolumeRecords(self.top)
        good = VolumeRecord(Source("/srv/one", True, False), False, (), None, None)
        records.save("s1", good)
        for name, text in (("a", "{"), ("b", "[]"), ("c", '{"path": 1}')):
            (self.top / "s1" / f"{name}.json").write_text(text)
        self.assertEqual(records.load(), {"s1": [good]})
