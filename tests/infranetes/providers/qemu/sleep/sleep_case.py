# SPDX-License-Identifier: Apache-2.0
"""A test case of VMs that sleep, over real taps, bridges and files."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import cast

from infranetes.providers.interface import Instance, IPodProvider
from infranetes.providers.qemu.provider import QemuProvider
from infranetes.providers.qemu.sleep import record as records
from tests.contract.sleeping_vms import ISleepingProvider
from tests.e2e.qemu_case import QemuCase, said


class SleepCase(QemuCase):
    """VMs that sleep. See `SleepingVmsContract`'s hooks."""

    async def sleeper(self) -> ISleepingProvider:
        return sleeps(await self.started())

    async def machine(self, sleeper: ISleepingProvider) -> Instance:
        return await self.running(sleeper, self.spec())

    async def next_daemon(self, sleeper: ISleepingProvider) -> ISleepingProvider:
        return sleeps(await self.restarted(sleeper))

    async def end(self, sleeper: ISleepingProvider, machine: Instance) -> None:
        ended: list[Instance] = []
        sleeper.watch(ended.append)
        await self.end_from_outside(machine)
        await self.until(lambda: ended, "the VM's end is told")

    async def damage(self, sleeper: ISleepingProvider, machine: Instance) -> None:
        with self.memory(machine).open("r+b") as file:
            file.write(b"damaged")

    def directory(self, machine: Instance) -> Path:
        return self.vms() / machine.token

    def memory(self, machine: Instance) -> Path:
        return self.directory(machine) / records.MEMORY

    def own_files(self, machine: Instance) -> list[str]:
        """Return what there is of a sleep in the VM's directory."""
        return sorted(each.name for each in self.directory(machine).glob("sleep*"))

    async def assert_executes(self, sleeper: ISleepingProvider, machine: Instance) -> None:
        self.assertEqual(len(self.pids(machine)), 1)
        self.assertEqual(self.own_files(machine), [])
        self.assertEqual(self.mine_open(machine), [])
        self.assertIn(self.tap(machine), self.ports())

    async def assert_still(self, sleeper: ISleepingProvider, machine: Instance) -> None:
        self.assertEqual(self.pids(machine), [])
        self.assertEqual(self.own_files(machine), [records.RECORD, records.MEMORY])
        for name in self.own_files(machine):
            status = (self.directory(machine) / name).stat()
            self.assertEqual((stat.S_IMODE(status.st_mode), status.st_uid), (0o600, 0))
        self.assertIn(self.tap(machine), self.ports())

    def tap(self, machine: Instance) -> str:
        return f"inf{machine.token[:12]}"

    def ports(self) -> list[str]:
        """Return the ports of the bridge."""
        return [
            link["ifname"] for link in json.loads(said("ip", "-j", "link", "show", "master", self.bridge))
        ]

    def mine_open(self, machine: Instance) -> list[str]:
        """Return the files of a VM that this process, the daemon, has open."""
        found = []
        for each in Path("/proc/self/fd").iterdir():
            try:
                found.append(os.readlink(each))
            except OSError:
                continue
        return [each for each in found if machine.token in each]


def sleeps(provider: IPodProvider) -> ISleepingProvider:
    assert isinstance(provider, QemuProvider)
    return cast(ISleepingProvider, provider)
