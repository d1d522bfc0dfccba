# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of containers in real VMs."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infranetes.providers.qemu.program.process import pids_by_argument
from infranetes_common.concurrency import start
from infranetes_common.wire import cri
from tests.e2e.counting_case import COUNTER, CountingCase
from tests.e2e.kept_vm import KeptVm
from txgrpc import Code

_FILES = {
    "config.dump",
    "spec.dump",
    "checkpoint/memory",
    "checkpoint/disk.qcow2",
    "checkpoint/hardware.json",
    "checkpoint/inventory.img",
}


class CheckpointTests(CountingCase):
    """CheckpointContainer with the daemon as a process, QEMU and the guest image's agent."""

    async def checkpoint(self, container: str, path: Path, **fields: Any) -> None:
        request = cri.CheckpointContainerRequest(container_id=container, location=str(path), **fields)
        await self.runtime.CheckpointContainer(request, timeout=180.0)

    def vm(self) -> Path:
        [vm] = (self.root / "state" / "qemu" / "vms").glob("[!.]*")
        return vm

    async def test_a_checkpoint_has_the_whole_pod_which_goes_on(self) -> None:
        await self.start()
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.box(script=COUNTER))
        other = await self.run_container(sandbox, self.box("other", "exec sleep 1000"))
        before = await self.count(container)
        path = self.root / "checkpoint.tar"
        await self.checkpoint(container, path)
        await self.check_archive(path, sandbox, container, other)
        await self.check_loaded(path)
        await self.goes_on(container, before)
        await self.goes_on(container)
        await self.refused(Code.ALREADY_EXISTS, self.checkpoint(container, path))
        await self.check_again(container)
        await self.check_killed(container)
        await self.stop_pod(sandbox)
        await self.refused(Code.FAILED_PRECONDITION, self.checkpoint(container, self.root / "late.tar"))
        await self.remove_pod(sandbox)
        self.assertEqual(list((self.root / "state" / "qemu" / "vms").iterdir()), [])
        self.assertEqual(list((self.root / "state").glob("checkpoints/*")), [])

    async def test_a_larger_vm_that_changes_its_memory_all_the_time(self) -> None:
        """What was plugged in is kept too, and can be plugged in afterwards."""
        await self.start()
        limits = cri.LinuxContainerResources(
            memory_limit_in_bytes=1536 << 20, cpu_quota=150_000, cpu_period=100_000
        )
        sandbox = await self.run_pod(linux=cri.LinuxPodSandboxConfig(resources=limits))
        writes = "while :; do tr '\\0' x </dev/zero | dd of=/dev/shm/x bs=1M count=48; done 2>/dev/null"
        container = await self.run_container(sandbox, self.box(script=f"({writes}) & {COUNTER}"))
        before = await self.count(container)
        path = self.root / "checkpoint.tar"
        await self.checkpoint(container, path)
        with tarfile.open(path) as archive:
            hardware, inventory = (
                json.loads(archive.extractfile(f"checkpoint/{name}").read())  # type: ignore[union-attr]
                for name in ("hardware.json", "inventory.img")
            )
        self.assertEqual(hardware["cores"], [1])
        self.assertEqual(sum(piece["mib"] for piece in hardware["pieces"]), 1792 - hardware["memory_mib"])
        self.assertEqual(inventory["machine"]["memory"], str(1792 << 20))
        await self.check_loaded(path)
        await self.goes_on(container, before)
        larger = cri.LinuxContainerResources(memory_limit_in_bytes=1664 << 20)
        await self.runtime.UpdatePodSandboxResources(
            cri.UpdatePodSandboxResourcesRequest(pod_sandbox_id=sandbox, resources=larger), timeout=300.0
        )
        await self.goes_on(container)

    async def check_archive(self, path: Path, sandbox: str, container: str, other: str) -> None:
        """Check what is in an archive, and that its disk and memory are whole."""
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)
        with tarfile.open(path) as archive:
            self.assertEqual(set(archive.getnames()), _FILES)
            archive.extractall(self.root / "out", filter="data")
        out = self.root / "out"
        manifest = json.loads((out / "checkpoint" / "inventory.img").read_text())
        self.assertEqual(manifest["pod"]["sandbox"], sandbox)
        self.assertEqual(manifest["container"], container)
        self.assertEqual({each["id"] for each in manifest["containers"]}, {container, other})
        self.assertTrue(all(each["imageId"].startswith("sha256:") for each in manifest["containers"]))
        for name, about in manifest["files"].items():
            self.assertEqual((out / name).stat().st_size, about["bytes"], name)
            said = subprocess.run(["sha256sum", out / name], capture_output=True, text=True, check=True)
            self.assertEqual(said.stdout.split()[0], about["sha256"], name)
        self.assertTrue(manifest["machine"]["guest-image"])
        self.assertRegex(manifest["machine"]["hypervisor"], r"^QEMU \d+\.\d+\.\d+")
        dump = json.loads((out / "config.dump").read_text())
        self.assertEqual((dump["id"], dump["name"]), (container, "main"))
        subprocess.run(["qemu-img", "check", "-q", out / "checkpoint" / "disk.qcow2"], check=True)
        # Some hundredths of a second on a quiet machine, which this one may not be.
        self.assertLess(manifest["pauseSeconds"], 20.0)

    async def check_loaded(self, path: Path) -> None:
        """Check that the guest which was kept goes on in another QEMU."""
        work = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, work)
        with tarfile.open(path) as archive:
            archive.extractall(work, filter="data")
        name = f"guest=infranetes-{self.vm().name}"
        [original] = pids_by_argument([name])[name]
        ends: list[Callable[[], object]] = []
        try:
            writes = await KeptVm(work / "checkpoint", original, work).writes_again(ends.append)
        finally:
            for end in reversed(ends):
                end()
        self.assertGreater(writes, 0)

    async def check_again(self, container: str) -> None:
        """Check that two at once both succeed, and that one which is cut short leaves nothing."""
        paths = [self.root / f"again-{number}.tar" for number in range(2)]
        calls = [start(self.checkpoint(container, path)) for path in paths]
        for call in calls:
            await call
        self.assertTrue(all(tarfile.is_tarfile(path) for path in paths))
        short = cri.CheckpointContainerRequest(
            container_id=container, location=str(self.root / "short.tar"), timeout=60
        )
        await self.refused(Code.DEADLINE_EXCEEDED, self.runtime.CheckpointContainer(short, timeout=0.3))
        await self.until(lambda: not list(self.vm().glob("keep*")), "what is left goes", 60.0)
        self.assertFalse((self.root / "short.tar").exists())
        await self.goes_on(container)

    async def check_killed(self, container: str) -> None:
        """Check that a VM which was being kept when its daemon was killed goes on with the next one."""
        for seconds in (0.2, 0.5, 0.9):
            call = self.runtime.CheckpointContainer(
                cri.CheckpointContainerRequest(
                    container_id=container, location=str(self.root / "killed.tar")
                ),
                timeout=60.0,
            )
            call.addErrback(lambda failure: None)
            await self.sleep(seconds)
            await self.kill()
            await self.start()
            await self.until(lambda: not list(self.vm().glob("keep*")), "what is left goes", 60.0)
            await self.goes_on(container)
            if (self.root / "killed.tar").exists():
                os.unlink(self.root / "killed.tar")
