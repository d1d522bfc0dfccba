# SPDX-License-Identifier: Apache-2.0
"""User namespaces of pods, as of `hostUsers: false`, on real VMs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from infranetes_common.wire import cri
from tests.e2e.pod_case import PodCase
from tests.harness.durations import slow
from tests.support.user_namespaces import FIRST, ids, namespaces, of_container, of_pod

OTHER = FIRST + 65536
SCRIPT = """
cat /proc/self/uid_map; cat /proc/self/attr/current; echo
stat -c '%u:%g %n' / /bin /volume /volume/user /secret/key /etc/hosts
cat /proc/self/oom_score_adj; grep ^Seccomp: /proc/self/status
touch /volume/root /tmp/root; chown 7:8 /volume/root; chown 9 /volume/user
cat /secret/key; echo x >/secret/key || echo refused
echo 1 >/proc/sys/kernel/sysrq || echo kept
echo ended >/dev/termination-log
nc -l -p 80 -e cat & echo listens; exec sleep 1000
"""


@slow(120, "its VMs are emulated where there is no KVM")
class UserNamespaceTests(PodCase):
    """User namespaces of pods that conmon and crun run."""

    contprovider = "oci"

    def setUp(self) -> None:
        super().setUp()
        self.files = Path(os.path.realpath(self.root)) / "kubelet"
        self.files.mkdir()

    def mount(self, at: str, path: Path, first: int, **fields: Any) -> Any:
        mapping: Any = {"uidMappings": ids(first), "gidMappings": ids(first)}
        return cri.Mount(container_path=at, host_path=str(path), **mapping, **fields)

    def container(self, first: int, name: str, script: str, **fields: Any) -> Any:
        linux = of_container(namespaces(first), seccomp=cri.SecurityProfile(), **fields.pop("context", {}))
        linux.resources.oom_score_adj = -997
        linux.resources.memory_limit_in_bytes = 64 << 20
        return self.box(name, f"exec 2>&1\n{script}", linux=linux, **fields)

    async def test_pods_have_their_ids_and_the_node_has_its_own(self) -> None:
        shared, secret = self.files / "shared", self.files / "pods/u/volumes/kubernetes.io~secret/s"
        for directory in (shared, secret):
            directory.mkdir(parents=True)
        (shared / "user").write_text("")
        os.chown(shared / "user", 1000, 1000)
        (secret / "key").write_text("hidden\n")
        message, hosts = self.files / "message", self.files / "hosts"
        message.write_text("")
        hosts.write_text("127.0.0.1 localhost\n")
        message.chmod(0o666)
        await self.start()
        sandbox = await self.run_pod(linux=of_pod(namespaces()))
        mounts = [
            self.mount("/volume", shared, FIRST),
            self.mount("/secret", secret, FIRST, readonly=True),
            self.mount("/etc/hosts", hosts, FIRST),
            self.mount("/dev/termination-log", message, FIRST),
        ]
        main = await self.run_container(sandbox, self.container(FIRST, "main", SCRIPT, mounts=mounts))
        await self.until(lambda: "listens" in self.lines("main"), "it has said all")
        lines = self.lines("main")
        self.assertEqual(lines[0].split(), ["0", str(FIRST), "65536"])
        self.assertIn("infranetes-default", lines[1])
        self.assertEqual(
            [line for line in lines if ":" in line][:6],
            [
                "0:0 /",
                "0:0 /bin",
                "0:0 /volume",
                "1000:1000 /volume/user",
                "0:0 /secret/key",
                "0:0 /etc/hosts",
            ],
        )
        for line in ("-997", "Seccomp:\t2", "hidden", "refused", "kept"):
            self.assertIn(line, lines)

        def carried() -> bool:
            found = shared / "root"
            if not found.exists() or not message.read_text():
                return False
            owners = found.stat().st_uid, found.stat().st_gid, (shared / "user").stat().st_uid
            return owners == (7, 8, 9)

        await self.until(carried, "the node has the files with its own ids")
        said = await self.execute(
            main, "sh", "-c", "id -u; cat /proc/self/uid_map; echo hello | nc 127.0.0.1 80"
        )
        self.assertEqual(said.stdout.split(), [b"0", b"0", b"%d" % FIRST, b"65536", b"hello"])
        await self.another_container(sandbox, main)
        await self.another_pod()
        stop = cri.StopContainerRequest(container_id=main, timeout=0)
        await self.runtime.StopContainer(stop, timeout=90.0)
        self.assertEqual((await self.container_status(main)).exit_code, 137)

    async def another_container(self, sandbox: str, main: str) -> None:
        """Check that it is in the same user namespace, and sees the processes there if that is asked for."""
        user = {"run_as_user": cri.Int64Value(value=1000)}
        script = "id -u; touch /x; readlink /proc/self/ns/user; exec sleep 1000"
        await self.run_container(sandbox, self.container(FIRST, "second", script, context=user))
        await self.until(lambda: len(self.lines("second")) == 3, "the second has said all")
        self.assertEqual(self.lines("second")[0], "1000")
        self.assertIn("Permission denied", self.lines("second")[1])
        found = (await self.execute(main, "readlink", "/proc/self/ns/user")).stdout.decode().strip()
        self.assertEqual(self.lines("second")[2], found)
        shared = namespaces(pid=cri.TARGET, target_id=main)
        config = self.box("debug", "cat /proc/1/comm", linux=of_container(shared))
        await self.in_state(await self.run_container(sandbox, config), cri.CONTAINER_EXITED)
        await self.until(lambda: self.lines("debug") == ["sleep"], "what the debugging container saw")

    async def another_pod(self) -> None:
        """Check that it has other ids, and that processes which its containers share are not the VM's."""
        options = namespaces(OTHER, pid=cri.POD)
        sandbox = await self.run_pod("other", linux=of_pod(options))
        script = (
            "cat /proc/self/uid_map; kill -9 1 -1 2>/dev/null; cat /proc/1/comm; ls /sys/fs/cgroup | wc -l"
        )
        config = self.box("main", f"exec 2>&1; {script}", linux=of_container(options))
        await self.in_state(await self.run_container(sandbox, config), cri.CONTAINER_EXITED)
        log = self.log_directory / "other" / "main.log"
        await self.until(lambda: log.read_text().count("\n") == 3, "its log")
        words = [line.split(" ", 3)[3] for line in log.read_text().splitlines()]
        self.assertEqual(words[0].split(), ["0", str(OTHER), "65536"])
        self.assertEqual(words[1], "catatonit")
        self.assertGreater(int(words[2]), 3)
