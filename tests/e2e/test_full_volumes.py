# SPDX-License-Identifier: Apache-2.0
"""Full volumes, and volumes on a full disk of the node, as pods on real VMs see them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from twisted.internet.endpoints import UNIXClientEndpoint

from infranetes.csi.config import CsiConfig
from infranetes_common.wire import csi
from tests.e2e.volume_case import VolumeTroubleCase
from tests.infranetes.csi.case import capability
from tests.infranetes.daemon.case import reactor
from txgrpc import Channel, Code

_MIB = 1 << 20


class FullVolumesCase(VolumeTroubleCase):
    """A test case with the driver's socket."""

    def setUp(self) -> None:
        super().setUp()
        self.config["csi"] = {"kubelet_dir": str(self.root / "kubelet")}

    def stub(self, service: Any) -> Any:
        channel = Channel(reactor, UNIXClientEndpoint(reactor, CsiConfig(str(self.root / "kubelet")).socket))
        self.addCleanup(channel.close)
        return channel.stub(service)

    async def write(self, container: str, name: str, mebibytes: int) -> Any:
        """Write a file to the volume, and flush it."""
        write = ("dd", "if=/dev/urandom", f"of=/data/{name}", "bs=1M", f"count={mebibytes}", "conv=fsync")
        return await self.execute(container, *write)


class FullVolumeTests(FullVolumesCase):
    async def test_a_full_volume_says_so_and_goes_on_once_it_is_expanded(self) -> None:
        await self.start()
        sandbox, container = await self.having("first")
        await self.has_written(container)
        full = await self.write(container, "large", self.size // _MIB)
        self.assertNotEqual(full.exit_code, 0)
        self.assertIn(b"No space left on device", full.stderr)
        growing = csi.ControllerExpandVolumeRequest(volume_id="pvc-1", volume_capability=capability())
        growing.capacity_range.required_bytes = 2 * self.size
        await self.stub(csi.Controller).ControllerExpandVolume(growing, timeout=60)
        grown = csi.NodeExpandVolumeRequest(volume_id="pvc-1", volume_path=str(self.published))
        await self.stub(csi.Node).NodeExpandVolume(grown, timeout=60)
        more = await self.write(container, "more", self.size // _MIB // 2)
        self.assertEqual(more.exit_code, 0, more.stderr)
        await self.end(sandbox)
        await self.assert_kept()


class FullNodeTests(FullVolumesCase):
    """Volumes in a file system of their own, which has less room than the volume may take."""

    def make_volumes(self) -> Path:
        disk = self.root / "disk"
        with disk.open("wb") as file:
            file.truncate(3 * self.size)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", disk], check=True)
        directory = super().make_volumes()
        subprocess.run(["mount", "-o", "loop", disk, directory], check=True)
        self.addCleanup(subprocess.check_call, ["umount", str(directory)])
        directory.chmod(0o700)
        return directory

    def fill(self) -> Path:
        """Fill the node's disk, except for 16 MiB."""
        free = shutil.disk_usage(self.volumes).free - 16 * _MIB
        filler = self.volumes / "filler"
        subprocess.run(["fallocate", "--length", str(free), filler], check=True)
        return filler

    async def test_on_a_full_disk_the_pod_gets_errors_and_all_else_goes_on(self) -> None:
        await self.start()
        sandbox, container = await self.having("first")
        other = await self.run_pod("other")
        beside = await self.run_container(other, self.box("beside", "exec sleep 1000"))
        await self.has_written(container)
        filler = self.fill()
        failed = await self.write(container, "large", self.size // _MIB // 2)
        self.assertNotEqual(failed.exit_code, 0)
        self.assertRegex(failed.stderr, rb"I/O error|Input/output error|Read-only file system")
        for each in (container, beside):
            self.assertEqual((await self.execute(each, "echo", "alive")).stdout, b"alive\n")
        request = csi.CreateVolumeRequest(name="pvc-2", volume_capabilities=[capability()])
        request.capacity_range.required_bytes = self.size
        creating = self.stub(csi.Controller).CreateVolume(request, timeout=60)
        await self.refused(Code.RESOURCE_EXHAUSTED, creating)
        await self.end(sandbox)
        filler.unlink()
        await self.assert_kept()
        self.assertEqual((await self.execute(beside, "echo", "alive")).stdout, b"alive\n")
