# SPDX-License-Identifier: Apache-2.0
"""Pods' firewalls on the node change, and outlive the daemon: real packets between namespaces."""

from __future__ import annotations

import subprocess
from collections.abc import Awaitable, Callable
from ipaddress import ip_network
from pathlib import Path

from infranetes.providers.qemu.network.bridge import Bridge
from infranetes.providers.qemu.network.firewalls import BridgeFirewalls
from infranetes.providers.qemu.network.pod_network import PodNetwork
from infranetes_common.concurrency import run_in_thread, sleep
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.pod_firewall import CLOSED, OPEN, Allowed, PodFirewall, Ports
from tests.infranetes.providers.qemu.network.firewall_case import (
    NODE,
    SUBNET,
    FirewallCase,
    allowed,
    blocking,
    reactor,
)
from tests.support.failures import FailureAssertions
from tests.support.pod_namespaces import Datagrams, Pod

EVERYWHERE = ip_network("0.0.0.0/0")


class ChangeTests(FirewallCase):
    """Firewalls that change."""

    async def test_a_change_cuts_connections_that_there_are(self) -> None:
        for server in (self.b, self.outside):
            await self.open_all()
            for client_side, closed in ((True, PodFirewall(egress=())), (False, PodFirewall(ingress=()))):
                if not client_side and server is self.outside:
                    continue
                pod = self.a if client_side else self.b
                made = await self.connection(self.a, server)
                talk = await blocking(Datagrams, self.a, server, 5000)
                self.assertTrue(await blocking(talk.there, True) and await blocking(talk.back, True))
                await self.firewalls.set(pod.port, closed)
                self.assertFalse(await blocking(made.carries, False))
                self.assertFalse(await blocking(made.carries, False, True))
                self.assertFalse(await blocking(talk.there, False))
                self.assertFalse(await blocking(talk.back, False), "an answer to what is forbidden by now")
                await self.firewalls.set(pod.port, OPEN)
                self.assertTrue(await blocking(made.carries, True), "it goes on once it may")
                self.assertTrue(await blocking(talk.there, True) and await blocking(talk.back, True))
                made.end()
                talk.end()

    async def test_a_change_leaves_what_is_allowed_still(self) -> None:
        await self.open_all()
        made = await self.connection(self.b, self.a)
        for firewall in (PodFirewall(ingress=(allowed("10.221.0.6/32"),), egress=()), OPEN,
                         PodFirewall(ingress=(allowed("10.221.0.0/24"),))):  # fmt: skip
            for _ in range(2):
                await self.firewalls.set(self.a.port, firewall)
                for back in (False, True):
                    self.assertTrue(await blocking(made.carries, True, back))
        await self.firewalls.set(self.a.port, CLOSED)
        self.assertFalse(await blocking(made.carries, False))

    async def test_the_connection_from_the_node_is_never_cut(self) -> None:
        made = await self.connection(self.node, self.a)
        for firewall in (CLOSED, OPEN, CLOSED):
            await self.firewalls.set(self.a.port, firewall)
            self.assertTrue(await blocking(made.carries, True))
            self.assertTrue(await blocking(made.carries, True, True))
        await self.firewalls.forget(self.a.port)
        self.assertTrue(await blocking(made.carries, True, True))

    async def test_one_pods_firewall_is_not_anothers(self) -> None:
        await self.open_all()
        made = await self.connection(self.b, self.c)
        for change in (lambda: self.set(self.a, [], []), lambda: self.firewalls.forget(self.a.port)):
            await change()
            self.assertTrue(await blocking(made.carries, True))
            await self.reaches(self.c, self.b)
            await self.cannot_reach(self.a, self.b)
            await self.cannot_reach(self.b, self.a)

    async def test_a_pod_that_is_forgotten_is_closed_and_leaves_nothing(self) -> None:
        await self.open_all()
        await self.set(self.a, ingress=[allowed("10.221.0.6/32", ports=(Ports("TCP", 1, 2),))])
        for _ in range(2):
            await self.firewalls.forget(self.a.port)
            await self.cannot_reach(self.a, self.b)
            await self.cannot_reach(self.b, self.a)
        self.assertNotIn(self.a.port.tap, self.tables())
        self.assertNotIn(self.a.address, self.tables())

    async def test_what_nft_refuses_changes_nothing(self) -> None:
        await self.open_all()
        before = self.tables()
        with self.assertRaises(InfranetesError):
            await self.set(self.a, ingress=[Allowed((EVERYWHERE,), (Ports("NONSENSE", 1, 1),))])
        self.assertEqual(self.tables(), before)
        await self.set(self.b, ingress=[])
        await self.reaches(self.c, self.a)

    async def test_tables_that_somebody_took_away_come_back(self) -> None:
        await self.open_all()
        await self.set(self.a, ingress=[])
        before = self.tables()
        for family in ("bridge", "ip"):
            for mend in (self.firewalls.restore, lambda: self.firewalls.set(self.b.port, OPEN),
                         lambda: self.firewalls.forget(self.c.port), lambda: self.set(self.c)):  # fmt: skip
                delete = ["nft", "delete", "table", family, f"infranetes_{self.bridge}_firewalls"]
                await blocking(subprocess.run, delete, check=True)
                await mend()
                await self.cannot_reach(self.b, self.a)
                await self.reaches(self.a, self.b)
        self.assertEqual(sorted(self.tables().split()), sorted(before.split()))

    async def test_tables_that_somebody_takes_away_are_soon_back_by_themselves(self) -> None:
        await self.open_all()
        await self.set(self.a, ingress=[])
        before = self.tables()
        for words in (
            ["delete", "table", "ip", f"infranetes_{self.bridge}_firewalls"],
            ["flush", "table", "bridge", f"infranetes_{self.bridge}_firewalls"],
            ["flush", "chain", "ip", f"infranetes_{self.bridge}_firewalls", "forward-ingress"],
        ):
            self.firewalls.watch.begin()
            await blocking(subprocess.run, ["nft", *words], check=True)
            await self.until(lambda: run_in_thread(reactor, self.tables), before)
            self.firewalls.watch.end()  # so that the next event is not the second in a row
            await self.firewalls.restore()  # returns once that is done
        await self.cannot_reach(self.b, self.a)

    async def until(self, look: Callable[[], Awaitable[str]], expected: str) -> None:
        """Wait until the tables are as they were, in any order."""
        while sorted((await look()).split()) != sorted(expected.split()):
            await sleep(reactor, 0.02)

    async def test_the_next_daemon_changes_nothing_but_what_it_knows_better(self) -> None:
        await self.open_all()
        made = await self.connection(self.b, self.c)
        known = {self.a.port: CLOSED, self.b.port: OPEN, self.c.port: OPEN}
        await BridgeFirewalls(reactor, self.bridge).set_up(known)
        self.assertTrue(await blocking(made.carries, True))
        await self.cannot_reach(self.b, self.a)

    async def test_without_the_tables_all_is_open(self) -> None:
        for _ in range(2):
            await self.firewalls.remove()
            await self.firewalls.restore()
            await self.firewalls.forget(self.a.port)
        await self.reaches(self.a, self.b)
        self.assertNotIn("firewalls", subprocess.check_output(["nft", "list", "tables"], text=True))

    def tables(self) -> str:
        return "".join(
            subprocess.run(
                ["nft", "list", "table", family, f"infranetes_{self.bridge}_firewalls"],
                text=True,
                check=False,
                capture_output=True,
            ).stdout
            for family in ("bridge", "ip")
        )


