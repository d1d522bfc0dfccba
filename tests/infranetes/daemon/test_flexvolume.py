# SPDX-License-Identifier: Apache-2.0
"""The FlexVolume driver as a process, as kubelet runs it, against a daemon as a process."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from uuid import uuid4

from twisted.internet.threads import deferToThread

from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.published import PublishedVolume, read
from tests.harness.needs import needs_mounts
from tests.infranetes.daemon.case import ROOT, DaemonCase
from tests.support import warm
from tests.support.waiting import listens

# What a cluster's administrator puts in the driver's directory for a daemon of another configuration.
_WRAPPER = """#!/bin/sh
exec env PYTHONPATH={root} {driver} --config {config} "$@"
"""


@needs_mounts
class DriverTests(DaemonCase):
    """With QEMU, whose volumes can be made before any VM can boot."""

    timeout = 300

    def setUp(self) -> None:
        super().setUp()
        self.config["provider"] = "qemu"
        self.config["providers"] = {"qemu": {"image_dir": str(self.root / "guest"), "user": "nobody"}}
        self.config["volumes"] = {"flexvolumes": ["default"]}
        vendor = self.root / "exec" / "apporbit~infranetes"
        vendor.mkdir(parents=True)
        self.driver = vendor / "infranetes"
        config = self.root / "infranetes.toml"
        program = shlex.join(warm.command("-m", "infranetes.flexvolume.cli"))
        self.driver.write_text(_WRAPPER.format(root=ROOT, driver=program, config=config))
        self.driver.chmod(0o755)
        self.target = Path(os.path.realpath(self.root)) / "pods/uid-1/volumes/apporbit~infranetes/data"
        self.volume = f"db-{uuid4().hex[:12]}"  # unique, as other tests share the node's mounts
        self.addCleanup(self.unmount)

    def unmount(self) -> None:
        if os.path.ismount(self.target):
            subprocess.run(["umount", "-l", str(self.target)], check=True)

    async def run_driver(self, *arguments: str) -> tuple[int, object]:
        """Run the driver. Return the exit status and the answer, which is all that it prints."""
        done = await deferToThread(
            subprocess.run,
            [str(self.driver), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=100,
        )
        return done.returncode, json.loads(done.stdout)

    def there(self) -> PublishedVolume | None:
        table = MountTable()
        try:
            return read(str(self.target), table)
        finally:
            table.close()

    async def test_kubelets_calls_in_their_order(self) -> None:
        options = {
            "kubernetes.io/fsType": "ext4",
            "kubernetes.io/pod.name": "db-0",
            "kubernetes.io/pod.namespace": "default",
            "kubernetes.io/pod.uid": "uid-1",
            "kubernetes.io/pvOrVolumeName": "data",
            "kubernetes.io/readwrite": "rw",
            "size": "8Mi",
            "volumeID": self.volume,
        }
        given = json.dumps(options)
        code, _ = await self.run_driver("mount", str(self.target), given)  # there is no daemon yet
        self.assertEqual(code, 1)
        self.process = self.spawn()
        await self.until(lambda: listens(self.root / "run" / "control.sock"), "the daemon answers", 60.0)
        code, _ = await self.run_driver("init")
        self.assertEqual(code, 0)
        self.assertEqual(
            await self.run_driver("getvolumename", given),
            (0, {"status": "Success", "volumeName": self.volume}),
        )
        for _ in range(2):
            self.assertEqual(
                await self.run_driver("mount", str(self.target), given), (0, {"status": "Success"})
            )
            self.assertEqual(self.there(), PublishedVolume(f"flex.default.{self.volume}"))
        self.assertEqual(
            os.listdir(self.root / "state" / "qemu" / "volumes"), [f"flex.default.{self.volume}.raw"]
        )
        self.assertEqual(await self.run_driver("waitforattach", "", given), (1, {"status": "Not supported"}))
        for _ in range(2):
            self.assertEqual(await self.run_driver("unmount", str(self.target)), (0, {"status": "Success"}))
            self.assertFalse(self.target.exists())
