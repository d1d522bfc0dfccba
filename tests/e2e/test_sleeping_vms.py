# SPDX-License-Identifier: Apache-2.0
"""Real VMs that sleep, and go on where they were."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from twisted.internet.threads import deferToThread
from twisted.logger import Logger
from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Instance
from tests.contract.sleeping_vms import ISleepingProvider, SleepingVmsContract
from tests.harness.needs import needs_vms
from tests.infranetes.providers.qemu.sleep.sleep_case import SleepCase

_log = Logger()


@needs_vms
class QemuSleepTests(SleepCase, SleepingVmsContract, TestCase):
    """The contract of VMs that sleep, and what a packet does."""

    async def assert_executes(self, sleeper: ISleepingProvider, machine: Instance) -> None:
        await super().assert_executes(sleeper, machine)
        self.assertEqual((await self.agent_info(machine)).sandbox_id, machine.sandbox_id)

    async def test_it_goes_on_where_it_was(self) -> None:
        sleeper = await self.sleeper()
        machine = await self.machine(sleeper)
        before = await self.agent_info(machine)
        await sleeper.sleep(machine.id)
        sleeper = await self.next_daemon(sleeper)
        await sleeper.wake(machine.id)
        after = await self.agent_info(machine)
        self.assertEqual((after.boot_id, after.agent_id), (before.boot_id, before.agent_id))

    async def test_a_packet_calls_it_and_the_connection_is_made(self) -> None:
        sleeper = await self.sleeper()
        machine = await self.machine(sleeper)
        await self.assert_executes(sleeper, machine)
        called: list[str] = []
        seconds: list[float] = []

        def call(id: str) -> None:
            called.append(id)
            began = time.monotonic()
            sleeper.wake(id).addCallback(lambda _: seconds.append(time.monotonic() - began))

        sleeper.when_called(call)
        slept = await sleeper.sleep(machine.id)
        began = time.monotonic()
        await deferToThread(_refused, machine.address)
        _log.info(
            "{slept}; a connection after {connection:.2f} s, awake after {awake:.2f} s, load {load}",
            slept=slept,
            connection=time.monotonic() - began,
            awake=seconds[0],
            load=Path("/proc/loadavg").read_text().split()[0],
        )
        self.assertEqual(called, [machine.id])


def _refused(address: str) -> None:
    """Have a VM refuse a connection. :raise OSError: it does not answer."""
    try:
        socket.create_connection((address, 9), 30.0).close()
    except ConnectionRefusedError:
        return
    raise AssertionError("somebody listens")
