# SPDX-License-Identifier: Apache-2.0
"""The script of sh that a guest runs at each boot, run by this machine's sh in a directory."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.cloud_init.boot_script import boot_script
from infranetes.cloud_init.document import GuestDocument, GuestVolume
from infranetes.machines.agentless.access import GuestFile
from tests.infranetes.cloud_init.cases import HOST_KEY, NODE_KEY, PRIVATE, PUBLIC

OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKoHn0k7xkwrHjHoYkZMXiDzDvWcVXXkmQyR1tVYyK9D infranetes-node"


class GuestCase(SynchronousTestCase):
    """A directory in which the guest's paths are, and programs that say how they are called."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        for path in ("dev/disk/by-id", "sys/block", "root", "bin", "etc/ssh"):
            (self.root / path).mkdir(parents=True)
        self.calls = self.root / "calls"
        self.calls.touch()
        for name in ("mount", "mkfs.ext4", "sleep"):
            self.program(name, f'echo "{name} $*" >>{self.calls}')
        self.program("mountpoint", f'grep -q " on $2$" {self.calls}')
        self.program("restorecon", "exit 0")

    def program(self, name: str, text: str) -> None:
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def disk(self, name: str, content: bytes = b"data") -> None:
        (self.root / "dev/disk/by-id" / name).write_bytes(content)

    def boot(self, document: GuestDocument, files: dict[str, GuestFile] | None = None) -> str:
        """Run the script; return what it said."""
        script = boot_script(document, files or {})
        for path in ("/dev/disk", "/sys/", "/dev/zero", "/var/lib/", "/etc/", "/data", "/dev/xvd"):
            script = script.replace(path, path if path == "/dev/zero" else f"{self.root}{path}")
        script = script.replace('"/dev/${', f'"{self.root}/dev/${{').replace(
            "=/dev/${", f"={self.root}/dev/${{"
        )
        script = script.replace("[ -b ", "[ -e ").replace("home=~root", f"home={self.root}/root")
        done = subprocess.run(
            ["/bin/sh", "-eu"], input=script.encode(), env={"PATH": f"{self.root}/bin:/usr/bin:/bin"},
            capture_output=True, check=True,
        )  # fmt: skip
        return done.stderr.decode()

    def called(self) -> list[str]:
        return self.calls.read_text().replace(str(self.root), "").splitlines()


class VolumeTests(GuestCase):
    def test_a_disk_is_found_by_what_udev_calls_it_on_each_bus(self) -> None:
        for name in (
            "virtio-v1", "scsi-0QEMU_QEMU_HARDDISK_v1", "ata-QEMU_HARDDISK_v1", "nvme-QEMU_NVMe_Ctrl_v1",
        ):  # fmt: skip
            self.setUp()
            self.disk(name.replace("v1", "other-of-v10"))
            self.disk(name)
            self.disk(f"{name}-part1")
            self.assertEqual(self.boot(GuestDocument("s1", volumes=(GuestVolume("v1", "/data"),))), "")
            self.assertEqual(self.called(), [f"mount -t ext4 -o rw /dev/disk/by-id/{name} /data"])

    def test_without_udev_it_is_found_by_what_the_kernel_says(self) -> None:
        for name, file, content in (
            ("vda", "serial", b"v1"),
            ("nvme0n1", "device/serial", b"v1                  \n"),
            ("sda", "device/vpd_pg80", b"\0\x80\0\x02v1"),
            ("sdb", "device/vpd_pg80", b"\0\x80\0\x14v1" + b" " * 18),
        ):
            self.setUp()
            path = self.root / "sys/block" / name / file
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
            (self.root / "dev" / name).touch()
            self.boot(GuestDocument("s1", volumes=(GuestVolume("v1", "/data", read_only=True),)))
            self.assertEqual(self.called(), [f"mount -t ext4 -o ro /dev/{name} /data"])

    def test_a_disk_that_comes_late_is_waited_for(self) -> None:
        self.program("sleep", f"echo zz >{self.root}/dev/disk/by-id/virtio-v1")
        self.boot(GuestDocument("s1", volumes=(GuestVolume("v1", "/data"),)))
        self.assertEqual(len(self.called()), 1)

    def test_one_that_never_comes_is_told_and_does_not_keep_the_others(self) -> None:
        self.disk("virtio-v2")
        volumes = (GuestVolume("v1", "/data/a"), GuestVolume("v2", "/data/b"), GuestVolume("v3", "/data/c"))
        said = self.boot(GuestDocument("s1", volumes=volumes))
        self.assertIn("no disk has the serial number v1 after 60 seconds", said)
        self.assertIn("serial number v3", said)
        self.assertEqual(
            [each for each in self.called() if "mount" in each],
            ["mount -t ext4 -o rw /dev/disk/by-id/virtio-v2 /data/b"],
        )
        self.assertEqual(self.called().count("sleep 1"), 60, "for all of them together")

    def test_a_file_system_is_made_where_all_is_zeros_and_nowhere_else(self) -> None:
        blank, late = bytes(5 << 20), bytes((4 << 20) - 1) + b"x"
        for content, read_only, fs_type, made in (
            (blank, False, "ext4", True),
            (late, False, "ext4", False),
            (blank, True, "ext4", False),
            (blank, False, "", False),
            (b"", False, "ext4", False),
        ):
            self.setUp()
            self.disk("virtio-v1", content)
            volume = GuestVolume("v1", "/data", fs_type=fs_type, read_only=read_only)
            self.boot(GuestDocument("s1", volumes=(volume,)))
            self.assertEqual(any(each.startswith("mkfs") for each in self.called()), made)

    def test_its_mount_has_its_options(self) -> None:
        self.disk("virtio-v1", bytes(5 << 20))
        volumes = (GuestVolume("v1", "/data", options=("noatime", "nodev")),)
        self.boot(GuestDocument("s1", volumes=volumes))
        made, mounted = self.called()
        self.assertEqual(made, "mkfs.ext4 /dev/disk/by-id/virtio-v1")
        self.assertEqual(mounted, "mount -t ext4 -o rw,noatime,nodev /dev/disk/by-id/virtio-v1 /data")

    def test_one_without_a_path_is_left_to_the_guest(self) -> None:
        self.assertEqual(
            boot_script(GuestDocument("s1", volumes=(GuestVolume("v1", "", block=True),)), {}), ""
        )

    def test_it_may_run_again(self) -> None:
        self.disk("virtio-v1")
        self.program("mountpoint", "exit 0")
        self.boot(GuestDocument("s1", volumes=(GuestVolume("v1", "/data"),)))
        self.assertEqual(self.called(), [])

    def test_what_is_mounted_below_another_comes_after_it(self) -> None:
        self.disk("virtio-v1")
        self.disk("virtio-v2")
        self.boot(GuestDocument("s1", volumes=(GuestVolume("v1", "/data/x"), GuestVolume("v2", "/data"))))
        self.assertEqual([each.split()[-1] for each in self.called()], ["/data", "/data/x"])

    def test_a_raw_volume_has_its_name_in_dev(self) -> None:
        self.disk("virtio-v1")
        for _ in range(2):
            self.boot(GuestDocument("s1", volumes=(GuestVolume("v1", "/dev/xvdx", block=True),)))
        self.assertEqual((self.root / "dev/xvdx").readlink(), self.root / "dev/disk/by-id/virtio-v1")

    def test_paths_are_words_whatever_is_in_them(self) -> None:
        self.disk("virtio-v1")
        path = "/data/it's $(touch /tmp/x) `x`"
        self.boot(GuestDocument("s1", volumes=(GuestVolume("v1", path),)))
        self.assertEqual(self.called(), [f"mount -t ext4 -o rw /dev/disk/by-id/virtio-v1 {path}"])


