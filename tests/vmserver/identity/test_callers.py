# SPDX-License-Identifier: Apache-2.0
"""What those that have no certificate can take of the agent, and what they can't."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from ipaddress import ip_network
from typing import Any, cast

from twisted.internet import reactor
from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common.concurrency import sleep
from infranetes_common.wire import vmserver
from infranetes_common.wire.vmserver_rpcs import AgentStub
from tests.harness.durations import slow
from tests.support import flood as flooding
from tests.support.waiting import until
from tests.vmserver.harness import SANDBOX, Agent, run_directory
from tests.vmserver.pki import Authority
from vmserver.identity import tls
from vmserver.identity.callers import BURST_SECONDS, NEWCOMERS, REMEMBERED, Callers, source_of

RATE = 4.0
BURST = int(RATE * BURST_SECONDS)
NODE, ONE, OTHER = "192.0.2.1", "192.0.2.7", "192.0.2.8"


class _Transport(StringTransport):
    """A connection's transport, which knows how it was ended."""

    ended = False

    def abortConnection(self) -> None:
        self.ended = True


class FactoryTests(SynchronousTestCase):
    """The listener's factory, under a clock of the test's own."""

    def setUp(self) -> None:
        self.clock = Clock()
        context = tls.context(Authority().identity(SANDBOX))
        self.factory = tls.BoundedTLSFactory(
            self.clock, context, Factory.forProtocol(Protocol), connections=2, handshakes=4
        )

    def call(self, host: str) -> Any:
        """Connect. Return the connection; None: it is refused."""
        kind = IPv6Address if ":" in host else IPv4Address
        made = self.factory.buildProtocol(kind("TCP", host, 50000))
        if made is not None:
            made.makeConnection(_Transport())
        return made

    def alive(self, *connections: Any) -> list[bool]:
        return [not each.transport.ended for each in connections]

    def test_the_one_who_has_most_loses_the_oldest(self) -> None:
        first = self.call(ONE)
        mine = [self.call(OTHER) for _ in range(3)]
        self.assertEqual(self.alive(first, *mine), [True] * 4)
        mine.append(self.call(OTHER))
        self.assertEqual(self.alive(first, *mine), [True, False, True, True, True])
        others = [self.call(f"198.51.100.{number}") for number in range(2)]
        self.assertEqual(self.alive(first, *mine, *others), [True, False, False, False, True, True, True])
        self.assertEqual(self.factory.counts, (0, 4))

    def test_of_equals_the_newest_displaces_its_own(self) -> None:
        theirs, mine = [self.call(ONE), self.call(ONE)], [self.call(OTHER), self.call(OTHER)]
        mine.append(self.call(OTHER))
        self.assertEqual(self.alive(*theirs, *mine), [True, True, False, True, True])

    def test_of_those_that_have_one_each_the_oldest_goes(self) -> None:
        five = [self.call(f"198.51.100.{number}") for number in range(5)]
        self.assertEqual(self.alive(*five), [False, True, True, True, True])

    def test_nobody_displaces_those_that_were_the_node_once(self) -> None:
        for host in (NODE, ONE):
            self.call(host).authenticated()
        waiting = [self.call(host) for host in (NODE, ONE, NODE, ONE)]
        stranger = self.call(OTHER)
        self.assertEqual(self.alive(*waiting, stranger), [True] * 4 + [False])

    def test_whoever_was_the_node_once_is_not_displaced_by_others(self) -> None:
        node = self.call(NODE)
        node.authenticated()
        again = self.call(NODE)
        many = [self.call(f"198.51.100.{number}") for number in range(BURST)]
        self.assertEqual(self.alive(node, again, *many[:-3]), [True, True] + [False] * (BURST - 3))
        self.assertEqual(self.alive(*many[-3:]), [True] * 3)
        last = self.call(NODE)
        self.assertEqual(self.alive(node, again, last, *many[-3:]), [True, False] + [True] * 4)

    def test_authenticated_ones_are_ended_for_nobody(self) -> None:
        nodes = [self.call(NODE) for _ in range(2)]
        for each in nodes:
            each.authenticated()
        third = self.call(NODE)
        third.authenticated()
        for number in range(100):
            self.call(f"198.51.100.{number}")
        self.clock.advance(60)
        self.assertEqual(self.alive(*nodes, third), [True, True, False])

    def test_more_than_its_rate_is_refused_before_tls(self) -> None:
        came = [self.call(ONE) for _ in range(BURST + 5)]
        self.assertEqual([each is not None for each in came], [True] * BURST + [False] * 5)
        self.assertIsNotNone(self.call(OTHER), "the others' budgets are their own")
        for _ in range(3):
            self.clock.advance(1)
            self.assertEqual([self.call(ONE) is not None for _ in range(6)], [True] * 4 + [False] * 2)
        self.clock.advance(1000)
        self.assertEqual(sum(self.call(ONE) is not None for _ in range(100)), BURST)

    def test_many_addresses_have_a_rate_together_which_is_not_the_nodes(self) -> None:
        self.call(NODE).authenticated()
        came = [self.call(f"10.{number >> 8}.{number & 255}.1") is not None for number in range(3000)]
        self.assertEqual(sum(came), BURST * NEWCOMERS - 1)
        self.assertIsNotNone(self.call(NODE))
        budgets = cast("Callers[Any]", self.factory._callers)._budgets
        self.assertLessEqual(len(budgets), REMEMBERED)

    def test_a_node_that_nobody_knows_gets_in_while_some_addresses_call_all_the_time(self) -> None:
        callers = [f"198.51.100.{number}" for number in range(40)]
        for _ in range(50):
            for each in callers * 5:
                self.call(each)
            self.clock.advance(0.2)
        admitted = [self.call(each) is not None for each in callers]
        self.assertLess(sum(admitted), len(callers))
        for _ in range(8):
            self.assertIsNotNone(self.call(NODE))

    def test_the_addresses_that_its_certificate_names_are_the_nodes(self) -> None:
        self.factory.trust([ip_network(NODE), ip_network("203.0.113.0/24"), ip_network("2001:db8::1")])
        node = [self.call(each) for each in (NODE, "203.0.113.9", "2001:db8::1")]
        for number in range(3000):
            self.call(f"10.{number >> 8}.{number & 255}.1")
        self.assertEqual(self.alive(*node), [True] * 3)
        self.assertIsNotNone(self.call("203.0.113.10"))
        self.assertIsNone(self.call("203.0.114.10"))

    def test_a_network_of_ipv6_is_one_caller(self) -> None:
        for host, source in (
            ("2001:db8::1", "2001:db8::/64"),
            ("2001:db8:0:0:ffff::2", "2001:db8::/64"),
            ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
            ("fe80::1%eth0", "fe80::/64"),
            ("::ffff:192.0.2.7", ONE),
            (ONE, ONE),
            ("", ""),
        ):
            self.assertEqual(source_of(host), source)
        came = [self.call(f"2001:db8::{number:x}") is not None for number in range(BURST + 5)]
        self.assertEqual(sum(came), BURST)
        self.assertIsNotNone(self.factory.buildProtocol(UNIXAddress("/run/agent")))

    def test_nothing_is_left_of_those_that_are_gone(self) -> None:
        for number in range(50):
            self.call(f"198.51.100.{number}")
        self.clock.advance(10)
        self.assertEqual((self.factory.counts, self.clock.getDelayedCalls()), ((0, 0), []))
        self.assertEqual(cast("Callers[Any]", self.factory._callers)._waiting, {})


