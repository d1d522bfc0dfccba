# SPDX-License-Identifier: Apache-2.0
"""A VM that boots anybody's image gets its network, whichever daemon there is when it asks."""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

import attrs
from twisted.trial.unittest import TestCase

from infranetes.providers.hypervisor import IHypervisor
from infranetes.providers.machine_images import Names
from infranetes.providers.qemu.dhcp.tap import tap_for
from tests.guests import catalogue, tiny
from tests.harness.durations import slow
from tests.harness.needs import needs_guests, needs_netns, needs_qemu
from tests.infranetes.providers.qemu.image_case import ImageCase
from tests.support.pod_namespaces import Node, connects

_BOOT_SECONDS = 180.0


def interfaces() -> set[str]:
    """Return the names of this network namespace's interfaces."""
    return {name for _, name in socket.if_nameindex()}


@needs_netns
@needs_qemu
@needs_guests("tiny.raw")
class ImageNetworkTests(ImageCase, TestCase):
    def setUp(self) -> Any:
        done = super().setUp()
        disk = catalogue.path("tiny.raw")
        self.base = attrs.evolve(self.base, path=disk, virtual_size=disk.stat().st_size)
        self.settings |= {"memory": 512 << 20}
        self.here = Node("10.208.0.1")
        self.addCleanup(self.here.end)
        return done

    async def console(self, hypervisor: IHypervisor) -> str:
        begin = hypervisor.console.begin
        return (await hypervisor.console.read(begin, 16384)).decode(errors="replace")

    @slow(20, "it boots a system, which is emulated where there is no KVM")
    async def test_the_daemon_that_made_it_is_not_needed(self) -> None:
        provider = await self.image_provider()
        before = interfaces()
        vm = await self.prepared_vm(provider, names=Names("web-0", ("10.96.0.10",)))
        # A daemon in between has stopped before the guest asks.
        await self.within(provider.stop())
        await self.within((await self.image_provider()).stop())
        provider = await self.image_provider()
        hypervisor = provider.hypervisor(vm.id)
        await self.within(hypervisor.execute())
        told = f"has {vm.address}/24, as web-0"
        while told not in await self.console(hypervisor):
            await self.within(hypervisor.console.changed(), _BOOT_SECONDS)
        await self.until(partial(connects, self.here, vm.address, tiny.PORT, 1.0), "its page", 30.0)

        tap = provider._find(vm.id).record.tap
        self.assertIn(tap_for(tap), interfaces())
        await self.within(provider.destroy(vm.id))
        self.assertEqual(interfaces(), before)
