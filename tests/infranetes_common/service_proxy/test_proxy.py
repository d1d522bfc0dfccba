# SPDX-License-Identifier: Apache-2.0
"""The service proxy in its own network namespace, with the kernel's tables and real connections."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from socket import AF_INET6, inet_pton

from twisted.trial.unittest import TestCase

from infranetes_common.concurrency import deferred, run_in_thread, sleep
from infranetes_common.errors import Unavailable
from infranetes_common.network_namespaces import thd_in_namespace
from infranetes_common.nftables_watch import open_socket
from infranetes_common.reactors import installed
from infranetes_common.service_proxy import kernel, proxy, rules, script
from infranetes_common.service_proxy.kernel import Kernel
from infranetes_common.service_proxy.proxy import ServiceProxy, Update, Version
from infranetes_common.service_proxy.rules import Key, Rule, Target
from infranetes_common.service_proxy.verdict import Outcome
from infranetes_common.wire import vmserver as messages
from tests.harness.needs import needs_netns, needs_programs
from tests.infranetes_common.service_proxy.namespace import Namespace

reactor = installed()
POD = "10.1.0.9"


def key(number: int, port: int = 80, protocol: str = "tcp", version: int = 4) -> Key:
    """Return a Service's key: 10.96.0.NUMBER or fd00::NUMBER."""
    return Key(version, f"10.96.0.{number}" if version == 4 else f"fd00::{number}", protocol, port)


def targets(*numbers: int, version: int = 4) -> tuple[Target, ...]:
    """Return endpoints at 10.1.0.NUMBER or fd01::NUMBER, port 8080."""
    return tuple(Target(f"10.1.0.{each}" if version == 4 else f"fd01::{each}", 8080) for each in numbers)


