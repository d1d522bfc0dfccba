# SPDX-License-Identifier: Apache-2.0
"""Troubles with volumes, as pods on real VMs see them.

These tests show the rows of the manual's table:

    the node's disk is full                    tests.e2e.test_full_volumes
    the node's disk fails                      here
    the volume is full                         tests.e2e.test_full_volumes
    it holds something else                    tests.vmserver.volumes.test_disks: "never formatted"
    the VM ended while a file system was made  tests.vmserver.volumes.test_disks_ends: "is made again"
    a VM-image pod's VM reboots                the same: "after a reboot"
    its file system is damaged                 here
    something in the VM still uses it          tests.vmserver.volumes.test_disks: "is used stays"
    QEMU does not detach it                    tests.infranetes.providers.test_qemu_attached: "give up";
                                               tests.infranetes.volumes.test_pod_volumes: "hangs"
    the agent does not answer                  the same: "an agent that is away"
    the VM was killed                          tests.e2e.test_attached_volumes, tests.e2e.test_postgresql
    the daemon was killed                      tests.infranetes.volumes.test_pod_volumes: KilledAnywhereTests
    a cloud's node is gone                     tests.infranetes.providers.cloud.test_volumes: "that is gone"
"""

from __future__ import annotations

import subprocess

from twisted.internet.threads import deferToThread

from tests.e2e.volume_case import VolumeTroubleCase
from tests.infranetes.daemon.case import reactor
from tests.support.power_loss import VolatileFile
from txgrpc import Code, GrpcError


class VolumeTroubleTests(VolumeTroubleCase):
    async def test_when_the_disk_fails_the_pod_goes_on(self) -> None:
        """All flushed data is on the disk once that is back."""
        disk = await deferToThread(VolatileFile, self.file, self.root / "volatile")
        self.addCleanup(disk.end)
        await self.start()
        sandbox, container = await self.having("first")
        await self.has_written(container)
        disk.fail()
        write = ("dd", "if=/dev/urandom", "of=/data/large", "bs=1M", "count=4", "conv=fsync")
        failed = await self.execute(container, *write)
        self.assertNotEqual(failed.exit_code, 0)
        self.assertRegex(failed.stderr, rb"I/O error|Input/output error|Read-only file system")
        await self.until_read_only(container)
        self.assertEqual((await self.execute(container, "echo", "alive")).stdout, b"alive\n")
        await self.end(sandbox)
        await deferToThread(disk.lose_power)
        await self.assert_kept()

    async def until_read_only(self, container: str) -> None:
        """Write until the file system becomes read-only, because it can't write its own metadata."""
        until = reactor.seconds() + 120.0
        said = b""
        while b"Read-only file system" not in said:
            self.assertLess(reactor.seconds(), until, said)
            wrote = await self.execute(container, "sh", "-c", "echo more >/data/more && sync")
            said = wrote.stderr
            await self.sleep(1.0)

    async def test_a_damaged_file_system_is_for_a_person_to_mend(self) -> None:
        await self.start()
        sandbox, container = await self.having("first")
        await self.has_written(container)
        await self.end(sandbox)
        with self.file.open("r+b") as file:
            file.seek(1024 + 0x3FC)  # the superblock's checksum
            file.write(b"dead")
        sandbox = await self.run_pod("web", attempt=7)
        for _ in range(2):
            with self.assertRaises(GrpcError) as caught:
                await self.create(sandbox, self.mounting(self.publish("damaged"), "damaged", self.keep))
            self.assertIs(caught.exception.code, Code.FAILED_PRECONDITION)
            self.assertIn("can't be mounted", caught.exception.message)
        await self.end(sandbox)
        mended = subprocess.run(["e2fsck", "-fy", self.file], capture_output=True, text=True)
        self.assertEqual(mended.returncode, 1, mended.stdout)  # errors were corrected
        await self.assert_kept()
