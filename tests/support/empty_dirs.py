# SPDX-License-Identifier: Apache-2.0
"""A pod's emptyDir as kubelet makes it on the node, and checks of what containers that share it see."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from infranetes_common.wire import cri
from tests.infranetes.daemon.case import DaemonCase
from txgrpc import GrpcError

UID = "0d9c"


class EmptyDirCase(DaemonCase):
    """A test case whose pod has one emptyDir, `cache`."""

    def setUp(self) -> None:
        super().setUp()
        self.kubelet = Path(os.path.realpath(self.root)) / "kubelet" / "pods" / UID
        self.cache = self.kubelet / "volumes" / "kubernetes.io~empty-dir" / "cache"
        self.cache.mkdir(parents=True)
        self.cache.chmod(0o2777)
        os.chown(self.cache, 0, 2000)  # as with `fsGroup`

    async def run_own_pod(self, **fields: Any) -> str:
        config = self.pod(**fields)
        config.metadata.uid = UID
        return await self.run_pod(config=config)

    def mount(self, path: Path | None = None, **fields: Any) -> Any:
        return cri.Mount(container_path="/cache", host_path=str(path or self.cache), **fields)

    def sub_path(self, below: str, index: int = 0) -> Path:
        """A subPath as kubelet binds it."""
        (self.cache / below).mkdir(parents=True, exist_ok=True)
        at = self.kubelet / "volume-subpaths" / "cache" / "main" / str(index)
        at.mkdir(parents=True)
        subprocess.run(["mount", "--bind", self.cache / below, at], check=True)
        self.addCleanup(subprocess.check_call, ["umount", "-l", str(at)])
        return at

    async def ran(self, container: str, script: str) -> str:
        """Run a script in a container, which has to succeed, and return its output."""
        request = cri.ExecSyncRequest(container_id=container, cmd=["sh", "-c", script], timeout=300)
        answer = await self.runtime.ExecSync(request, timeout=330.0)
        self.assertEqual(answer.exit_code, 0, answer.stderr)
        return str(answer.stdout.decode().strip())

    async def check_one_directory(self, mebibytes: int, **pod: Any) -> str:
        """Check that all its mounts show one directory in the VM, which outlives containers and is not
        limited like volumes that are copied; return the sandbox."""
        sandbox = await self.run_own_pod(**pod)
        first = await self.run_container(sandbox, self.box(script="sleep 1000", mounts=[self.mount()]))
        self.assertEqual(await self.ran(first, "stat -c '%a %g' /cache"), "2777 2000")
        write = f"mkdir -p /cache/a && dd if=/dev/zero of=/cache/a/large bs=1M count={mebibytes} 2>/dev/null"
        await self.ran(first, write)
        part = self.box("part", "sleep 1000", mounts=[self.mount(self.sub_path("a"))])
        second = await self.run_container(sandbox, part)
        self.assertEqual(await self.ran(second, "stat -c %s /cache/large"), str(mebibytes << 20))
        await self.ran(second, "mv /cache/large /cache/moved && echo text >/cache/new")
        self.assertEqual(await self.ran(first, "cat /cache/a/new; ls /cache/a"), "text\nmoved\nnew")
        await self.ran(first, "ln -s / /cache/out")
        led_out = self.box("led-out", "true", mounts=[self.mount(self.sub_path("out/etc", 1))])
        await self.refused("subPath 'out/etc'", self.create(sandbox, led_out))
        for container in (first, second):
            await self.runtime.RemoveContainer(
                cri.RemoveContainerRequest(container_id=container), timeout=60.0
            )
        later = self.box("later", "sleep 1000", mounts=[self.mount(self.cache)])
        self.assertEqual(
            await self.ran(await self.run_container(sandbox, later), "ls /cache/a"), "moved\nnew"
        )
        self.assertEqual(sorted(os.listdir(self.cache / "a")), [])  # the node has only kubelet's directories
        return sandbox

    async def refused(self, words: str, work: Any) -> None:
        try:
            await work
        except GrpcError as error:
            self.assertIn(words, error.message)
        else:
            self.fail("not refused")