@needs_netns
class ProxyCase(TestCase):
    def setUp(self) -> None:
        self.space = Namespace()
        self.addCleanup(self.space.end)
        self.proxy = self.new_proxy()
        self.number = 0

    def new_proxy(self) -> ServiceProxy:
        """Return the proxy of a new agent."""
        name = self.space.name
        return ServiceProxy(Kernel(reactor, name, lambda: thd_in_namespace(name, open_socket)))

    async def put(
        self,
        changed: dict[Key, Rule],
        *removed: Key,
        all: bool = False,
        ranges: Sequence[str] | None = None,
    ) -> None:
        self.number += 1
        version = Version("table", self.number)
        await self.proxy.apply(Update(version, changed, removed, all, ranges=ranges))

    def nft(self, *arguments: str) -> str:
        command = ["ip", "netns", "exec", self.space.name, "nft", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def assert_served(self, number: int, *endpoints: int, times: int = 40) -> None:
        """Check that connections to a Service reach exactly these endpoints."""
        found = self.space.reached(f"10.96.0.{number}", 80, times)
        self.assertEqual(set(found), {f"10.1.0.{each}:8080" for each in endpoints})


class ConnectionTests(ProxyCase):
    def setUp(self) -> None:
        super().setUp()
        for number in (1, 2, 3):
            self.space.serve(f"10.1.0.{number}", 8080)

    @deferred
    async def test_they_are_spread_over_the_endpoints(self) -> None:
        await self.put({key(1): Rule(targets(1, 2, 3))})
        found = self.space.reached("10.96.0.1", 80, 90)
        self.assertEqual(set(found), {"10.1.0.1:8080", "10.1.0.2:8080", "10.1.0.3:8080"})
        self.assertGreater(min(found.values()), 10)  # out of 30; fails less than once in a million runs

    @deferred
    async def test_associations_of_sctp_are_too(self) -> None:
        await self.put({key(1, protocol="sctp"): Rule(targets(1, 2)), key(2): Rule(targets(1))})
        found = self.space.reached_by_sctp("10.96.0.1", 80, 40)
        self.assertEqual(set(found), {"10.1.0.1:8080", "10.1.0.2:8080"})
        self.assertEqual(set(self.space.reached("10.96.0.1", 80)), {"dropped"})  # reached() uses TCP
        self.assertEqual(set(self.space.reached_by_sctp("10.96.0.2", 80)), {"dropped"})

    @deferred
    async def test_they_follow_each_change(self) -> None:
        await self.put({key(1): Rule(targets(1))})
        self.assert_served(1, 1, times=3)
        await self.put({key(1): Rule(targets(2, 3))})
        self.assert_served(1, 2, 3)
        await self.put({key(1): Rule(targets(3)), key(2): Rule(targets(1))})
        self.assert_served(1, 3, times=3)
        self.assert_served(2, 1, times=3)

    @deferred
    async def test_without_endpoints_they_are_refused_or_dropped(self) -> None:
        await self.put({key(1): Rule(), key(2): Rule(dropped=True)})
        self.assertEqual(set(self.space.reached("10.96.0.1", 80)), {"refused"})
        self.assertEqual(set(self.space.reached("10.96.0.2", 80)), {"dropped"})

    @deferred
    async def test_other_ports_of_a_cluster_ip_are_refused(self) -> None:
        await self.put({key(1): Rule(targets(1), cluster_ip=True), key(2): Rule(targets(1))})
        self.assertEqual(set(self.space.reached("10.96.0.1", 81)), {"refused"})
        self.assertEqual(set(self.space.reached("10.96.0.2", 81)), {"dropped"})  # no Service: leaves the VM
        await self.put({}, key(1))
        self.assertEqual(set(self.space.reached("10.96.0.1", 81)), {"dropped"})

    @deferred
    async def test_addresses_that_a_service_might_have_are_dropped_while_none_has_them(self) -> None:
        rules = {key(1): Rule(targets(1), cluster_ip=True), key(2): Rule(targets(1))}
        await self.put(rules, ranges=["10.96.0.0/24", "fd00::/108", "10.1.0.4/32"])
        self.assert_served(1, 1, times=1)
        self.assert_served(2, 1, times=1)
        self.assertEqual(set(self.space.reached("10.96.0.1", 81)), {"refused"})
        for address in ("10.96.0.3", "fd00::3", "10.1.0.4"):  # at the last one the VM itself would refuse
            self.assertEqual(set(self.space.reached(address, 80)), {"dropped"})
        self.assertEqual(set(self.space.reached("10.1.0.5", 80)), {"refused"})
        await self.put({key(3): Rule(targets(1))})
        self.assert_served(3, 1, times=1)
        self.assertEqual(set(self.space.reached("10.1.0.4", 80)), {"dropped"})
        await self.put({}, ranges=[])
        self.assertEqual(set(self.space.reached("10.1.0.4", 80)), {"refused"})

    @deferred
    async def test_what_is_refused_and_dropped_is_counted(self) -> None:
        await self.put({key(1): Rule(), key(2): Rule(dropped=True), key(3): Rule(targets(1))})
        self.space.reached("10.96.0.1", 80, 3)
        self.space.reached("10.96.0.2", 80)
        self.space.reached("10.96.0.3", 80)
        found = await self.proxy.report(None)
        self.assertEqual((found.rules, found.counters["refused"]), (3, 3))
        self.assertGreater(found.counters["dropped"], 0)

    @deferred
    async def test_the_verdict_of_an_address_is_what_becomes_of_connections(self) -> None:
        await self.put(
            {
                key(1): Rule(targets(1), cluster_ip=True, affinity_seconds=10),
                key(2): Rule(),
                key(3): Rule(targets(1), source_ranges=("192.0.2.0/24",)),
            },
            ranges=["10.96.0.0/24"],
        )
        for asked, outcome, happens in (
            (key(1), Outcome.TRANSLATED, "10.1.0.1:8080"),
            (key(1, 81), Outcome.OTHER_PORT, "refused"),
            (key(2), Outcome.REFUSED, "refused"),
            (key(3), Outcome.DROPPED, "dropped"),
            (key(4), Outcome.UNALLOCATED, "dropped"),
            (Key(4, "10.1.0.1", "tcp", 8080), Outcome.UNTOUCHED, "10.1.0.1:8080"),
        ):
            found = (await self.proxy.report(asked)).verdict
            assert found is not None
            self.assertEqual(found.outcome, outcome)
            self.assertEqual(set(self.space.reached(asked.address, asked.port)), {happens})
            if outcome is Outcome.TRANSLATED:
                self.assertEqual((found.endpoints, found.affinity_seconds), (targets(1), 10))

    @deferred
    async def test_what_somebody_has_taken_away_is_mended_before_a_verdict(self) -> None:
        await self.put({key(1): Rule(targets(1)), key(2): Rule(dropped=True)})
        for name, number, happens in (("services", 1, "10.1.0.1:8080"), ("refusals", 2, "dropped")):
            self.nft("flush", "map", "ip", script.NAME, name)
            found = (await self.proxy.report(key(number))).verdict
            assert found is not None
            self.assertNotEqual(found.outcome, Outcome.UNTOUCHED)
            self.assertEqual(set(self.space.reached(f"10.96.0.{number}", 80)), {happens})

    @deferred
    async def test_source_ranges_are_compared_with_the_pod_s_address(self) -> None:
        await self.put(
            {
                key(1): Rule(targets(1), source_ranges=("192.0.2.0/24", f"{POD}/32")),
                key(2): Rule(targets(1), source_ranges=("192.0.2.0/24",)),
            }
        )
        self.assert_served(1, 1, times=1)
        self.assertEqual(set(self.space.reached("10.96.0.2", 80)), {"dropped"})

    @deferred
    async def test_with_affinity_all_go_to_one_endpoint_though_others_come_and_go(self) -> None:
        for number in (1, 2, 3):
            self.space.serve(f"fd01::{number}", 8080)
        for version, address in ((4, "10.96.0.1"), (6, "fd00::1")):
            its = key(1, version=version)
            before: dict[str, str] = {}
            for numbers in ((1, 2, 3), (2, 3), (1, 2, 3), (1, 2), (2, 3, 1), (3,), (1, 2, 3)):
                endpoints = targets(*numbers, version=version)
                await self.put({its: Rule(endpoints, affinity_seconds=100)})
                (now,) = self.space.reached(address, 80, 20)
                chosen = {str(number): now for number in numbers if f"{number}:8080" in now}
                self.assertEqual(len(chosen), 1, "it goes to an endpoint of now")
                if before and before.keys() <= set(map(str, numbers)):
                    self.assertEqual(chosen, before, "it stays there")
                before = chosen

    @deferred
    async def test_affinity_ends_when_it_is_not_used(self) -> None:
        await self.put({key(1): Rule(targets(1, 2, 3), affinity_seconds=100)})
        self.space.reached("10.96.0.1", 80)
        self.assertIn("10.96.0.1", self.nft("list", "map", "ip", script.NAME, "affinity"))
        self.nft("flush", "map", "ip", script.NAME, "affinity")  # as its timeout would do
        self.assertEqual(len(self.space.reached("10.96.0.1", 80, 5)), 1)

    @deferred
    async def test_ipv6(self) -> None:
        self.space.serve("fd01::1", 8080)
        await self.put(
            {
                key(1, version=6): Rule(targets(1, version=6), cluster_ip=True),
                key(2, version=6): Rule(targets(1, version=6), affinity_seconds=10),
                key(3, version=6): Rule(),
            }
        )
        self.assertEqual(set(self.space.reached("fd00::1", 80)), {"fd01::1:8080"})
        self.assertEqual(set(self.space.reached("fd00::1", 81)), {"refused"})
        self.assertEqual(set(self.space.reached("fd00::2", 80, 3)), {"fd01::1:8080"})
        self.assertEqual(set(self.space.reached("fd00::3", 80)), {"refused"})

    @needs_programs("conntrack")
    @deferred
    async def test_a_sender_of_udp_does_not_stay_with_an_endpoint_that_is_gone(self) -> None:
        for number in (4, 5):
            self.space.serve(f"10.1.0.{number}", 8080, socket.SOCK_DGRAM)
        await self.put({key(1, 53, "udp"): Rule(targets(4)), key(2, 53, "udp"): Rule(targets(4))})

        def ask(sender: socket.socket) -> str:
            sender.send(b"?")
            return sender.recv(100).decode()

        def connected(address: str) -> socket.socket:
            sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sender.settimeout(5)
            sender.connect((address, 53))
            return sender

        one = self.space.inside(lambda: connected("10.96.0.1"))
        other = self.space.inside(lambda: connected("10.96.0.2"))
        with one, other:
            self.assertEqual((ask(one), ask(other)), ("10.1.0.4:8080", "10.1.0.4:8080"))
            await self.put({key(1, 53, "udp"): Rule(targets(5))})
            self.assertEqual((ask(one), ask(other)), ("10.1.0.5:8080", "10.1.0.4:8080"))


class TableTests(ProxyCase):
    """The kernel's tables, according to what the next agent reads there."""

    MANY = {key(number): Rule(targets(1, 2), cluster_ip=number % 2 == 0) for number in range(1, 30)}  # noqa: RUF012

    async def assert_in_kernel(self, expected: dict[Key, Rule]) -> None:
        found = await Kernel(reactor, self.space.name).read(4)
        assert found is not None
        self.assertEqual(
            {each: set(its.numbered.values()) for each, its in found.placements.items()},
            {each: set(its.endpoints) for each, its in expected.items()},
        )
        self.assertEqual(
            found.cluster_ips, {each.address for each, its in expected.items() if its.cluster_ip}
        )

    @deferred
    async def test_an_update_of_all_ends_what_is_not_in_it(self) -> None:
        await self.put(self.MANY)
        await self.put({key(1): Rule(targets(3))}, all=True)
        await self.assert_in_kernel({key(1): Rule(targets(3))})

    @deferred
    async def test_an_update_of_all_comes_in_parts(self) -> None:
        await self.put(self.MANY)
        version = Version("other", 7)
        await self.proxy.apply(Update(version, {key(1): Rule(targets(1))}, all=True, more=True))
        self.assertNotEqual(self.proxy.version, version)
        await self.proxy.apply(Update(version, {key(2): Rule(targets(2))}, all=True))
        self.assertEqual(self.proxy.version, version)
        await self.assert_in_kernel({key(1): Rule(targets(1)), key(2): Rule(targets(2))})

    @deferred
    async def test_parts_of_an_update_that_was_broken_off_do_not_count_for_the_next(self) -> None:
        part = {key(1): Rule(targets(1))}
        await self.proxy.apply(Update(Version("table", 1), part, all=True, more=True))
        await self.proxy.apply(Update(Version("table", 2), {key(2): Rule(targets(2))}, all=True))
        await self.assert_in_kernel({key(2): Rule(targets(2))})

    @deferred
    async def test_numbers_of_endpoints_are_read_as_they_were_put(self) -> None:
        for numbers in ((1, 2, 3, 4), (4, 2), (4, 5), (6, 4, 5, 1)):
            await self.put({key(1): Rule(targets(*numbers), affinity_seconds=9), key(2): Rule(targets(1))})
            found = await Kernel(reactor, self.space.name).read(4)
            assert found is not None
            self.assertEqual(found.placements, self.proxy._placed)
            self.assertEqual(set(found.placements[key(1)].numbered.values()), set(targets(*numbers)))
        self.assertEqual(found.placements[key(1)].slots, targets(5, 6, 1, 4))

    @deferred
    async def test_addresses_are_read_as_they_were_put_whatever_form_they_have(self) -> None:
        """IPv6 addresses with an IPv4 address in them have several forms."""
        texts = (
            "::ffff:192.0.2.1",
            "::192.0.2.1",
            "64:ff9b::192.0.2.1",
            "::",
            "::1",
            "1:0:0:2::",
            "1::2:0:0:3",
        )
        packed = [inet_pton(AF_INET6, text) for text in texts]
        endpoint = [messages.ServiceEndpoint(address=each, port=8080) for each in packed]
        changed = {}
        for each in packed:
            place = messages.ServiceKey(address=each, protocol=6, port=80)
            changed[rules.key(place)] = rules.rule(messages.ServiceRule(key=place, endpoints=endpoint))
        await self.put(changed, ranges=["::ffff:192.0.2.0/120", "64:ff9b::/96", "::192.0.2.4/127"])
        found = await Kernel(reactor, self.space.name).read(6)
        assert found is not None
        self.assertEqual(found.placements, self.proxy._placed)
        self.assertEqual(found.ranges, self.proxy._ranges[6])
        self.assertFalse(await self.proxy.mend())

    @deferred
    async def test_chains_that_no_rule_uses_do_not_accumulate(self) -> None:
        """Whoever may change a Service's affinity has a new chain made in each VM."""
        self.patch(proxy, "SPARE_CHAINS", 5)
        for seconds in range(1, 30):
            await self.put({key(1): Rule(targets(1), affinity_seconds=seconds), key(2): Rule(targets(1, 2))})
        chains = re.findall("chain ((?:keep|spread)-[0-9-]+)", self.nft("list", "table", "ip", script.NAME))
        self.assertLessEqual(len(chains), 14)
        self.assertLessEqual({"keep-1-29", "spread-2"}, set(chains))
        await self.assert_in_kernel(
            {key(1): Rule(targets(1), affinity_seconds=29), key(2): Rule(targets(1, 2))}
        )
        self.assertFalse(await self.proxy.mend())

    @deferred
    async def test_many_keys_are_changed_in_batches(self) -> None:
        self.patch(proxy, "BATCH", 7)
        await self.put(self.MANY)
        await self.assert_in_kernel(self.MANY)
        await self.put({key(1): Rule(targets(3))}, *(each for each in self.MANY if each != key(1)))
        await self.assert_in_kernel({key(1): Rule(targets(3))})

    @deferred
    async def test_overlapping_ranges_are_one_and_an_update_of_all_without_any_ends_them(self) -> None:
        given = ["10.96.0.0/16", "10.96.4.0/24", "10.98.0.9/32", "fd00::/108", "fd00::1/128"]
        await self.put({}, ranges=given)
        for version, expected in ((4, ("10.96.0.0/16", "10.98.0.9/32")), (6, ("fd00::/108",))):
            found = await Kernel(reactor, self.space.name).read(version)
            assert found is not None
            self.assertEqual(found.ranges, expected)
        await self.put({}, all=True)
        for version in (4, 6):
            found = await Kernel(reactor, self.space.name).read(version)
            assert found is not None
            self.assertEqual(found.ranges, ())

    @deferred
    async def test_a_new_agent_changes_only_what_differs(self) -> None:
        await self.put(self.MANY)
        handles = self.nft("-a", "list", "table", "ip", script.NAME)
        self.proxy = self.new_proxy()
        self.assertEqual(self.proxy.version, Version())
        await self.put(self.MANY, all=True)
        self.assertEqual(self.nft("-a", "list", "table", "ip", script.NAME), handles)

    @deferred
    async def test_tables_that_somebody_removes_or_changes_are_mended(self) -> None:
        await self.put(self.MANY, ranges=["10.96.0.0/12"])
        self.assertFalse(await self.proxy.mend())
        for command in (
            ("flush", "ruleset"),
            ("flush", "map", "ip", script.NAME, "services"),
            ("flush", "chain", "ip", script.NAME, "ranges"),
            ("delete", "element", "ip", script.NAME, "endpoints", "{ 10.96.0.1 . tcp . 80 . 0 }"),
            ("add", "element", "ip", script.NAME, "cluster-ips", "{ 10.97.0.1 }"),
            ("delete", "element", "ip", script.NAME, "cluster-ips", "{ 10.96.0.2 }"),
            ("add", "element", "ip", script.NAME, "refusals", "{ 10.97.0.1 . tcp . 1 : goto dropped }"),
        ):
            self.nft(*command)
            await self.proxy.mend()
            await self.assert_in_kernel(self.MANY)
            self.assertIn("10.96.0.0/12", self.nft("list", "chain", "ip", script.NAME, "ranges"))
        self.assertEqual(self.proxy.version, Version("table", 1))

    @deferred
    async def test_tables_that_somebody_removes_are_soon_back_by_themselves(self) -> None:
        self.proxy.watch.begin()
        self.addCleanup(self.proxy.watch.end)
        await self.put(self.MANY, ranges=["10.96.0.0/12"])
        await run_in_thread(reactor, self.nft, "flush", "ruleset")
        while script.NAME not in await run_in_thread(reactor, self.nft, "list", "tables", "ip6"):
            await sleep(reactor, 0.02)
        await self.put({})  # returns once that is done
        await self.assert_in_kernel(self.MANY)

    @deferred
    async def test_what_the_kernel_refuses_is_told_and_the_next_update_of_all_begins_anew(self) -> None:
        await self.put(self.MANY)
        self.nft("delete", "table", "ip", script.NAME)
        await self.assertFailure(self.start_put({key(1): Rule(targets(3))}), Unavailable)
        self.assertEqual(self.proxy.version, Version())
        await self.put(self.MANY, all=True)
        await self.assert_in_kernel(self.MANY)
        self.assertEqual(self.proxy.version, Version("table", 3))

    @deferred
    async def start_put(self, changed: dict[Key, Rule]) -> None:
        await self.put(changed)

    @deferred
    async def test_a_table_that_can_not_be_listed_for_once_stays_in_force(self) -> None:
        await self.put(self.MANY)
        handles = self.nft("-a", "list", "table", "ip", script.NAME)
        kernel = Kernel(reactor, self.space.name)
        self.proxy = ServiceProxy(kernel)
        inside, kernel._inside = kernel._inside, ["false"]
        await self.assertFailure(self.start_put(self.MANY), Unavailable)
        kernel._inside = inside
        self.assertEqual(self.nft("-a", "list", "table", "ip", script.NAME), handles)
        await self.put(self.MANY, all=True)
        self.assertEqual(self.nft("-a", "list", "table", "ip", script.NAME), handles)

    @deferred
    async def test_a_table_that_can_never_be_listed_is_made_anew(self) -> None:
        await self.put(self.MANY)
        broken = Path(self.mktemp())
        fails = '[ "$2 $3" = "list table" ] && exit 1'
        broken.write_text(f'#!/bin/sh\n{fails}\nexec ip netns exec {self.space.name} "$@"\n')
        broken.chmod(0o755)
        kernel = Kernel(reactor, self.space.name)
        kernel._inside = [str(broken.absolute())]
        self.assertEqual(await self.outcomes(kernel, 3), ["Unavailable", "Unavailable", "None"])

    async def outcomes(self, kernel: Kernel, times: int) -> list[str]:
        found = []
        for _ in range(times):
            try:
                found.append(str(await kernel.read(4)))
            except Unavailable:
                found.append("Unavailable")
        return found

    @deferred
    async def test_tables_of_others_are_left_alone(self) -> None:
        self.nft("add table ip filter; add chain ip filter mine { type filter hook output priority 0; }")
        await self.put(self.MANY)
        await self.proxy.mend()
        self.assertIn("chain mine", self.nft("list", "table", "ip", "filter"))


class LimitTests(TestCase):
    def raised(self, memory_bytes: int, before: int) -> int:
        """Return the kernel's limit of tracked connections then."""
        file = Path(self.mktemp())
        file.write_text(f"{before}\n")
        self.patch(kernel, "MAX_FLOWS_FILE", file)
        Kernel(reactor).thd_raise_limits(memory_bytes)
        return int(file.read_text())

    def test_more_connections_are_followed_in_a_larger_vm_and_never_fewer_than_before(self) -> None:
        for memory_bytes, before, after in (
            (256 << 20, 2048, 32_768),
            (2 << 30, 16_384, 131_072),
            (256 << 30, 262_144, 1_048_576),
            (256 << 20, 262_144, 262_144),
        ):
            self.assertEqual(self.raised(memory_bytes, before), after)

    def test_a_kernel_without_that_limit_is_left_as_it_is(self) -> None:
        self.patch(kernel, "MAX_FLOWS_FILE", Path(self.mktemp()))
        Kernel(reactor).thd_raise_limits(1 << 30)
