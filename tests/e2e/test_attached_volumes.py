# SPDX-License-Identifier: Apache-2.0
"""Volumes that are disks of real VMs: they outlive pods, follow them, and are free when a VM is killed."""

from __future__ import annotations

import os
import signal

from infranetes_common.wire import cri
from tests.e2e.volume_case import GROUP, VolumeCase


class AttachedVolumeTests(VolumeCase):
    async def test_what_is_written_outlives_the_pod_and_its_vm(self) -> None:
        await self.start()
        first = await self.run_pod()
        source = self.publish("first", group=GROUP)
        script = "echo kept >/data/file; mkdir /data/part; sync; ls -ld /data; exec sleep 1000"
        await self.run_container(first, self.mounting(source, "main", script))
        await self.until(lambda: len(self.lines("main")) == 1, "it is written", seconds=60.0)
        self.assertRegex(self.lines("main")[0], rf"^drwxrws.* {GROUP} ")
        self.assertLess(self.file.stat().st_blocks * 512, self.size / 2, "what is not written takes no room")
        await self.stop_pod(first)
        await self.remove_pod(first)

        second = await self.run_pod("web", attempt=1)
        reading = self.mounting(
            self.publish("second", group=GROUP), "second", "cat /data/file; exec sleep 1000"
        )
        await self.run_container(second, reading)
        await self.until(lambda: self.lines("second") == ["kept"], "the second pod sees it", seconds=60.0)
        self.assertFalse(self.is_free(), "no other VM gets it")
        os.kill(self.qemu_of(second), signal.SIGKILL)
        await self.until(self.is_free, "it is free once the VM is gone")

    async def test_a_vm_that_reboots_has_ended_and_its_volume_is_free(self) -> None:
        await self.start()
        first = await self.run_pod()
        # It crashes the VM, but only after the container's start has been answered.
        script = "echo kept >/data/file; sync; sleep 5; echo b >/proc/sysrq-trigger; exec sleep 1000"
        security = cri.LinuxContainerSecurityContext(privileged=True)
        rebooting = self.mounting(
            self.publish("first"), "main", script, linux=cri.LinuxContainerConfig(security_context=security)
        )
        await self.run_container(first, rebooting)
        await self.until(self.is_free, "its VM has ended", seconds=60.0)
