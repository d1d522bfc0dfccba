# SPDX-License-Identifier: Apache-2.0
"""Of all that a VM sends, its requests alone are handed to the daemon, and the rest goes its way."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator

from twisted.trial.unittest import TestCase

from infranetes.providers.qemu.dhcp.tap import LONGEST, receive, send, tap_for
from infranetes.providers.qemu.network.bridge import open_tap
from infranetes.providers.qemu.network.namespaces import Namespaces
from infranetes_common.concurrency import run_in_thread
from infranetes_common.reactors import installed
from tests.harness.needs import needs_netns
from tests.support.dhcp import DISCOVER, message, sent
from tests.support.frames import ARP, IPV4, IPV6, TapHost, arp, ethernet, fragment

reactor = installed()
OWN = "10.219.0.5"
OTHER = "0a:58:0a:db:00:06"


@needs_netns
class TapTests(TestCase):
    """A VM's tap on no bridge, and the daemon's."""

    async def setUp(self) -> None:
        self.guest = TapHost(f"inft{secrets.token_hex(4)}", OWN)
        self.addCleanup(self.guest.close)
        tap = self.guest.port.tap
        subprocess.run(["ip", "link", "set", tap, "up"], check=True)
        self.tap = open_tap(tap_for(tap))
        self.addCleanup(run_in_thread, reactor, os.close, self.tap)
        for _ in range(2):
            await Namespaces(reactor).divert_dhcp(None, tap, tap_for(tap))

    def heard(self) -> list[bytes]:
        found: list[bytes] = []
        while True:
            try:
                found.append(receive(self.tap))
            except BlockingIOError:
                return found

    def others(self) -> Iterator[tuple[str, bytes]]:
        """Yield frames that are no requests of the VM's."""
        own, said = self.guest.mac, message(self.guest.mac, DISCOVER)
        good = sent(own, said)
        yield "ARP", ethernet(OTHER, own, ARP, arp(1, (own, OWN), (OTHER, "10.219.0.1")))
        yield "IPv6", ethernet(OTHER, own, IPV6, b"\x60" + good[15:])
        yield "another port", sent(own, said, ports=(67, 68))
        yield "TCP", good[:23] + b"\x06" + good[24:]
        yield "a fragment", ethernet(OTHER, own, IPV4, fragment(OWN, "10.219.0.1", 1, 0, 200))
        yield "a last fragment", good[:20] + b"\0\x04" + good[22:]
        yield "nothing but Ethernet", ethernet(OTHER, own, IPV4, b"")

    def test_its_requests_are_heard_whole_and_once(self) -> None:
        frame = sent(self.guest.mac, message(self.guest.mac, DISCOVER))
        self.guest.send(frame)
        self.assertEqual(self.heard(), [frame])

    def test_all_else_is_not_heard(self) -> None:
        for what, frame in self.others():
            self.guest.send(frame)
            self.assertEqual(self.heard(), [], what)

    def test_what_is_sent_reaches_the_vm_alone(self) -> None:
        frame = ethernet(self.guest.mac, OTHER, IPV4, bytes(300))
        send(self.tap, frame)
        self.assertIn(frame, self.guest.received())
        self.assertEqual(self.heard(), [])

    def test_what_is_too_long_is_cut_off(self) -> None:
        self.guest.send(sent(self.guest.mac, message(self.guest.mac, DISCOVER).ljust(2 * LONGEST)))
        [found] = self.heard()
        self.assertLessEqual(len(found), LONGEST)

    def test_what_waits_is_bounded(self) -> None:
        frame = sent(self.guest.mac, message(self.guest.mac, DISCOVER))
        for _ in range(1000):
            self.guest.send(frame)
        self.assertIn(len(self.heard()), range(1, 65))
        self.guest.send(frame)
        self.assertIn(frame, self.heard(), "what comes later is heard")
