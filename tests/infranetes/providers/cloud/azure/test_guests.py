# SPDX-License-Identifier: Apache-2.0
"""VMs without our agent on a simulated Azure."""

from __future__ import annotations

import base64
from typing import Any

from twisted.trial.unittest import TestCase

from infranetes.providers.hypervisor import GuestState
from tests.infranetes.providers.cloud.case import AzureCase
from tests.infranetes.providers.cloud.guest_case import GuestCase
from tests.support.clouds.faults import FaultKind


class AzureGuestTests(GuestCase, AzureCase, TestCase):
    """A VM that powers off stays until it is deleted; an evicted one has failed."""

    failure = "preempted"
    spot = True

    def user_data(self) -> bytes:
        return base64.b64decode(self.world.bodies[-1]["properties"]["userData"])

    def fail_vm(self, id: str) -> None:
        self.world.evict(id)

    async def test_one_that_is_off_costs_its_disk_alone_until_it_is_destroyed(self) -> None:
        instance, hypervisor = await self.prepared()
        await hypervisor.execute()
        self.world.faults.add(FaultKind.LOST, "deallocate", times=1)
        ended = await self.told(hypervisor, lambda: self.world.end(instance.id))
        self.assertIs(ended.state, GuestState.OFF)
        await self.until(lambda: self.world.arm.power[instance.id] == "deallocated", "it is deallocated")
        self.provider = await self.restarted(self.provider)
        self.assertEqual(await self.provider.hypervisor(instance.id).status(), ended)

    async def test_one_that_is_powering_off_still_runs(self) -> None:
        instance, hypervisor = await self.prepared()
        self.world.guests.obeys = False
        await hypervisor.execute()
        await hypervisor.press_power_button()
        for power in ("stopping", "deallocating"):
            self.world.arm.power[instance.id] = power
            await self.provider.list()
            self.assertIs((await hypervisor.status()).state, GuestState.RUNNING)

    async def test_its_console_is_read_by_one_link_and_only_as_far_as_it_is_new(self) -> None:
        instance, hypervisor = await self.prepared()
        console: Any = hypervisor.console
        self.world.blobs.made = False
        self.assertEqual(await console.read(0, 1000), b"")
        self.world.blobs.made = True
        long = "".join(f"line {number}\n" for number in range(40_000))
        self.world.guests.say(instance.id, long)
        await console.look()
        self.world.guests.say(instance.id, "and more\n")
        await console.look()
        said = await console.read(console.begin, console.end - console.begin)
        self.assertTrue(said.endswith(b"line 39999\nand more\n"), said[-100:])
        self.assertEqual(self.world.blobs.links, 1)
        whole = len(self.world.guests.consoles[instance.id])
        self.assertGreater(
            self.world.blobs.ranges[-1][0], whole - (130 << 10), "what was read is not read again"
        )

    async def test_its_console_is_read_on_when_its_link_is_no_longer_valid_or_it_began_anew(self) -> None:
        instance, hypervisor = await self.prepared()
        console: Any = hypervisor.console
        await console.read(0, 1000)
        self.world.blobs.expire()
        self.world.guests.say(instance.id, "x" * 200_000 + "\nafter that\n")
        await console.look()
        self.world.guests.consoles[instance.id] = "it was moved to another host\n"
        await console.look()
        said = await console.read(console.begin, console.end - console.begin)
        self.assertEqual(said, b"it was moved to another host\n")
        self.assertEqual(self.world.blobs.links, 2)

    async def test_one_that_is_told_nothing_is_launched_without_user_data(self) -> None:
        self.provider = await self.started()
        spec = await self.request(b"")
        await self.running(self.provider, spec)
        self.assertNotIn("userData", self.world.bodies[-1]["properties"])
