# SPDX-License-Identifier: Apache-2.0
"""A guest without our agent whose root is a volume, on real QEMU: it is there again for the next pod."""

from __future__ import annotations

import os

from infranetes.volumes import published_devices
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.published import PublishedVolume
from infranetes_common.wire import cri
from tests.e2e.image_case import ImagePodCase
from tests.guests import catalogue
from tests.harness.durations import slow
from tests.harness.needs import needs_guests
from txgrpc import Code

_SIZE = 1 << 30


@needs_guests("tiny.qcow2", "tiny.raw")
class RootVolumeTests(ImagePodCase):
    """The pods of a StatefulSet, one after the other."""

    def setUp(self) -> None:
        super().setUp()
        volumes = self.root / "volumes"
        volumes.mkdir(mode=0o700)
        self.config["providers"]["qemu"]["volumes_dir"] = str(volumes)
        self.file = volumes / "pvc-root.raw"
        self.file.touch(mode=0o600)
        os.truncate(self.file, _SIZE)
        self.table = MountTable()
        self.addCleanup(self.table.close)

    def with_root(self, image: str, pod: str) -> cri.ContainerConfig:
        """Return a guest whose root is the volume, which is published for a pod as by kubelet."""
        target = self.root / f"kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pvc-root/{pod}"
        published_devices.publish(str(target), PublishedVolume("pvc-root", ""), self.table)
        self.addCleanup(published_devices.unpublish, str(target), self.table)
        device = cri.Device(container_path="/", host_path=str(target), permissions="mrw")
        return self.guest(image, devices=[device], stdin=True, tty=True)

    @slow(90, "it boots a system three times, which is emulated where there is no KVM")
    async def test_a_pod_that_is_deleted_finds_its_root_again(self) -> None:
        await self.start()
        image = await self.pulled("tiny", catalogue.path("tiny.qcow2"))
        for boots in (1, 2, 3):
            sandbox = await self.run_pod(hostname="web-0")
            container = await self.run_container(sandbox, self.with_root(image, f"web-{boots}"))
            await self.says(f"boot {boots} of this disk", seconds=120.0)
            if boots == 2:
                await self.kill()
                await self.start()
                status = await self.container_status(container)
                self.assertEqual(status.state, cri.CONTAINER_RUNNING)
            stop = cri.StopContainerRequest(container_id=container, timeout=60)
            await self.runtime.StopContainer(stop, timeout=90.0)
            await self.stop_pod(sandbox)
            await self.remove_pod(sandbox)
            (self.log_directory / "web" / "main.log").unlink()
        self.assertTrue(self.file.with_suffix(".root").exists())
        self.assertEqual(self.taps(), "")
        other = await self.pulled("other", catalogue.path("tiny.raw"))
        sandbox = await self.run_pod(hostname="web-0")
        creating = self.run_container(sandbox, self.with_root(other, "web-4"))
        self.assertIn("infranetes.io/root: replace", await self.refused(Code.FAILED_PRECONDITION, creating))