@slow(6, "a flood and the time before it are measured")
class FloodTests(TestCase):
    """A thousand connections a second from an address that is not the node's, over real sockets."""

    async def setUp(self) -> None:
        self.agent = Agent(reactor, run_directory(self))
        self.addCleanup(lambda: Deferred.fromCoroutine(self.agent.stop()))
        self.service = await self.agent.start()
        self.node = AgentStub(self.agent.channel())
        self.authenticated: list[object] = []
        factory = self.service._listener.factory
        assert factory is not None
        self.patch(factory, "authenticated", self.note(factory.authenticated))

    def note(self, authenticated: Callable[[Any], None]) -> Callable[[Any], None]:
        def noted(connection: Any) -> None:
            self.authenticated.append(connection)
            authenticated(connection)

        return noted

    async def calls(self, seconds: float) -> tuple[float, float]:
        """Call the agent again and again. Return the median time, and this process' share of a processor."""
        took = []
        began, spent = time.monotonic(), time.process_time()
        while time.monotonic() - began < seconds:
            called = time.monotonic()
            await self.node.Info(vmserver.InfoRequest(), timeout=10.0)
            took.append(time.monotonic() - called)
            await sleep(reactor, 0.02)
        return statistics.median(took), (time.process_time() - spent) / (time.monotonic() - began)

    async def test_it_takes_a_fifth_of_a_processor_at_most_and_no_call_of_the_nodes(self) -> None:
        await self.calls(0.5)
        before, share = await self.calls(2.0)
        words = ["127.0.0.1", str(self.service.port), "127.0.0.2", "1000", "4"]
        flood = subprocess.Popen([sys.executable, flooding.__file__, *words], stdout=subprocess.PIPE)
        self.addCleanup(flood.wait)
        self.addCleanup(flood.kill)
        assert flood.stdout is not None
        self.assertEqual(flood.stdout.readline(), b"begins\n")
        during, flooded = await self.calls(3.0)
        self.assertIsNone(flood.poll(), "it goes on")
        self.assertLess(flooded - share, 0.2)
        self.assertLess(during, before + 0.1)
        self.assertEqual(len(self.authenticated), 1, "the node's connection is the same all the time")
        fresh = AgentStub(self.agent.channel())
        info = await fresh.Info(vmserver.InfoRequest(), timeout=5.0)
        self.assertEqual(info.sandbox_id, SANDBOX)
        await until(lambda: flood.poll() is not None, "the flood ends")
        self.assertGreater(int(flood.stdout.read()), 3500)
