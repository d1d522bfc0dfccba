# SPDX-License-Identifier: Apache-2.0
"""The hypervisors of VMs that boot images."""

from __future__ import annotations

import errno
import json
import os
import signal
from typing import Any, NoReturn

from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import TestCase

from infranetes.providers.hypervisor import GuestState, GuestStatus
from infranetes.providers.machine_images import Cd
from infranetes.providers.qemu.cgroups.placement import Placement
from infranetes.providers.qemu.vm import cds, hypervisor
from infranetes.providers.qemu.vm.record import RECORD, VmRecords
from infranetes_common.errors import ResourceExhausted, Unavailable
from tests.contract.hypervisor import HELLO, HypervisorContract, HypervisorHelpers
from tests.harness.needs import needs_netns, needs_qemu
from tests.infranetes.providers.qemu.image_case import HypervisorCase


@needs_netns
@needs_qemu
class QemuHypervisorTests(HypervisorCase, HypervisorContract, TestCase):
    """The contract."""


@needs_netns
@needs_qemu
class QemuTroubleTests(HypervisorCase, HypervisorHelpers, TestCase):
    """What only a QEMU can get into."""

    def disk_full(self, *args: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere")

    async def test_a_qemu_that_hangs_is_not_taken_for_one_that_has_ended(self) -> None:
        self.patch(hypervisor, "_SECONDS", 0.3)
        self.patch(hypervisor, "_QUIT_SECONDS", 0.1)
        found = await self.talking()
        [pid] = self.pids(self.instance)
        os.kill(pid, signal.SIGSTOP)
        for call in (found.status, found.execute, found.press_power_button):
            await self.refused(Unavailable, call())
        self.assertFalse(found.console.ended)
        self.assertIs((await self.within(found.switch_off())).state, GuestState.OFF)
        self.assertEqual(self.pids(self.instance), [])

    async def test_the_next_daemon_ends_a_qemu_whose_guests_end_is_recorded(self) -> None:
        before = await self.talking()

        def recorded() -> None:
            path = self.vms() / self.instance.token / RECORD
            fields = json.loads(path.read_text())
            fields["guest"]["finished_at"] = fields["guest"]["started_at"] + 1
            path.write_text(json.dumps(fields))

        found = await self.next_daemon(before, recorded)
        self.assertIs((await found.status()).state, GuestState.OFF)
        await self.until(lambda: not self.pids(self.instance), "QEMU is ended")
        self.assertTrue(found.console.ended)

    async def test_an_end_that_can_not_be_recorded_is_an_end_all_the_same(self) -> None:
        found = await self.talking()
        told: list[GuestStatus] = []
        found.watch(told.append)
        self.patch(VmRecords, "update", self.disk_full)
        with capturedLogs() as events:
            await found.console.write(b"O")
            await self.until(lambda: told, "the end is told")
        self.assertIs(told[0].state, GuestState.OFF)
        self.assertIn("is not recorded", " ".join(formatEvent(each) or "" for each in events))

    async def test_one_that_can_not_be_recorded_as_begun_does_not_execute(self) -> None:
        found = await self.prepared()
        patch = self.patch(VmRecords, "update", self.disk_full)
        await self.refused(ResourceExhausted, found.execute())
        self.assertIs((await found.status()).state, GuestState.PREPARED)
        patch.restore()
        await found.execute()
        await self.reads(found.console, HELLO)

    async def test_the_kernels_want_of_memory_is_told_as_such(self) -> None:
        self.patch(Placement, "why_ended", lambda *_: "the kernel killed it for want of memory")
        found = await self.talking()
        await self.killed(found)
        status = await found.status()
        self.assertEqual((status.exit_code, status.reason), (137, "OOMKilled"))
        self.assertIn("want of memory", status.message)

    async def test_a_full_disk_leaves_the_cds_that_are_there(self) -> None:
        found = await self.prepared()
        await found.insert_cds([Cd("cidata", {"meta-data": b"one"})])
        patch = self.patch(cds, "write", self.disk_full)
        await self.refused(ResourceExhausted, found.insert_cds([Cd("cidata", {"meta-data": b"two"})]))
        patch.restore()
        [disk] = await self.inserted(found)
        self.assertIn(b"one", disk)

    async def test_no_file_of_a_cd_has_a_name(self) -> None:
        """It may have secrets, and its room is given back with the VM's QEMU."""
        found = await self.prepared()
        await found.insert_cds([Cd("cidata", {"user-data": b"a secret of the pod"})])
        for each in (self.vms() / self.instance.token).iterdir():
            self.assertNotIn(b"a secret of the pod", each.read_bytes(), each.name)

    async def test_a_lost_monitor_is_connected_to_again(self) -> None:
        found: Any = await self.talking()
        told: list[GuestStatus] = []
        found.watch(told.append)
        found._vm.connections.close()
        await self.until(lambda: not found._vm.connections.lost, "it is connected")
        await found.console.write(b"O")
        await self.until(lambda: told, "the end is told")
        self.assertIs(told[0].state, GuestState.OFF)