class PodNetworkTests(FailureAssertions, FirewallCase):
    """Firewalls as the provider keeps them."""

    async def setUp(self) -> None:
        await super().setUp()
        self.directories = {each.port: Path(self.mktemp()).absolute() for each in (self.a, self.b, self.c)}
        for directory in self.directories.values():
            directory.mkdir()
        self.pods = self.next_daemon()
        await self.pods.set_up(self.directories)

    def next_daemon(self, enforcing: bool = True) -> PodNetwork:
        path = Path(self.mktemp()).absolute()
        firewalls = BridgeFirewalls(reactor, self.bridge) if enforcing else None
        return PodNetwork(reactor, Bridge(reactor, self.bridge, 1500), str(SUBNET), path, firewalls)

    async def put(self, pod: Pod, firewall: PodFirewall) -> None:
        await self.pods.set_firewall(pod.port, self.directories[pod.port], firewall)

    async def test_a_firewall_outlives_the_daemon_and_the_tables(self) -> None:
        """The daemon is killed, and the tables are deleted before the next one starts."""
        for _ in range(2):
            await self.put(self.a, PodFirewall(egress=(allowed("10.221.0.6/32"),)))
            await self.put(
                self.b, PodFirewall(ingress=(allowed("10.221.0.5/32", ports=(Ports("TCP", 80, 90),)),))
            )
        await BridgeFirewalls(reactor, self.bridge).remove()
        self.pods = self.next_daemon()
        await self.pods.set_up(self.directories)
        await self.reaches(self.a, self.b, 85)
        await self.cannot_reach(self.a, self.b, 91)
        await self.cannot_reach(self.a, self.c)  # whose firewall was never set

    async def test_a_vm_is_closed_though_the_daemon_was_killed_before_its_firewall_was_said(self) -> None:
        await self.put(self.a, OPEN)
        self.pods = self.next_daemon()
        await self.pods.set_up(self.directories)
        await self.cannot_reach(self.a, self.b)
        await self.cannot_reach(self.b, self.a)
        await self.reaches(self.node, self.b)

    async def test_a_file_that_cannot_be_read_closes_its_pod_alone(self) -> None:
        for each in (self.a, self.b, self.c):
            await self.put(each, OPEN)
        for content in (
            b"",
            b"[]",
            b'{"ingress": null}',
            b'{"ingress": [{"networks": ["x"]}], "egress": null}',
            b"\xff",
        ):
            (self.directories[self.a.port] / "firewall.json").write_bytes(content)
            await self.next_daemon().set_up(self.directories)
            await self.cannot_reach(self.b, self.a)
        await self.reaches(self.b, self.c)
        self.flushLoggedErrors()

    async def test_a_pod_that_has_left_leaves_its_address_closed(self) -> None:
        for each in (self.a, self.b):
            await self.put(each, OPEN)
        for _ in range(2):
            await self.pods.leave(self.a.port)
        heir = await blocking(Pod, f"{self.bridge}000d", self.a.address, NODE)
        self.addCleanup(heir.end)
        await blocking(self.a.end)
        await self.pods.join(heir.port)
        await self.cannot_reach(heir, self.b)
        await self.cannot_reach(self.b, heir)

    async def test_a_daemon_that_is_to_enforce_nothing_opens_all_and_refuses(self) -> None:
        await self.put(self.a, CLOSED)
        self.pods = self.next_daemon(enforcing=False)
        await self.pods.set_up(self.directories)
        await self.reaches(self.a, self.b)
        for _ in range(2):
            words = await self.fails(FailedPrecondition, self.put(self.a, CLOSED))
            self.assertIn("network_policies", words)
        await self.pods.leave(self.a.port)

    async def test_what_fails_is_said_and_can_be_tried_again(self) -> None:
        await self.put(self.b, OPEN)
        await self.put(self.a, OPEN)
        directory = self.directories.pop(self.a.port)
        self.directories[self.a.port] = directory / "gone"
        words = await self.fails(Unavailable, self.put(self.a, CLOSED))
        self.assertIn(self.a.address, words)
        await self.reaches(self.a, self.b)
        self.directories[self.a.port] = directory
        await self.put(self.a, CLOSED)
        await self.cannot_reach(self.a, self.b)

    async def test_the_next_daemon_has_what_was_in_force_not_what_could_not_be(self) -> None:
        for each in (self.a, self.b):
            await self.put(each, OPEN)
        wrong = PodFirewall(ingress=(Allowed((EVERYWHERE,), (Ports("NONSENSE", 1, 1),)),))
        for each in (self.a, self.c):
            for _ in range(2):
                await self.fails(Unavailable, self.put(each, wrong))
        self.pods = self.next_daemon()
        await self.pods.set_up(self.directories)
        await self.reaches(self.b, self.a)
        await self.cannot_reach(self.b, self.c)  # whose firewall was never in force
