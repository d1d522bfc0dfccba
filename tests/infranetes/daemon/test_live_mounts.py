# SPDX-License-Identifier: Apache-2.0
"""kubelet's changes to mounted files while a container runs: they arrive, and are atomic."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from infranetes.volumes.config import VolumesConfig
from infranetes.volumes.mounts import Source
from infranetes_common.wire import cri
from tests.harness.needs import needs_mounts, needs_registry
from tests.infranetes.daemon.case import DaemonCase

CHANGES = 6
KEYS = 4

# Reads a directory of keys like a program that wants them all from one version, and one key by its path. A
# process may lose the processor between two steps, so it waits between them. A version may go while it is
# read, as those of kubelet do, but not before another is there.
READER = """
import json, os, sys, time
top, out, keys = sys.argv[1:]
versions, faults, looks = [], [], 0
while not os.path.exists(out + ".stop"):
    looks += 1
    try:
        version = os.readlink(top + "/..data")
        found = os.open(top + "/" + version, os.O_RDONLY | os.O_DIRECTORY)
        texts = []
        for key in sorted(os.listdir(found)):
            time.sleep(0.02)
            with open(os.open(key, os.O_RDONLY, dir_fd=found)) as file:
                texts.append(file.read())
        os.close(found)
        with open(top + "/key-0") as file:
            texts.append(file.read())
        if len(texts) != int(keys) + 1 or len(set(texts[:-1])) != 1:
            faults.append("a mix: " + " ".join(text[:10] for text in texts))
        if len({len(text) for text in texts}) != 1 or texts[-1].strip(texts[-1][0]):
            faults.append("in part")
        versions.append(texts[0][:1])
    except OSError as error:
        if os.readlink(top + "/..data") == version:
            faults.append(str(error))
with open(out + ".new", "w") as file:
    json.dump([sorted(set(versions)), faults, looks], file)
