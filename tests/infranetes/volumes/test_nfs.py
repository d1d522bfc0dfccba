# SPDX-License-Identifier: Apache-2.0
"""Which of a pod's mounts are NFS, according to mount tables as kernels write them."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.volumes import mount_table
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.nfs import NfsVolume, find_nfs
from infranetes_common.errors import FailedPrecondition
from infranetes_common.nfs import NfsMount

UID = "0b1c"
_V4 = (
    "rw,vers=4.2,rsize=262144,wsize=262144,namlen=255,hard,proto=tcp,timeo=600,retrans=2,sec=sys,"
    "clientaddr=10.0.0.5,local_lock=none,addr=192.0.2.7"
)
_V3 = (
    "rw,vers=3,rsize=65536,wsize=65536,namlen=255,soft,nolock,proto=tcp,timeo=50,retrans=3,sec=sys,"
    "mountaddr=192.0.2.7,mountvers=3,mountport=20048,mountproto=udp,local_lock=all,addr=192.0.2.7"
)


class NfsTests(SynchronousTestCase):
    """The mount table is a file, so neither a kernel nor a server is needed."""

    def setUp(self) -> None:
        top = Path(os.path.realpath(self.mktemp()))
        self.kubelet = top / "kubelet"
        self.pod = self.kubelet / "pods" / UID
        self.pod.mkdir(parents=True)
        self.file = top / "mountinfo"
        self.patch(mount_table, "TABLE", str(self.file))
        self.lines = ["20 1 254:0 / / rw,relatime - ext4 /dev/vda rw"]

    def mounted(
        self, at: str, source: str, options: str = _V4, *, device: str = "0:40", own: str = "rw,relatime",
        kind: str = "nfs4",
    ) -> str:  # fmt: skip
        """Add a mount in the pod's directory to the table. Return its path."""
        point = f"{self.pod}/{at}"
        number = 20 + len(self.lines)
        self.lines.append(f"{number} 20 {device} / {point} {own} shared:9 - {kind} {source} {options}")
        return point

    def find(self, path: str, uid: str = UID) -> NfsVolume | None:
        self.file.write_bytes(os.fsencode("\n".join(self.lines) + "\n"))
        table = MountTable()
        self.addCleanup(table.close)
        return find_nfs(path, uid, table)

    def found(self, path: str) -> NfsVolume:
        volume = self.find(path)
        assert volume is not None
        return volume

    def test_a_volume_has_the_servers_address_and_the_nodes_options(self) -> None:
        path = self.mounted(
            *(
                "volumes/kubernetes.io~nfs/data",
                "files:/srv/data",
                _V4 + ",xprtsec=none,fatal_neterrors=none",
            ),
            own="rw,nosuid,noexec,relatime",
        )
        options = ("addr=192.0.2.7", "hard", "local_lock=none", "noexec", "nosuid", "proto=tcp", "retrans=2",
                   "rsize=262144", "sec=sys", "timeo=600", "vers=4.2", "wsize=262144")  # fmt: skip
        self.assertEqual(self.found(path), NfsVolume(NfsMount("files:/srv/data", options), "", False))

    def test_a_csi_drivers_mount_and_one_by_nfsv3_are_volumes_too(self) -> None:
        path = self.mounted(
            "volumes/kubernetes.io~csi/pvc-1/mount", "files:/srv/my\\040data", _V3, kind="nfs"
        )
        found = self.found(path).mount
        self.assertEqual((found.source, found.version), ("files:/srv/my data", "3"))
        self.assertLessEqual({"nolock", "soft", "mountport=20048", "mountproto=udp"}, set(found.options))

    def test_what_the_node_may_only_read_the_container_may_only_read(self) -> None:
        mount = self.mounted("volumes/kubernetes.io~nfs/a", "files:/a", own="ro,relatime")
        self.assertTrue(self.found(mount).read_only)
        mount = self.mounted("volumes/kubernetes.io~nfs/b", "files:/b", _V4.replace("rw,", "ro,"))
        self.assertTrue(self.found(mount).read_only)
        self.assertNotIn("ro", self.found(mount).mount.options)

    def test_a_part_is_of_the_volume_that_it_is_a_part_of(self) -> None:
        for export in ("/srv", "/"):
            self.lines = self.lines[:1]
            whole = self.mounted("volumes/kubernetes.io~csi/pvc-1/mount", f"files:{export}")
            self.mounted("volumes/kubernetes.io~nfs/other", f"files:{export}", device="0:41")
            source = f"files:{export.rstrip('/')}/a/b"
            part = self.mounted("volume-subpaths/pvc-1/main/0", source, own="ro,relatime")
            self.assertEqual(self.found(part), NfsVolume(self.found(whole).mount, "a/b", True))

    def test_a_part_of_what_is_not_mounted_any_more_is_refused(self) -> None:
        self.mounted("volumes/kubernetes.io~nfs/data", "files:/srv", device="0:41")
        self.mounted("volumes/kubernetes.io~nfs/other", "files:/srv")
        part = self.mounted("volume-subpaths/data/main/0", "files:/srv/a")
        error = self.assertRaises(FailedPrecondition, self.find, part)
        self.assertIn("part of volume data", str(error))

    def test_a_link_to_kubelets_directory_is_followed(self) -> None:
        self.mounted("volumes/kubernetes.io~nfs/data", "files:/srv")
        link = self.kubelet.with_name("link")
        link.symlink_to(self.kubelet)
        found = self.find(f"{link}/pods/{UID}/volumes/kubernetes.io~nfs/data")
        self.assertEqual(found and found.mount.source, "files:/srv")

    def test_other_file_systems_other_pods_and_other_paths_are_none(self) -> None:
        path = self.mounted("volumes/kubernetes.io~nfs/data", "files:/srv")
        disk = self.mounted(
            "volumes/kubernetes.io~local-volume/d", "/dev/vdb", "rw", device="254:1", kind="xfs"
        )
        secret = self.mounted("volumes/kubernetes.io~secret/s", "files:/srv")
        for each in (
            disk,
            secret,
            f"{self.pod}/etc-hosts",
            f"{path}/..",
            path.replace("/pods/", "/x/../pods/"),
            "/srv",
            f"{self.pod}/volumes/x~y/z",
        ):
            self.assertIsNone(self.find(each), each)
        self.assertIsNone(self.find(path, uid="other"))
        self.assertIsNone(self.find(path, uid=""))

    def test_a_node_that_is_on_nfs_itself_has_no_such_volumes(self) -> None:
        self.lines[0] = f"20 1 0:39 / / rw,relatime - nfs4 files:/root {_V4}"
        self.assertIsNone(self.find(f"{self.pod}/volumes/kubernetes.io~local-volume/d"))

    def test_what_no_vm_can_have_is_said(self) -> None:
        path = self.mounted(
            "volumes/kubernetes.io~nfs/data", "files:/srv", _V4.replace("sec=sys", "sec=krb5")
        )
        error = self.assertRaises(FailedPrecondition, self.find, path)
        self.assertRegex(str(error), "this NFS volume can't be mounted in a VM: .*no Kerberos")
        path = self.mounted("volumes/kubernetes.io~nfs/latin1", "files:/caf\udce9")
        self.assertIn("UTF-8", str(self.assertRaises(FailedPrecondition, self.find, path)))

    def test_a_directory_of_kubelets_that_can_not_be_looked_at_is_said(self) -> None:
        path = self.mounted("volumes/kubernetes.io~nfs/data", "files:/srv")
        self.pod.rmdir()
        self.pod.symlink_to(self.pod)
        error = self.assertRaises(FailedPrecondition, self.find, path)
        self.assertIn(f"{path} can't be looked at", str(error))
