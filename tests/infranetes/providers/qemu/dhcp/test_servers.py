# SPDX-License-Identifier: Apache-2.0
"""VMs are served on their taps: from a launch to the VM's end, over daemons, and while one floods its tap."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
from functools import partial
from pathlib import Path

import attrs
from twisted.internet.defer import succeed
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Attachment
from infranetes.providers.machine_images import Names
from infranetes.providers.qemu.dhcp.server import A_SECOND, AT_ONCE
from infranetes.providers.qemu.dhcp.servers import Guest, Servers
from infranetes.providers.qemu.dhcp.tap import tap_for
from infranetes.providers.qemu.network.namespaces import Namespaces
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import InfranetesError, Unavailable
from infranetes_common.identity import Network
from infranetes_common.reactors import installed
from tests.harness.needs import needs_netns
from tests.support.dhcp import (
    ACK,
    DISCOVER,
    NAK,
    OFFER,
    REQUEST,
    Reply,
    address,
    message,
    option,
    replies,
    sent,
)
from tests.support.frames import TapHost
from tests.support.waiting import until

reactor = installed()
ROUTER, NAMES = "10.219.0.1", Names("web-0")


def interfaces() -> set[str]:
    """Return the names of this network namespace's interfaces."""
    return {name for _, name in socket.if_nameindex()}


