# SPDX-License-Identifier: Apache-2.0
"""A specification's look-ups are confined to the machine and the container's root."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from tests.harness.needs import needs_root
from vmserver.containers.accounts import ProcessUser
from vmserver.containers.oci import devices
from vmserver.containers.oci.devices import find_devices
from vmserver.containers.oci.image import ImageDefaults
from vmserver.containers.oci.kernel import find_kernel
from vmserver.containers.oci.lookup import Source, look_up
from vmserver.containers.oci.rootfs_paths import make_directory, make_file, read_within

MOUNTINFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:20 / {private} rw - tmpfs tmpfs rw
31 22 0:21 / {slave} rw master:1 - tmpfs tmpfs rw
32 22 0:22 / {shared} rw shared:7 master:1 - tmpfs tmpfs rw
"""


class Case(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="found-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.rootfs = self.directory / "rootfs"
        (self.rootfs / "etc").mkdir(parents=True)

    def find(self, image: Any = None, mountinfo: Any = None, **fields: Any) -> Any:
        config = cri.ContainerConfig(**fields)
        options: Any = {"mountinfo": mountinfo} if mountinfo else {}
        return look_up(config, image or ImageDefaults(), self.rootfs, {}, {}, **options)

    def refused(self, word: str, work: Any, *arguments: Any, **fields: Any) -> None:
        with self.assertRaises(InvalidArgument) as caught:
            work(*arguments, **fields)
        self.assertIn(word, str(caught.exception))


class RootedTests(Case):
    def read(self, path: str) -> bytes:
        return read_within(self.rootfs, path, 100)

    def test_links_are_followed_within_the_root(self) -> None:
        outside = self.directory / "secret"
        outside.write_text("outside")
        (self.rootfs / "secret").write_text("inside")
        for name, target in {
            "absolute": "/secret", "upwards": "../../../../secret", "far": f"../../..{outside}",
            "to": "absolute",
        }.items():  # fmt: skip
            (self.rootfs / "etc" / name).symlink_to(target)
            self.assertEqual(self.read(f"/etc/{name}"), b"" if name == "far" else b"inside", name)
        (self.rootfs / "dir").symlink_to("etc")
        self.assertEqual(self.read("/dir/../dir/./to"), b"inside")

    @needs_root
    def test_what_is_no_file_is_as_good_as_absent(self) -> None:
        (self.rootfs / "etc" / "circle").symlink_to("circle")
        os.mkfifo(self.rootfs / "etc" / "fifo")
        os.mknod(self.rootfs / "etc" / "device", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        (self.rootfs / "file").touch()
        for path in ("/none", "/etc", "/etc/circle", "/etc/fifo", "/etc/device", "/file/x", "/", "/../.."):
            self.assertEqual(self.read(path), b"", path)

    def test_a_file_that_is_too_long_is_refused(self) -> None:
        (self.rootfs / "etc" / "passwd").write_text("x" * 101)
        self.refused("/etc/passwd has over 100 bytes", self.read, "/etc/passwd")
        (self.rootfs / "etc" / "passwd").write_text("x" * 100)
        self.assertEqual(self.read("/etc/passwd"), b"x" * 100)

    def test_one_that_can_not_be_read_is_refused(self) -> None:
        (self.rootfs / "etc" / "passwd").touch()

        def fails(*_: object, **__: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        self.patch(os, "fstat", fails)
        self.refused("/etc/passwd can't be read: Input/output error", self.read, "/etc/passwd")

    def test_many_links_or_steps_lead_to_nothing(self) -> None:
        (self.rootfs / "l0").write_text("there")
        for number in range(1, 42):
            (self.rootfs / f"l{number}").symlink_to(f"l{number - 1}")
        self.assertEqual((self.read("/l40"), self.read("/l41")), (b"there", b""))
        for path, content in (("etc/../" * 2047 + "../l0", b"there"), ("etc/../" * 2048 + "l0", b"")):
            self.assertEqual(self.read(path), content)

    def test_no_descriptor_is_left(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        (self.rootfs / "etc" / "l").symlink_to("../../x")
        (self.rootfs / "etc" / "up").symlink_to("/etc")
        for path in ("/etc/l", "/etc/none", "/etc/../etc/../..", "/etc", "/etc/up/up/../none"):
            self.read(path)
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)


class UserTests(Case):
    def test_the_user_is_looked_up_in_the_root(self) -> None:
        (self.rootfs / "etc" / "passwd").write_text("u:x:5:6::/home/u:/bin/sh\nx:x:8:8::relative:\n")
        (self.rootfs / "etc" / "group").write_text("g:x:7:u\n")
        self.assertEqual(self.find(ImageDefaults(user="u")).user, ProcessUser(5, 6, (7,), "/home/u"))
        self.assertEqual(self.find(ImageDefaults(user="u:g")).user, ProcessUser(5, 7, (7,), "/home/u"))
        self.assertEqual(self.find(ImageDefaults(user="x")).user, ProcessUser(8, 8, (), "/"))
        self.assertEqual(self.find().user, ProcessUser())
        self.refused("no user 'nobody'", self.find, ImageDefaults(user="nobody"))
        context = cri.LinuxContainerSecurityContext(run_as_user=cri.Int64Value(value=-1))
        linux = cri.LinuxContainerConfig(security_context=context)
        self.refused("run_as_user", self.find, linux=linux)


class SourceTests(Case):
    def test_sources_are_directories_or_files_of_the_vm(self) -> None:
        file = self.directory / "file"
        file.touch()
        mounts = [
            cri.Mount(container_path="/a", host_path=str(file)),
            cri.Mount(container_path="/b", host_path=str(self.directory)),
        ]
        found = self.find(mounts=mounts).mounts
        self.assertEqual(found, (Source(str(file), False), Source(str(self.directory), True)))
        for path in ("/no/such", "relative", "", "/a\0b"):
            self.refused(
                "config.mounts '/a'", self.find, mounts=[cri.Mount(container_path="/a", host_path=path)]
            )

    def test_propagation_needs_a_source_that_has_it(self) -> None:
        paths = {kind: self.directory / kind for kind in ("private", "slave", "shared")}
        for path in paths.values():
            (path / "sub").mkdir(parents=True)
        file = self.directory / "mountinfo"
        odd = (
            b"40 22 0:30 / /mnt/caf\xe9 rw - tmpfs tmpfs rw\n41 22 0:31 / /mnt/a\fb\rc rw - tmpfs tmpfs rw\n"
        )
        file.write_bytes(odd + MOUNTINFO.format(**paths).encode())
        kinds = {
            cri.PROPAGATION_PRIVATE: 3,
            cri.PROPAGATION_HOST_TO_CONTAINER: 2,
            cri.PROPAGATION_BIDIRECTIONAL: 1,
        }
        for kind, count in kinds.items():
            for index, path in enumerate(reversed(paths.values())):
                mount = cri.Mount(container_path="/a", host_path=str(path / "sub"), propagation=kind)
                if index < count:
                    self.assertEqual(len(self.find(mountinfo=file, mounts=[mount]).mounts), 1)
                else:
                    self.refused("private mount", self.find, mountinfo=file, mounts=[mount])

    def test_of_mounts_over_one_another_the_last_one_counts(self) -> None:
        (self.directory / "over").mkdir()
        lines = MOUNTINFO.splitlines()
        private, shared = (line.format(private=self.directory / "over") for line in lines[1:2] * 2)
        shared = shared.replace(" rw - ", " rw shared:9 - ")
        file = self.directory / "mountinfo"
        mount = cri.Mount(
            container_path="/a",
            host_path=str(self.directory / "over"),
            propagation=cri.PROPAGATION_BIDIRECTIONAL,
        )
        file.write_text("\n".join((lines[0], private, shared, "")))
        self.assertEqual(len(self.find(mountinfo=file, mounts=[mount]).mounts), 1)
        file.write_text("\n".join((lines[0], shared, private, "")))
        self.refused("private mount", self.find, mountinfo=file, mounts=[mount])


class TargetTests(Case):
    def targets(self, path: str) -> Any:
        mount = cri.Mount(container_path=path, host_path=str(self.directory))
        return dict(self.find(mounts=[mount]).targets)

    def test_a_link_to_nothing_gives_way_to_what_it_names(self) -> None:
        (self.rootfs / "run").symlink_to("/nowhere/../there")
        (self.rootfs / "etc" / "there").symlink_to("../etc")
        self.assertEqual(self.targets("/run/a/b"), {"/run/a/b": "/there/a/b"})
        self.assertEqual(self.targets("/etc/there/x"), {"/etc/there/x": "/etc/x"})
        (self.rootfs / "etc" / "beside").symlink_to("gone")
        self.assertEqual(self.targets("/etc/beside/x"), {"/etc/beside/x": "/etc/gone/x"})
        for path in ("/etc", "/etc/there", "/etc/x/y", "/new/x"):
            self.assertEqual(self.targets(path), {})

    def test_files_of_the_sandbox_and_volumes_have_targets_too(self) -> None:
        (self.rootfs / "etc" / "hosts").symlink_to("../../../run/hosts")
        (self.rootfs / "data").symlink_to("var/data")
        image = ImageDefaults(volumes=("/data",))
        file = self.directory / "file"
        file.touch()
        found = look_up(cri.ContainerConfig(), image, self.rootfs, {"/etc/hosts": file})
        self.assertEqual(dict(found.targets), {"/etc/hosts": "/run/hosts", "/data": "/var/data"})
        self.assertEqual((found.volumes, dict(found.files)), (("/data",), {"/etc/hosts": str(file)}))
        self.assertEqual(found.hostname, os.uname().nodename)

    def test_nothing_is_mounted_in_proc(self) -> None:
        (self.rootfs / "m").symlink_to("/proc/self/attr")
        for path in ("/m", "/m/exec", "/proc/self", "/proc/sys/kernel"):
            self.refused("/proc/", self.targets, path)
        (self.rootfs / "l").symlink_to("l")
        self.refused("too many links", self.targets, "/l")
        self.assertEqual(self.targets("/proc/cpuinfo"), {})
        self.assertEqual(self.targets("/proc"), {})


@needs_root
class MadeTests(Case):
    """What is made in the root for mounts."""

    def mode(self, path: str) -> str:
        return stat.filemode((self.rootfs / path).lstat().st_mode)

    def test_others_may_read_it_whatever_the_agents_umask_is(self) -> None:
        self.addCleanup(os.umask, os.umask(0o077))
        make_file(self.rootfs, "/new/file", 5, 6)
        self.assertEqual((self.mode("new"), self.mode("new/file")), ("drwxr-xr-x", "-rw-r--r--"))
        for path in ("new", "new/file"):
            found = (self.rootfs / path).stat()
            self.assertEqual((found.st_uid, found.st_gid), (5, 6))

    def test_what_is_there_stays_as_it_is(self) -> None:
        (self.rootfs / "etc").chmod(0o700)
        (self.rootfs / "etc" / "file").write_text("kept")
        (self.rootfs / "etc" / "file").chmod(0o600)
        make_file(self.rootfs, "/etc/file", 5, 6)
        self.assertEqual((self.mode("etc"), self.mode("etc/file")), ("drwx------", "-rw-------"))
        self.assertEqual((self.rootfs / "etc" / "file").read_text(), "kept")
        self.assertEqual(make_directory(self.rootfs, "/etc", 5, 6), self.rootfs / "etc")
        self.assertEqual((self.rootfs / "etc").stat().st_uid, 0)

    def test_a_file_takes_the_place_of_anything_but_a_file(self) -> None:
        (self.rootfs / "link").symlink_to("etc")
        (self.rootfs / "directory" / "full").mkdir(parents=True)
        os.mkfifo(self.rootfs / "fifo")
        for name in ("link", "directory", "fifo"):
            make_file(self.rootfs, f"/{name}", 0, 0)
            self.assertEqual((name, self.mode(name)), (name, "-rw-r--r--"))

    def test_where_a_file_is_on_the_way_nothing_is_made(self) -> None:
        (self.rootfs / "file").touch()
        for path in ("/file", "/file/below"):
            self.assertIsNone(make_directory(self.rootfs, path, 0, 0))
        make_file(self.rootfs, "/file/below/x", 0, 0)
        self.assertEqual(sorted(os.listdir(self.rootfs)), ["etc", "file"])

    def test_a_link_leads_to_where_it_is_made(self) -> None:
        (self.rootfs / "to").symlink_to("/../linked")
        made = make_directory(self.rootfs, "/to/new", 0, 0)
        self.assertEqual(made, self.rootfs / "linked" / "new")


class DeviceTests(Case):
    @needs_root
    def test_a_device_and_those_of_a_directory(self) -> None:
        for name in ("one", "two"):
            os.mknod(self.directory / name, stat.S_IFCHR | 0o640, os.makedev(10, 254))
        (self.directory / "link").symlink_to("one")
        device = cri.Device(
            host_path=str(self.directory / "link"), container_path="/dev//x", permissions="wr"
        )
        (node,) = find_devices([device], False)
        self.assertEqual(
            (node.path, node.block, node.major, node.minor, node.mode, node.access),
            ("/dev/x", False, 10, 254, 0o640, "rw"),
        )
        whole = find_devices([cri.Device(host_path=str(self.directory), container_path="/dev/d")], False)
        self.assertEqual([node.path for node in whole], ["/dev/d/one", "/dev/d/two"])

    def test_what_is_no_device_is_refused(self) -> None:
        for path in (str(self.rootfs), "/etc/passwd", "/no/such", "dev/null", "", "/dev/null\0"):
            self.refused("config.devices", find_devices, [cri.Device(host_path=path)], False)
        for field, value in (("permissions", "x"), ("container_path", "x"), ("container_path", "/")):
            device = cri.Device(host_path="/dev/null", **{field: value})
            self.refused("config.devices", find_devices, [device], False)

    @needs_root
    def test_as_many_as_are_allowed_and_no_more(self) -> None:
        for name in ("one", "two"):
            os.mknod(self.directory / name, stat.S_IFCHR | 0o640, os.makedev(10, 254))
        whole = [cri.Device(host_path=str(self.directory), container_path="/dev/d")]
        for name, limit, word in (("MAX_DEVICES", 2, "more than 1"), ("MAX_FILES", 4, "over 3 files")):
            self.patch(devices, name, limit)
            self.assertEqual(len(find_devices(whole, False)), 2)
            self.patch(devices, name, limit - 1)
            self.refused(word, find_devices, whole, False)
            self.patch(devices, name, 100)

    @needs_root
    def test_a_device_that_is_asked_for_by_two_paths_may_be_used_as_the_last_one_says(self) -> None:
        os.mknod(self.directory / "one", stat.S_IFBLK | 0o600, os.makedev(7, 250))
        twice = [
            cri.Device(host_path=str(self.directory / "one"), container_path="/dev/x", permissions=access)
            for access in ("r", "")
        ]
        (node,) = find_devices(twice, False)
        self.assertEqual((node.path, node.block, node.access), ("/dev/x", True, "rwm"))
        self.assertEqual(node.source, str(self.directory / "one"))

    def test_a_privileged_container_has_those_of_the_vm(self) -> None:
        paths = [node.path for node in find_devices([], True)]
        self.assertIn("/dev/null", paths)
        self.assertFalse([path for path in paths if path.startswith(("/dev/pts/", "/dev/shm/"))])


class MachineTests(Case):
    def file(self, path: str, text: str) -> None:
        file = self.directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def test_the_kernel_says_what_it_has(self) -> None:
        self.file("sys/fs/cgroup/cgroup.controllers", "cpu memory hugetlb\n")
        self.file("sys/kernel/mm/hugepages/hugepages-2048kB/x", "")
        self.file("sys/kernel/mm/hugepages/hugepages-1048576kB/x", "")
        self.file("sys/module/apparmor/parameters/enabled", "Y\n")
        self.file("proc/self/status", "Name:\tx\nCapBnd:\t0000000000000003\n")
        self.file("proc/sys/fs/nr_open", "1000\n")
        found = find_kernel(self.directory)
        self.assertEqual(found.hugepages, {"2MB", "1GB"})
        self.assertEqual(found.capabilities, {"CAP_CHOWN", "CAP_DAC_OVERRIDE"})
        self.assertEqual((found.cgroup2, found.apparmor), (True, True))
        self.assertEqual(found.rlimits["RLIMIT_NOFILE"], 1000)

    def test_a_kernel_that_says_nothing_has_nothing(self) -> None:
        found = find_kernel(self.directory)
        self.assertEqual((found.cgroup2, found.apparmor, found.hugepages), (False, False, frozenset()))
        self.assertEqual(found.capabilities, frozenset())

    def test_this_machine(self) -> None:
        found = find_kernel()
        self.assertIn("CAP_CHOWN", found.capabilities)
        self.assertEqual(found.architecture, os.uname().machine)
        self.assertTrue(os.uname().release.startswith("{}.{}".format(*found.release)), found.release)
        self.assertEqual(found.mqueue, os.path.ismount("/dev/mqueue"))

    def test_a_kernel_whose_release_is_no_number_is_older_than_any(self) -> None:
        self.patch(os, "uname", lambda: SimpleNamespace(machine="riscv64", release="next"))
        found = find_kernel(self.directory)
        self.assertEqual((found.release, found.architecture), ((0, 0), "riscv64"))

    def test_limits_are_those_that_this_process_may_set(self) -> None:
        most = resource.RLIM_INFINITY
        capable = "CapBnd:\t00000000ffffffff\n"
        for own, status, expected in (
            (5000, "", {"RLIMIT_NOFILE": 5000, "RLIMIT_NPROC": 5000, "RLIMIT_CORE": 5000}),
            (5000, capable, {"RLIMIT_NOFILE": 2**20, "RLIMIT_NPROC": 2**64 - 1, "RLIMIT_CORE": 2**64 - 1}),
            (most, "", {"RLIMIT_NOFILE": 2**20, "RLIMIT_NPROC": 2**64 - 1, "RLIMIT_CORE": 2**64 - 1}),
        ):
            self.patch(resource, "getrlimit", lambda kind, own=own: (1, own))
            self.file("proc/self/status", status)
            self.assertEqual(dict(find_kernel(self.directory).rlimits), expected)

    def test_huge_pages_are_limited_where_a_cgroup_can_do_it(self) -> None:
        self.file("sys/kernel/mm/hugepages/hugepages-2048kB/x", "")
        self.file("sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
        self.assertEqual(find_kernel(self.directory).hugepages, frozenset())
        shutil.rmtree(self.directory / "sys/fs")
        self.assertEqual(find_kernel(self.directory).hugepages, frozenset())
        self.file("sys/fs/cgroup/hugetlb/cgroup.procs", "")
        found = find_kernel(self.directory)
        self.assertEqual((found.hugepages, found.cgroup2), ({"2MB"}, False))

    def test_a_number_of_files_that_is_none_is_no_limit(self) -> None:
        self.file("proc/self/status", "CapBnd:\t00000000ffffffff\n")
        for text in ("", "many", "\N{SUPERSCRIPT TWO}", "-1"):
            self.file("proc/sys/fs/nr_open", text)
            self.assertEqual(find_kernel(self.directory).rlimits["RLIMIT_NOFILE"], 2**20)
