# SPDX-License-Identifier: Apache-2.0
"""Mounts of the node's files, with a daemon that is a process and simulated machines."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infranetes.volumes.mounts import Source
from infranetes_common.wire import cri
from tests.harness.needs import needs_mounts, needs_registry
from tests.infranetes.daemon.case import DaemonCase
from txgrpc import Code

BOUND_SECONDS = 2.0  # within which a changed ConfigMap has to arrive


@needs_mounts
@needs_registry
class VolumeTests(DaemonCase):
    def setUp(self) -> None:
        super().setUp()
        self.files = Path(os.path.realpath(self.root)) / "kubelet"
        self.files.mkdir()

    def mount(self, path: Path, **fields: Any) -> Any:
        return cri.Mount(container_path=f"/mnt/{path.name}", host_path=str(path), **fields)

    def volume_id(self, path: Path) -> str:
        return Source(str(path), False, False).id

    def in_vm(self, path: Path) -> Path:
        """Return the path's place in the machine."""
        (found,) = self.root.rglob(f"{self.volume_id(path)}/*")
        return found

    def anywhere(self, path: Path) -> list[Path]:
        return [
            *self.root.rglob(self.volume_id(path)),
            *(self.root / "state").rglob(f"{self.volume_id(path)}.*"),
        ]

    async def carried(self, true: Callable[[], Any]) -> None:
        await self.until(true, "carried")

    def write_version(self, directory: Path, value: str) -> None:
        """Write a version as kubelet's atomic writer does."""
        new = f"..{time.time_ns()}"
        (directory / new).mkdir()
        (directory / new / "key").write_text(value)
        old = os.readlink(directory / "..data") if (directory / "..data").is_symlink() else ""
        (directory / "..data_tmp").symlink_to(new)
        (directory / "..data_tmp").rename(directory / "..data")
        if old:
            shutil.rmtree(directory / old)
        else:
            (directory / "key").symlink_to("..data/key")

    async def test_a_configmap_and_its_next_version(self) -> None:
        await self.start()
        directory = self.files / "config"
        directory.mkdir()
        self.write_version(directory, "first")
        config = self.box(script="sleep 1000", mounts=[self.mount(directory, readonly=True)])
        container = await self.run_container(await self.run_pod(), config)
        there = self.in_vm(directory)
        self.assertEqual((there / "key").read_text(), "first")
        self.write_version(directory, "second")
        await self.until(lambda: (there / "key").read_text() == "second", "carried", BOUND_SECONDS)
        await self.until(lambda: len(os.listdir(there)) == 3, "carried", BOUND_SECONDS)
        (there / "key").unlink()  # changes made in the machine stay there
        (there / "other").write_text("")
        self.write_version(directory, "third")
        await self.until(lambda: (there / "..data" / "key").read_text() == "third", "carried", BOUND_SECONDS)
        self.assertFalse((directory / "other").exists())
        (mount,) = (await self.container_status(container)).mounts
        self.assertEqual(
            (mount.host_path, mount.container_path, mount.readonly),
            (str(directory), "/mnt/config", True),
        )

    async def test_the_termination_message_is_there_when_the_end_is_told(self) -> None:
        await self.start()
        message, shared = self.files / "message", self.files / "shared"
        message.write_text("")
        inode = message.stat().st_ino
        script = (
            f"cd {self.root};"
            f"for m in $(find . -path '*{self.volume_id(message)}/file'); do echo last words > $m; done;"
            f"for m in $(find . -path '*{self.volume_id(shared)}/directory'); do echo data > $m/data; done;"
            "exit 3"
        )
        mounts = [self.mount(message), self.mount(shared)]
        container = await self.run_container(await self.run_pod(), self.box(script=script, mounts=mounts))
        await self.in_state(container, cri.CONTAINER_EXITED)
        self.assertEqual(message.read_text(), "last words\n")
        self.assertEqual(message.stat().st_ino, inode)
        self.assertEqual((shared / "data").read_text(), "data\n")

    async def test_what_a_command_wrote_is_there_when_its_end_is_told(self) -> None:
        await self.start()
        shared = self.files / "shared"
        shared.mkdir()
        config = self.box(script="sleep 1000", mounts=[self.mount(shared)])
        container = await self.run_container(await self.run_pod(), config)
        there = self.in_vm(shared)
        for number in range(5):
            script = f"mkdir {there}/{number} && echo {number} >{there}/{number}/file"
            request = cri.ExecSyncRequest(container_id=container, cmd=["sh", "-c", script], timeout=10)
            self.assertEqual((await self.runtime.ExecSync(request, timeout=20.0)).exit_code, 0)
            self.assertEqual((shared / f"{number}" / "file").read_text(), f"{number}\n")

    async def test_one_entry_that_fails_keeps_no_other_back_and_the_end_says_so(self) -> None:
        await self.start()
        shared, disk = self.files / "shared", self.files / "disk"
        for directory in (shared / "busy", disk):
            directory.mkdir(parents=True)
        self.bind(disk, shared / "busy")
        script = (
            f"cd $(find {self.root} -path '*{self.volume_id(shared)}/directory') && rmdir busy &&"
            "echo in the way >busy && mkdir -p tree/deep && echo 42 >tree/deep/result"
        )
        mounts = [self.mount(shared)]
        container = await self.run_container(await self.run_pod(), self.box(script=script, mounts=mounts))
        status = await self.in_state(container, cri.CONTAINER_EXITED)
        self.assertEqual((shared / "tree" / "deep" / "result").read_text(), "42\n")
        self.assertEqual((status.exit_code, status.reason), (0, "VolumesNotWritten"))
        for words in (
            "not everything that it wrote is on the node",
            f"{shared}",
            "busy: Device or resource busy",
        ):
            self.assertIn(words, status.message)
        self.assertIn(f"wrote last to {shared} is not on the node", self.log)

    async def test_both_ways_while_it_runs_and_when_the_sandbox_is_stopped(self) -> None:
        await self.start()
        shared = self.files / "shared"  # a hostPath that is created if it is missing
        sandbox = await self.run_pod()
        first = await self.run_container(
            sandbox, self.box(script="sleep 1000", mounts=[self.mount(shared, readonly=True)])
        )
        second = await self.run_container(
            sandbox, self.box("second", script="sleep 1000", mounts=[self.mount(shared)])
        )
        there = self.in_vm(shared)
        (there / "from-vm").write_text("vm")
        await self.carried(lambda: (shared / "from-vm").exists())
        (shared / "from-node").write_text("node")
        await self.carried(lambda: (there / "from-node").exists())
        (there / "from-node").unlink()
        await self.carried(lambda: not (shared / "from-node").exists())
        request = cri.StopContainerRequest(container_id=second)
        await self.runtime.StopContainer(request, timeout=30.0)
        await self.runtime.RemoveContainer(cri.RemoveContainerRequest(container_id=second), timeout=30.0)
        self.assertTrue(there.exists())
        (there / "last").write_text("last")
        await self.stop_pod(sandbox)
        self.assertEqual((shared / "last").read_text(), "last")
        await self.remove_pod(sandbox)
        self.assertEqual(self.anywhere(shared), [])
        self.assertTrue(first)

    async def test_the_last_container_takes_the_volume_with_it(self) -> None:
        await self.start()
        secret = self.files / "secret"
        secret.mkdir()
        sandbox = await self.run_pod()
        container = await self.create(sandbox, self.box(mounts=[self.mount(secret)]))
        self.assertTrue(self.anywhere(secret))
        await self.runtime.RemoveContainer(cri.RemoveContainerRequest(container_id=container), timeout=30.0)
        self.assertEqual([path for path in self.anywhere(secret) if path.suffix != ".new"], [])

    async def test_after_the_daemon_was_killed_both_sides_are_made_the_same(self) -> None:
        await self.start()
        directory, shared = self.files / "config", self.files / "shared"
        directory.mkdir()
        shared.mkdir()
        (shared / "gone").write_text("x")
        (shared / "gone-there").write_text("x")
        self.write_version(directory, "first")
        mounts = [self.mount(directory, readonly=True), self.mount(shared)]
        await self.run_container(await self.run_pod(), self.box(script="sleep 1000", mounts=mounts))
        there, shared_there = self.in_vm(directory), self.in_vm(shared)
        self.write_version(directory, "second")
        await self.kill()
        self.write_version(directory, "third")
        (shared / "gone").unlink()
        (shared_there / "gone-there").unlink()
        (shared_there / "new").write_text("new")
        await self.start()
        await self.carried(lambda: (there / "key").read_text() == "third")
        await self.carried(lambda: (shared / "new").exists())
        await self.carried(lambda: not (shared_there / "gone").exists())
        self.assertEqual(os.listdir(shared), ["new"])
        self.assertEqual(os.listdir(shared_there), ["new"])

    def bind(self, source: Path, target: Path) -> None:
        subprocess.run(["mount", "--bind", source, target], check=True)
        self.addCleanup(self.unmount, target)

    def unmount(self, target: Path) -> None:
        subprocess.run(["umount", "-l", target], stderr=subprocess.DEVNULL)

    async def test_what_is_mounted_once_a_container_runs_is_none_of_its_business(self) -> None:
        """Propagation PRIVATE; the next container sees it from the beginning."""
        await self.start()
        shared, disk, other = (self.files / name for name in ("shared", "disk", "other"))
        for directory in (shared / "early", shared / "late", disk, other):
            directory.mkdir(parents=True)
        (disk / "on-disk").write_text("disk")
        (other / "on-other").write_text("other")
        (shared / "late" / "below").write_text("below")
        self.bind(disk, shared / "early")
        sandbox = await self.run_pod()
        await self.run_container(sandbox, self.box(script="sleep 1000", mounts=[self.mount(shared)]))
        there = self.in_vm(shared)
        self.assertEqual((there / "early" / "on-disk").read_text(), "disk")
        for start_again in (False, True):
            self.unmount(shared / "late")
            self.bind(other, shared / "late")
            self.unmount(shared / "early")
            if start_again:
                await self.kill()
                await self.start()
            (shared / f"mark-{start_again}").write_text("")
            (there / "late" / f"by-container-{start_again}").write_text("")
            await self.carried((there / f"mark-{start_again}").exists)
            self.assertIn("below", os.listdir(there / "late"))
            self.assertNotIn("on-other", os.listdir(there / "late"))
            self.assertEqual((there / "early" / "on-disk").read_text(), "disk")
            self.assertEqual(os.listdir(other), ["on-other"])
        self.unmount(shared / "late")  # what the container wrote below it is then visible on the node
        await self.carried((shared / "late" / "by-container-True").exists)
        self.bind(other, shared / "late")
        await self.run_container(
            sandbox, self.box("second", script="sleep 1000", mounts=[self.mount(shared, readonly=True)])
        )
        self.assertTrue((there / "late" / "on-other").exists())
        self.assertFalse((there / "early" / "on-disk").exists())

    async def test_the_end_of_a_machine_tells_what_may_be_missing(self) -> None:
        await self.start()
        shared, locked = self.files / "shared", self.files / "locked"
        mounts = [self.mount(shared), self.mount(locked, readonly=True)]
        config = self.box(script="sleep 1000", mounts=mounts)
        container = await self.run_container(await self.run_pod(), config)
        (vm,) = await self.vms()
        await self.farm("behave", id=vm["id"], behaviour="dies-after", after=0)
        status = await self.in_state(container, cri.CONTAINER_EXITED)
        self.assertEqual((status.exit_code, status.reason), (137, "VMEnded"))
        self.assertIn(f"what it wrote last to {shared} may be missing on the node", status.message)
        self.assertNotIn(str(locked), status.message)

    async def test_no_link_that_a_container_makes_leads_another_volume_out(self) -> None:
        """One volume is inside another, whose container replaces a directory on the way there by a link."""
        await self.start()
        outer, system = self.files / "data", self.files / "system"
        inner = outer / "sub" / "cron.d"
        inner.mkdir(parents=True)
        (system / "cron.d").mkdir(parents=True)
        (system / "cron.d" / "crontab").write_text("of the node")
        sandbox = await self.run_pod()
        mounts = [self.mount(outer), self.mount(inner)]
        await self.run_container(sandbox, self.box(script="sleep 1000", mounts=mounts))
        there, inner_there = self.in_vm(outer), self.in_vm(inner)
        shutil.rmtree(there / "sub")
        (there / "sub").symlink_to(system)
        await self.carried((outer / "sub").is_symlink)
        for name in ("crontab", "evil"):
            (inner_there / name).write_text("* * * * * root evil")
        await self.until(lambda: f"{inner} is not copied to the VM" in self.log, "a refusal")
        config = self.box("second", script="sleep 1000", mounts=[self.mount(outer / "sub" / "cron.d")])
        request = cri.CreateContainerRequest(pod_sandbox_id=sandbox, config=config)
        call = self.runtime.CreateContainer(request, timeout=30.0)
        message = await self.refused(Code.INVALID_ARGUMENT, call)
        self.assertIn(f"leads by a link in {outer}, where a container may write", message)
        await self.stop_pod(sandbox)
        self.assertEqual(os.listdir(system / "cron.d"), ["crontab"])
        self.assertEqual((system / "cron.d" / "crontab").read_text(), "of the node")

    async def test_below_a_read_only_mount_what_is_mounted_stays_writable_unless_it_is_recursive(
        self,
    ) -> None:
        await self.start()
        locked, disk = self.files / "locked", self.files / "disk"
        (locked / "below").mkdir(parents=True)
        disk.mkdir()
        (disk / "here").write_text("before")
        self.bind(disk, locked / "below")
        sandbox = await self.run_pod()
        mount = self.mount(locked, readonly=True)
        container = await self.run_container(sandbox, self.box(script="sleep 1000", mounts=[mount]))
        there = self.in_vm(locked / "below")
        self.assertEqual((there / "here").read_text(), "before")
        (there / "new").write_text("from the container")
        await self.carried((disk / "new").exists)
        (self.in_vm(locked) / "no").write_text("")
        status = await self.container_status(container)
        self.assertEqual([one.host_path for one in status.mounts], [str(locked)])
        await self.stop_pod(sandbox)
        self.assertFalse((locked / "no").exists())
        await self.remove_pod(sandbox)
        self.assertEqual(self.anywhere(locked / "below"), [])

        mount.recursive_read_only = True
        config = self.box(script="sleep 1000", mounts=[mount])
        await self.run_container(await self.run_pod("second"), config)
        self.assertEqual((self.in_vm(locked) / "below" / "here").read_text(), "before")
        self.assertEqual([*self.root.rglob(f"{self.volume_id(locked / 'below')}/*")], [])

    async def test_a_volume_that_is_too_large_leaves_nothing(self) -> None:
        self.config["volumes"] = {"max_bytes": "1KiB", "max_entries": 10}
        await self.start()
        large, small = self.files / "large", self.files / "small"
        large.mkdir()
        (large / "file").write_bytes(b"x" * 2000)
        sandbox = await self.run_pod()
        request = cri.CreateContainerRequest(
            pod_sandbox_id=sandbox, config=self.box(mounts=[self.mount(small), self.mount(large)])
        )
        message = await self.refused(
            Code.RESOURCE_EXHAUSTED, self.runtime.CreateContainer(request, timeout=30.0)
        )
        self.assertIn(f"config.mounts[1] ({large} at /mnt/large)", message)
        self.assertIn("over 1024 bytes", message)
        self.assertEqual(await self.containers(), [])
        self.assertEqual(self.anywhere(large) + self.anywhere(small), [])

    async def test_a_source_that_is_gone_takes_nothing_away(self) -> None:
        await self.start()
        directory = self.files / "config"
        directory.mkdir()
        (directory / "key").write_text("x")
        config = self.box(script="sleep 1000", mounts=[self.mount(directory)])
        await self.run_container(await self.run_pod(), config)
        shutil.rmtree(directory)
        await self.until(lambda: "is not copied to the VM" in self.log, "a warning")
        await self.sleep(1.5)
        self.assertEqual(self.log.count("is not copied to the VM"), 1)
        self.assertEqual((self.in_vm(directory) / "key").read_text(), "x")