class KeyTests(GuestCase):
    def keys(self) -> list[str]:
        return (self.root / "root/.ssh/authorized_keys").read_text().splitlines()

    def test_the_nodes_key_is_roots_beside_those_that_are_there_and_instead_of_an_earlier_pods(self) -> None:
        (self.root / "root/.ssh").mkdir()
        (self.root / "root/.ssh/authorized_keys").write_text(f"mine\n{OTHER_KEY}\n")
        expected = ["mine", " ".join([*NODE_KEY.split()[:2], "infranetes-node"])]
        for _ in range(2):
            self.assertEqual(self.boot(GuestDocument("s1", node_key=NODE_KEY)), "")
            self.assertEqual(self.keys(), expected)

    def test_only_root_reads_it(self) -> None:
        self.boot(GuestDocument("s1", node_key=NODE_KEY))
        modes = [
            stat.S_IMODE((self.root / "root" / each).stat().st_mode)
            for each in (".ssh", ".ssh/authorized_keys")
        ]
        self.assertEqual(modes, [0o700, 0o600])


class KeptRootTests(GuestCase):
    def document(self, pod: str) -> GuestDocument:
        return GuestDocument(pod, instance_id="root-7", host_key=HOST_KEY)

    def test_each_pod_writes_its_files_and_host_key_once(self) -> None:
        held = {"/etc/app/key": GuestFile(b"\0one\xff", 0o640), "/etc/app/empty": GuestFile(b"", 0o400)}
        self.assertEqual(self.boot(self.document("s1"), held), "")
        key = self.root / "etc/app/key"
        self.assertEqual((key.read_bytes(), stat.S_IMODE(key.stat().st_mode)), (b"\0one\xff", 0o640))
        self.assertEqual((self.root / "etc/app/empty").read_bytes(), b"")
        host = self.root / "etc/ssh/ssh_host_ed25519_key"
        self.assertEqual((host.read_text(), stat.S_IMODE(host.stat().st_mode)), (PRIVATE, 0o600))
        self.assertEqual((self.root / "etc/ssh/ssh_host_ed25519_key.pub").read_text(), PUBLIC + "\n")
        key.write_bytes(b"changed by the guest")
        self.boot(self.document("s1"), held)
        self.assertEqual(key.read_bytes(), b"changed by the guest", "a reboot is no new pod")
        self.boot(self.document("s2"), {"/etc/app/key": GuestFile(b"two")})
        self.assertEqual(key.read_bytes(), b"two")

    def test_what_is_written_into_a_volume_is_written_once_it_is_mounted(self) -> None:
        self.disk("virtio-v1")
        self.program("mount", 'for last; do :; done; echo old >"$last/key"')
        document = GuestDocument("s1", instance_id="root-7", volumes=(GuestVolume("v1", "/data"),))
        self.boot(document, {"/data/key": GuestFile(b"new")})
        self.assertEqual((self.root / "data/key").read_bytes(), b"new")

    def test_a_root_that_goes_with_its_pod_has_none_of_this(self) -> None:
        self.assertEqual(boot_script(GuestDocument("s1", host_key=HOST_KEY), {"/a": GuestFile(b"")}), "")