os.rename(out + ".new", out)
"""


@needs_registry
def _begins_with(path: Path, letter: str) -> bool:
    return path.read_text()[0] == letter


class LiveMountTests(DaemonCase):
    def setUp(self) -> None:
        super().setUp()
        self.files = Path(os.path.realpath(self.root)) / "kubelet" / "pods" / "uid" / "volumes"
        self.files.mkdir(parents=True)
        self.config["volumes"] = {"interval": 0.1}

    def mount(self, path: Path, **fields: Any) -> Any:
        return cri.Mount(container_path="/mnt", host_path=str(path), readonly=True, **fields)

    def in_vm(self, path: Path) -> Path:
        (found,) = self.root.rglob(f"{Source(str(path), False, False).id}/directory")
        return found

    def write_version(self, directory: Path, letter: str) -> None:
        """Write all keys with the same content, as kubelet's atomic writer does."""
        new = f"..{time.time_ns()}"
        (directory / new).mkdir(parents=True)
        for number in range(KEYS):
            (directory / new / f"key-{number}").write_text(letter * 50_000)
        old = os.readlink(directory / "..data") if (directory / "..data").is_symlink() else ""
        (directory / "..data_tmp").symlink_to(new)
        (directory / "..data_tmp").rename(directory / "..data")
        for number in range(KEYS):
            if not (directory / f"key-{number}").is_symlink():
                (directory / f"key-{number}").symlink_to(f"..data/key-{number}")
        if old:
            shutil.rmtree(directory / old)

    async def test_changes_are_there_one_by_one(self) -> None:
        await self.start()
        directory = self.files / "kubernetes.io~configmap" / "config"
        self.write_version(directory, "-")
        config = self.box(script="sleep 1000", mounts=[self.mount(directory)])
        await self.run_container(await self.run_pod(), config)
        there = self.in_vm(directory)
        for number in range(CHANGES):
            letter = chr(ord("a") + number)
            self.write_version(directory, letter)
            await self.until(lambda: (there / "key-0").read_text()[0] == letter, "a change")  # noqa: B023
        await self.until(lambda: len(os.listdir(there)) == KEYS + 2, "what is gone goes")

    @needs_mounts
    async def test_one_file_by_a_sub_path_stays_as_it_was_though_its_version_is_gone(self) -> None:
        """kubelet mounts the file of one version below its own directory, and deletes that version later."""
        await self.start()
        directory = self.files / "kubernetes.io~configmap" / "config"
        self.write_version(directory, "-")
        paths = []
        for number in range(2):
            path = self.files.parent / "volume-subpaths" / "config" / "main" / str(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            subprocess.run(["mount", "--bind", str(directory / "key-0"), str(path)], check=True)
            self.addCleanup(subprocess.run, ["umount", str(path)], check=True)
            paths.append(path)
        sandbox = await self.run_pod()
        mounts = [self.mount(directory), cri.Mount(container_path="/key", host_path=str(paths[0]))]
        await self.run_container(sandbox, self.box(script="sleep 1000", mounts=mounts))
        (there,) = self.root.rglob(f"{Source(str(paths[0]), False, True).id}/*")
        for letter in "abc":
            self.write_version(directory, letter)
            whole = self.in_vm(directory) / "key-0"
            await self.until(partial(_begins_with, whole, letter), "a change")
            self.assertEqual(there.read_text(), "-" * 50_000)
        later = [cri.Mount(container_path="/key", host_path=str(paths[1]))]
        await self.create(sandbox, self.box("later", "sleep 1000", mounts=later))
        (there,) = self.root.rglob(f"{Source(str(paths[1]), False, True).id}/*")
        self.assertEqual(there.read_text(), "-" * 50_000)

    def test_the_node_looks_often_enough_for_a_change_to_be_there_within_two_seconds(self) -> None:
        self.assertLessEqual(VolumesConfig().interval, 1.0)

    async def test_a_running_container_reads_only_whole_versions(self) -> None:
        await self.start()
        directory = self.files / "kubernetes.io~configmap" / "config"
        self.write_version(directory, "-")
        reader, out = self.root / "reader.py", self.root / "read"
        reader.write_text(READER)
        volume = Source(str(directory), False, False).id
        there = f"$(find {self.root} -path '*{volume}/directory')"
        script = f"exec {sys.executable} -IS {reader} {there} {out} {KEYS}"
        config = self.box(script=script, mounts=[self.mount(directory)])
        await self.run_container(await self.run_pod(), config)
        key = self.in_vm(directory) / "key-0"
        for number in range(2 * CHANGES):
            letter = chr(ord("a") + number)
            self.write_version(directory, letter)
            if number % 2:  # the other changes follow without waiting
                await self.until(partial(_begins_with, key, letter), "a change")
            else:
                await self.sleep(0.1 * number)
        self.root.joinpath("read.stop").touch()
        await self.until(out.exists, "the reader ends")
        versions, faults, looks = json.loads(out.read_text())
        self.assertEqual(faults, [], f"of {looks} looks")
        self.assertGreater(len(versions), CHANGES)

    async def test_what_kubelet_keeps_in_memory_or_should_is_in_the_machines_memory(self) -> None:
        await self.start()
        mounts = []
        for kind in ("configmap", "secret", "projected", "downward-api", "empty-dir"):
            directory = self.files / f"kubernetes.io~{kind}" / "one"
            directory.mkdir(parents=True)
            mounts.append(cri.Mount(container_path=f"/mnt/{kind}", host_path=str(directory)))
        await self.create(await self.run_pod(), self.box(mounts=mounts))
        in_memory = {}
        for mount in mounts:
            place = self.in_vm(Path(mount.host_path)).relative_to(self.root)
            in_memory[mount.container_path.removeprefix("/mnt/")] = "disk-volumes" not in place.parts
        self.assertEqual(
            in_memory,
            {"configmap": True, "secret": True, "projected": True, "downward-api": True, "empty-dir": False},
        )