@needs_netns
class ServersTests(TestCase):
    """VMs that are taps on no bridge."""

    def setUp(self) -> None:
        self.servers = self.daemon()
        self.vm, self.guest = self.made("10.219.0.5")
        self.replies: list[Reply] = []

    def daemon(self) -> Servers:
        made = Servers(reactor, Namespaces(reactor))
        self.addCleanup(made.close)
        return made

    def made(self, own: str) -> tuple[TapHost, Guest]:
        vm = TapHost(f"inft{secrets.token_hex(4)}", own)
        self.addCleanup(vm.close)
        subprocess.run(["ip", "link", "set", vm.port.tap, "up"], check=True)
        directory = Path(self.mktemp())
        directory.mkdir()
        return vm, Guest(vm.port.tap, None, directory)

    def network(self, vm: TapHost) -> Network:
        return Network(vm.mac, f"{vm.address}/24", ROUTER, 1500)

    async def serve(self, names: Names = NAMES) -> None:
        await self.servers.serve(self.guest, self.network(self.vm), names)

    def heard(self, vm: TapHost | None = None) -> list[Reply]:
        return replies((vm or self.vm).received())

    async def reply(self, vm: TapHost, kind: int = DISCOVER, *options: bytes) -> Reply:
        found: list[Reply] = []
        transaction = secrets.token_bytes(4)
        frame = sent(vm.mac, message(vm.mac, kind, *options, transaction=transaction))
        asked = [0]

        def comes() -> bool:
            if asked[0] % 10 == 0:
                vm.send(frame)
            asked[0] += 1
            found.extend(each for each in self.heard(vm) if each.transaction == transaction)
            return bool(found)

        await until(comes, "an answer")
        return found[0]

    async def is_not_answered(self, vm: TapHost) -> None:
        """Check that a VM is not answered when another one's later request is."""
        other, guest = self.made("10.219.0.200")
        served = self.daemon()
        await served.serve(guest, self.network(other), Names())
        vm.send(sent(vm.mac, message(vm.mac, DISCOVER)))
        await self.reply(other)
        self.assertEqual(self.heard(vm), [])

    async def test_a_vm_gets_its_address_and_that_is_known(self) -> None:
        await self.serve()
        offer = await self.reply(self.vm)
        self.assertEqual((offer.kind, offer.given, offer.options[12]), (OFFER, "10.219.0.5", b"web-0"))
        self.assertFalse(self.servers.has_address(self.vm.port.tap))
        nak = await self.reply(self.vm, REQUEST, option(50, address("10.219.0.99")))
        self.assertEqual(nak.kind, NAK)
        self.assertFalse(self.servers.has_address(self.vm.port.tap))
        ack = await self.reply(self.vm, REQUEST, option(50, address("10.219.0.5")))
        self.assertEqual(ack.kind, ACK)
        self.assertTrue(self.servers.has_address(self.vm.port.tap))
        saved = self.guest.directory / "dhcp.json"
        await until(lambda: json.loads(saved.read_text())["address_taken"], "that is remembered")
        await self.serve(Names("renamed"))
        later = self.daemon()
        await self.servers.close()
        self.assertFalse(later.has_address(self.vm.port.tap))
        await later.resume(self.guest, partial(succeed, self.network(self.vm)))
        self.assertTrue(later.has_address(self.vm.port.tap))

    async def test_each_vm_gets_its_own_answer_on_its_own_tap(self) -> None:
        await self.serve()
        other, guest = self.made("10.219.0.6")
        await self.servers.serve(guest, self.network(other), Names("web-1"))
        self.assertEqual((await self.reply(other)).options[12], b"web-1")
        self.assertEqual((await self.reply(self.vm)).options[12], b"web-0")
        self.assertEqual(self.heard(other), [])

    async def test_what_is_told_may_change(self) -> None:
        await self.serve()
        await self.serve(Names("renamed"))
        self.vm.send(sent(self.vm.mac, message(self.vm.mac, DISCOVER)))
        self.assertEqual((await self.reply(self.vm)).options[12], b"renamed")
        self.assertEqual({each.options[12] for each in self.heard()} | {b"renamed"}, {b"renamed"})

    async def test_the_next_daemon_tells_the_same(self) -> None:
        names = Names("web-0", ("10.96.0.10",), ("svc.cluster.local",))
        await self.serve(names)
        before = (await self.reply(self.vm)).options
        await self.servers.close()
        await self.is_not_answered(self.vm)
        self.servers = self.daemon()
        await self.servers.resume(self.guest, partial(succeed, self.network(self.vm)))
        self.assertEqual((await self.reply(self.vm)).options, before)

    async def test_a_vm_that_was_not_served_is_not_by_the_next_daemon(self) -> None:
        await self.servers.resume(self.guest, partial(succeed, self.network(self.vm)))
        await self.is_not_answered(self.vm)

    async def test_names_that_were_lost_cost_a_vm_nothing_else(self) -> None:
        (self.guest.directory / "dhcp.json").write_text("{")
        await self.servers.resume(self.guest, partial(succeed, self.network(self.vm)))
        offer = await self.reply(self.vm)
        self.assertEqual(offer.given, "10.219.0.5")
        self.assertNotIn(12, offer.options)

    async def test_one_who_ends_is_served_no_more_and_nothing_of_it_stays(self) -> None:
        before = interfaces()
        await self.serve()
        self.assertEqual(len(interfaces()), len(before) + 1)
        await self.serve()
        await self.servers.stop(self.vm.port.tap)
        await self.servers.stop(self.vm.port.tap)
        self.assertEqual(interfaces(), before)
        await self.is_not_answered(self.vm)

    async def test_a_tap_that_goes_first_harms_nobody(self) -> None:
        await self.serve()
        other, guest = self.made("10.219.0.6")
        await self.servers.serve(guest, self.network(other), Names())
        await run_in_thread(reactor, self.vm.close)
        self.assertEqual((await self.reply(other)).given, "10.219.0.6")
        await self.servers.stop(self.vm.port.tap)

    async def test_a_tap_that_is_down_for_a_while_is_served_again(self) -> None:
        await self.serve()
        for word in ("down", "up"):
            command = ["ip", "link", "set", tap_for(self.vm.port.tap), word]
            await run_in_thread(reactor, partial(subprocess.run, command, check=True))
        self.assertEqual((await self.reply(self.vm)).given, "10.219.0.5")

    async def test_it_says_what_is_missing(self) -> None:
        gone = attrs.evolve(self.guest, tap="inft-none")
        before = interfaces()
        with self.assertRaisesRegex(InfranetesError, 'Cannot find device "inft-none"'):
            await self.servers.serve(gone, self.network(self.vm), Names())
        gone = attrs.evolve(self.guest, attachment=Attachment(Path("/run/netns/inf-none")))
        with self.assertRaisesRegex(Unavailable, "namespace /run/netns/inf-none is not there"):
            await self.servers.serve(gone, self.network(self.vm), Names())
        await self.servers.stop("inft-none")
        self.assertEqual(interfaces(), before)
        other = self.daemon()
        await other.serve(self.guest, self.network(self.vm), Names())
        with self.assertRaisesRegex(Unavailable, f"dhc{self.vm.port.tap[3:]}: Device or resource busy"):
            await self.servers.serve(self.guest, self.network(self.vm), Names())

    async def test_a_flood_is_answered_a_few_times_and_keeps_nobody_waiting(self) -> None:
        await self.serve()
        other, guest = self.made("10.219.0.6")
        await self.servers.serve(guest, self.network(other), Names())
        flood = sent(self.vm.mac, message(self.vm.mac, DISCOVER))
        began, floods, answered = reactor.seconds(), 0, 0
        while reactor.seconds() - began < 0.5:
            for _ in range(100):
                self.vm.send(flood)
            floods += 100
            waited = reactor.seconds()
            other.send(sent(other.mac, message(other.mac, DISCOVER)))
            await deferLater(reactor, 0.02, lambda: None)
            self.assertLess(reactor.seconds() - waited, 0.5)
            answered += len(self.heard())
        seconds = reactor.seconds() - began
        self.assertGreater(floods, 1000)
        self.assertGreaterEqual(answered, AT_ONCE)
        self.assertLessEqual(answered, AT_ONCE + A_SECOND * (seconds + 1))
        self.assertTrue(self.heard(other))
        self.assertEqual((await self.reply(self.vm)).given, "10.219.0.5", "once it has stopped")
