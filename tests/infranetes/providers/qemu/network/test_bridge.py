# SPDX-License-Identifier: Apache-2.0
"""The pods' bridge and its table, on this machine's kernel."""

from __future__ import annotations

import json
import os
import subprocess
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import TestCase

from infranetes.firewalls.shares import table_of
from infranetes.providers.interface import ProviderContext
from infranetes.providers.qemu.launch.parts import make_parts
from infranetes.providers.qemu.network import bridge
from infranetes.providers.qemu.network.bridge import MAC, Bridge, BridgePort, open_tap, port_group
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.vm.paths import ProviderPaths
from infranetes_common import commands
from infranetes_common.commands import Command
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, Unavailable
from infranetes_common.reactors import installed
from tests.harness.needs import needs_netns

reactor = installed()
BRIDGE = "inftest1"
SUBNET = IPv4Network("10.217.0.0/24")


def said(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@needs_netns
class BridgeTests(TestCase):
    """The bridge and its table, on this machine's kernel."""

    def setUp(self) -> None:
        self.network = Bridge(reactor, BRIDGE, 1400)

    def tearDown(self) -> Any:
        return Deferred.fromCoroutine(self.network.remove())

    def addresses(self, name: str = BRIDGE) -> list[str]:
        [found] = json.loads(said("ip", "-j", "address", "show", "dev", name))
        return [f"{each['local']}/{each['prefixlen']}" for each in found["addr_info"]]

    def link(self, name: str) -> Any:
        [found] = json.loads(said("ip", "-d", "-j", "link", "show", "dev", name))
        return found

    def table(self, family: str) -> str:
        return said("nft", "list", "table", family, f"infranetes_{BRIDGE}")

    async def test_it_is_there_afterwards_however_often_it_is_set_up(self) -> None:
        for _ in range(2):
            await self.network.set_up(SUBNET, [])
            self.assertEqual(self.addresses(), ["10.217.0.1/24"])
            self.assertEqual(self.link(BRIDGE)["mtu"], 1400)
            self.assertIn("ip saddr 10.217.0.0/24 ip daddr != 10.217.0.0/24 masquerade", self.table("ip"))
        self.assertEqual(Path("/proc/sys/net/ipv4/ip_forward").read_text().strip(), "1")
        await self.network.remove()
        await self.network.remove()
        self.assertNotIn(BRIDGE, said("nft", "list", "tables"))
        self.assertNotIn(BRIDGE, said("ip", "link"))

    async def test_it_is_as_the_configuration_says(self) -> None:
        """The share of connections, and the networks that see the pods' own addresses."""
        context = ProviderContext(
            Path("/x"),
            Path("/run/x"),
            "c",
            "n",
            cluster_networks=(IPv6Network("fd00::/64"), IPv4Network("10.96.0.0/12")),
        )
        settings = QemuSettings(bridge=BRIDGE, mtu=1400, connections=300)
        parts = make_parts(reactor, settings, context, ProviderPaths(Path("/x"), Path("/run/x")))
        await parts.pod_network.bridge.set_up(SUBNET, [])
        self.assertEqual(self.link(BRIDGE)["mtu"], 1400)
        self.assertIn("ip saddr 10.217.0.0/24 ip daddr 10.96.0.0/12 return", self.table("ip"))
        shares = said("nft", "list", "table", "ip", table_of(BRIDGE))
        self.assertIn("ct count over 300 ", shares)

    async def test_a_node_whose_kernel_has_no_ipv6(self) -> None:
        proc = Path(self.mktemp())
        (proc / "net/ipv4").mkdir(parents=True)
        (proc / "net/ipv4/ip_forward").write_text("0\n")
        (proc / "net/ipv4/conf").symlink_to("/proc/sys/net/ipv4/conf")
        network = Bridge(reactor, BRIDGE, 1400, proc)
        await network.set_up(SUBNET, [])
        self.assertEqual((proc / "net/ipv4/ip_forward").read_text(), "1")
        tap = open_tap("inftesttap")
        self.addCleanup(os.close, tap)
        await network.join(BridgePort("inftesttap", "10.217.0.7"))
        self.assertIn("inftesttap", said("ip", "link", "show", "master", BRIDGE))

    async def test_another_subnet_replaces_the_one_before(self) -> None:
        await self.network.set_up(SUBNET, [])
        await self.network.set_up(IPv4Network("10.218.0.0/24"), [])
        self.assertEqual(self.addresses(), ["10.218.0.1/24"])
        self.assertNotIn("10.217", self.table("ip"))

    async def test_what_a_killed_daemon_left_half_set_up_is_completed(self) -> None:
        await self.network.set_up(SUBNET, [])
        said("ip", "address", "flush", "dev", BRIDGE)
        said("ip", "link", "set", "dev", BRIDGE, "down")
        said("nft", "delete", "table", "ip", f"infranetes_{BRIDGE}")
        await self.network.set_up(SUBNET, [])
        self.assertEqual(self.addresses(), ["10.217.0.1/24"])
        self.assertIn("masquerade", self.table("ip"))

    async def test_a_name_that_is_taken_is_refused_and_left_alone(self) -> None:
        said("ip", "link", "add", "name", BRIDGE, "type", "bridge")
        error: Any = await self.assertFailure(
            Deferred.fromCoroutine(self.network.set_up(SUBNET, [])), FailedPrecondition
        )
        self.assertIn("providers.qemu.bridge", str(error))
        self.assertEqual(self.addresses(), [])

    async def test_a_subnet_that_the_node_has_elsewhere_is_refused(self) -> None:
        error: Any = await self.assertFailure(
            Deferred.fromCoroutine(self.network.set_up(IPv4Network("127.0.0.0/8"), [])), InvalidArgument
        )
        self.assertIn("lo", str(error))

    async def test_an_overlays_device_may_have_the_subnets_first_address(self) -> None:
        said("ip", "link", "add", "name", "inftest2", "type", "bridge")
        self.addCleanup(said, "ip", "link", "delete", "inftest2")
        said("ip", "address", "add", "10.217.0.0/32", "dev", "inftest2")
        await self.network.set_up(SUBNET, [])
        said("ip", "address", "add", "10.217.0.4/32", "dev", "inftest2")
        await self.assertFailure(Deferred.fromCoroutine(self.network.set_up(SUBNET, [])), InvalidArgument)

    async def test_a_vm_may_send_as_itself_alone(self) -> None:
        await self.network.set_up(SUBNET, [BridgePort("infaaaa", "10.217.0.5")])
        port = BridgePort("infbbbb", "10.217.0.6")
        for _ in range(2):
            await self.network.allow(port)
        self.assertIn('"infbbbb" . 0a:58:0a:d9:00:06 . 10.217.0.6', self.table("bridge"))
        for _ in range(2):
            await self.network.forbid(port)
        self.assertNotIn("infbbbb", self.table("bridge"))
        self.assertIn('"infaaaa" . 0a:58:0a:d9:00:05 . 10.217.0.5', self.table("bridge"))

    async def test_an_agents_own_port_is_kept_as_the_one_of_all_is(self) -> None:
        await self.network.set_up(SUBNET, [])
        port = BridgePort("infbbbb", "10.217.0.6", 4242)
        for verb, there in ((self.network.allow, True), (self.network.forbid, False)):
            await verb(port)
            for family in ("ip", "bridge"):
                self.assertEqual("10.217.0.6 . 4242" in self.table(family), there, family)

    async def test_a_tap_joins_and_goes_with_its_descriptor(self) -> None:
        await self.network.set_up(SUBNET, [])
        tap = open_tap("inftesttap")
        try:
            await self.network.join(BridgePort("inftesttap", "10.217.0.7"))
            self.assertRaises(OSError, open_tap, "inftesttap")
            self.assertEqual(self.link("inftesttap")["master"], BRIDGE)
        finally:
            os.close(tap)
        self.assertNotIn("inftesttap", said("ip", "link"))

    async def test_what_the_kernel_does_with_a_vms_port(self) -> None:
        await self.network.set_up(SUBNET, [])
        tap = open_tap("inftesttap")
        self.addCleanup(os.close, tap)
        port = BridgePort("inftesttap", "10.217.0.7")
        for _ in range(2):
            await self.network.join(port)
            found = self.link("inftesttap")
            kept = found["linkinfo"]["info_slave_data"]
            self.assertEqual((found["mtu"], "UP" in found["flags"]), (1400, True))
            self.assertEqual(int(found["group"]), port_group(BRIDGE), "by which the table knows the ports")
            self.assertEqual((kept["learning"], kept["flood"]), (False, False))
            self.assertEqual(int(kept["group_fwd_mask"], 16), 0xFFFD)
            entries = json.loads(said("bridge", "-j", "fdb", "show", "dev", "inftesttap"))
            self.assertEqual([each["mac"] for each in entries if each["state"] == "static"], [port.mac])
            self.assertEqual(self.addresses("inftesttap"), [])

    async def test_a_port_whose_vm_ends_just_then_hinders_no_other(self) -> None:
        await self.network.set_up(SUBNET, [])
        ports = [BridgePort(f"inf0123456789a{at}", f"10.217.0.{at}") for at in (7, 8)]
        for port in ports:
            self.addCleanup(os.close, open_tap(port.tap))
            await self.network.join(port)
        join = self.network.join
        joined: list[BridgePort] = []

        async def fail_first(port: BridgePort) -> None:
            if port is ports[0]:
                raise Unavailable("its tap is gone")
            await join(port)
            joined.append(port)

        self.patch(self.network, "join", fail_first)
        with capturedLogs() as events:
            await self.network.set_up(SUBNET, ports)
        self.assertEqual(joined, ports[1:])
        self.assertIn("its tap is gone", " ".join(map(formatEvent, events)))

    async def test_a_kernel_that_knows_no_times_for_half_open_connections_is_told_and_will_do(self) -> None:
        run = self.network._nft

        async def without(script: str) -> None:
            if "ct timeout" in script:
                raise InfranetesError("No such file or directory")
            await run(script)

        self.patch(self.network, "_nft", without)
        with capturedLogs() as events:
            await self.network.set_up(SUBNET, [])
        self.assertIn("half-open connections of pods stay", " ".join(map(formatEvent, events)))
        self.assertIn("masquerade", self.table("ip"))
        self.table("bridge")

    async def test_what_a_pod_has_begun_is_forgotten_with_it(self) -> None:
        await self.network.set_up(SUBNET, [])
        ran: list[Command] = []
        check = commands.check

        async def noting(reactor: Any, command: Command) -> bytes:
            ran.append(command)
            return await check(reactor, command)

        self.patch(bridge, "check", noting)
        await self.network.forbid(BridgePort("infaaaa", "10.217.0.5"))
        self.assertIn(["conntrack", "-D", "-s", "10.217.0.5"], [command.words for command in ran])
        forgotten = b"".join(command.stdin for command in ran)
        for each in (b"begun { 10.217.0.5 . 0, ", b"refused-connections { 10.217.0.5 }"):
            self.assertIn(each, forgotten)

    async def test_somebody_elses_port_is_left_alone(self) -> None:
        await self.network.set_up(SUBNET, [])
        self.addCleanup(os.close, open_tap("inftestother"))
        said("ip", "link", "set", "dev", "inftestother", "master", BRIDGE)
        await self.network.set_up(SUBNET, [])
        self.assertEqual(self.link("inftestother")["group"], "default")

    async def test_what_the_kernel_does_with_the_bridge(self) -> None:
        for mtu in (1400, 1300, 1500):
            await Bridge(reactor, BRIDGE, mtu).set_up(SUBNET, [])
            found = self.link(BRIDGE)
            self.assertEqual((found["mtu"], found["address"], "UP" in found["flags"]), (mtu, MAC, True))
            self.assertEqual(found["linkinfo"]["info_data"]["mcast_snooping"], 0)
            self.assertEqual(self.addresses(), ["10.217.0.1/24"])
            self.assertEqual(Path(f"/proc/sys/net/ipv6/conf/{BRIDGE}/disable_ipv6").read_text(), "1\n")

    async def test_the_ports_that_are_there_follow_the_bridges_mtu(self) -> None:
        await self.network.set_up(SUBNET, [])
        name = "inf0123456789ab"
        tap = open_tap(name)
        self.addCleanup(os.close, tap)
        port = BridgePort(name, "10.217.0.7")
        await self.network.join(port)
        await Bridge(reactor, BRIDGE, 1300).set_up(SUBNET, [port])
        self.assertEqual((self.link(name)["mtu"], self.link(BRIDGE)["mtu"]), (1300, 1300))

    async def test_the_mtu_is_by_default_that_of_the_first_default_route(self) -> None:
        lo, first, second = (
            {"ifname": name, "address": "", "mtu": mtu}
            for name, mtu in (("lo", 65536), ("a", 9001), ("b", 1480))
        )
        for routes, mtu in ((["b", "a"], 1480), (["a"], 9001), ([], 1500), (["gone", "a"], 1500)):
            answer = json.dumps([{"dst": "default", "dev": name} for name in routes])
            self.patch(bridge, "check", lambda *_, answer=answer: succeed(answer))
            found = await Bridge(reactor, BRIDGE, 0)._uplink_mtu([lo, first, second])  # type: ignore[list-item]
            self.assertEqual(found, mtu, routes)
