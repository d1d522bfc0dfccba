# SPDX-License-Identifier: Apache-2.0
"""NFS volumes in real VMs, from a real server.

The node's own mounts are fake: its kernel may have no NFS, and the daemon only looks at the mount table,
never at the content of mounts. So it gets a table with lines as Linux writes them for the server's exports.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Awaitable
from itertools import count
from pathlib import Path

from infranetes.volumes import mount_table
from infranetes_common.concurrency import start
from infranetes_common.wire import cri
from tests.e2e.pod_case import PodCase
from tests.harness.needs import needs
from tests.infranetes.daemon import case
from tests.support.ganesha import GANESHA, NfsServer
from tests.support.nfs3 import Nfs3Server
from txgrpc import Code

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
