# SPDX-License-Identifier: Apache-2.0
"""emptyDirs with a daemon that is a process and simulated machines: only the machines have the content."""

from __future__ import annotations

import os
from pathlib import Path

from infranetes.volumes.mounts import Source
from infranetes_common.wire import cri
from tests.harness.needs import needs_mounts
from tests.support.empty_dirs import EmptyDirCase


@needs_mounts
class OwnVolumeTests(EmptyDirCase):
    def setUp(self) -> None:
        super().setUp()
        self.config["volumes"] = {"max_bytes": 1024}  # the limit for volumes that are copied into VMs

    def in_vm(self) -> Path:
        (found,) = self.root.rglob(f"{Source(str(self.cache), False, False).id}/directory")
        return found

    def kept(self, kind: str = "own") -> list[Path]:
        return list((self.root / "state" / "volumes").glob(f"*/*.{kind}"))

    async def test_it_is_brought_once_and_nothing_comes_back(self) -> None:
        await self.start()
        (self.cache / "from-kubelet").write_text("first")
        sandbox = await self.run_own_pod()
        first = await self.run_container(sandbox, self.box(script="sleep 1000", mounts=[self.mount()]))
        there = self.in_vm()
        self.assertEqual((there / "from-kubelet").read_text(), "first")
        self.assertEqual(there.stat().st_mode & 0o7777, 0o2777)
        (there / "large").write_bytes(bytes(1 << 20))
        (self.cache / "from-kubelet").write_text("second")
        part = self.box("part", "sleep 1000", mounts=[self.mount(self.sub_path("a/b"))])
        await self.run_container(sandbox, part)
        self.assertTrue((there / "a" / "b").is_dir())  # the mounts share their files
        self.assertEqual((there / "from-kubelet").read_text(), "first")
        stop = cri.StopContainerRequest(container_id=first, timeout=0)
        await self.runtime.StopContainer(stop, timeout=30.0)
        self.assertEqual((await self.container_status(first)).reason, "Error")
        await self.runtime.RemoveContainer(cri.RemoveContainerRequest(container_id=first), timeout=30.0)
        again = self.box(script="sleep 1000", attempt=1, mounts=[self.mount()])
        await self.run_container(sandbox, again)
        self.assertEqual((there / "large").stat().st_size, 1 << 20)
        self.assertEqual(sorted(os.listdir(self.cache)), ["a", "from-kubelet"])
        self.assertEqual((len(self.kept()), self.kept("json")), (1, []))
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)
        await self.until(lambda: not self.kept(), "the record is gone")

    async def test_a_killed_daemon_brings_it_no_second_time(self) -> None:
        await self.start()
        sandbox = await self.run_own_pod()
        await self.run_container(sandbox, self.box(script="sleep 1000", mounts=[self.mount()]))
        there = self.in_vm()
        (there / "large").write_bytes(bytes(1 << 20))
        there.chmod(0o700)
        await self.kill()
        (self.cache / "late").write_text("")
        await self.start()
        await self.run_container(sandbox, self.box("second", "sleep 1000", mounts=[self.mount()]))
        self.assertEqual(os.listdir(there), ["large"])
        self.assertEqual(there.stat().st_mode & 0o777, 0o700)

    async def test_another_pods_is_carried(self) -> None:
        await self.start()
        await self.run_container(await self.run_pod(), self.box(script="sleep 1000", mounts=[self.mount()]))
        (self.in_vm() / "from-vm").write_text("x")
        await self.until(lambda: (self.cache / "from-vm").exists(), "carried")
        self.assertEqual((self.kept(), len(self.kept("json"))), ([], 1))
