# SPDX-License-Identifier: Apache-2.0
"""A pod's packets to Services end where they would behind kube-proxy, with any set of Services."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hypothesis import Phase, given, settings
from twisted.trial.unittest import TestCase

from infranetes_common.concurrency import deferred, run_in_thread
from infranetes_common.reactors import installed
from tests.cluster.kube_proxy import UNALLOCATED, Both
from tests.cluster.service_worlds import World, worlds
from tests.cluster.ways import DROPPED, NODE, Destination, Way, sets
from tests.infranetes.services import objects as written

reactor = installed()
EXAMPLES = int(os.environ.get("INFRANETES_TEST_WORLDS", "80"))
DRAWS = 12  # packets to one destination at a time
ROUNDS = 12  # how often these are repeated until both ways have shown the same ends
SURE = 3.0  # seconds of silence that count as none, where one way has an answer and the other has not

UNALLOCATED_ONES = [Destination(each, protocol, 80) for each in UNALLOCATED for protocol in ("TCP", "UDP")]
Found = Mapping[Destination, frozenset[str]]


class KubeProxyTests(TestCase):
    timeout = 1800

    @deferred
    async def setUp(self) -> None:
        directory = Path(self.mktemp())
        directory.mkdir()
        self.both = Both(reactor, directory.absolute())
        await self.both.start()
        self.addCleanup(self.both.end)
        await run_in_thread(reactor, self.both.thd_have, World())
        await run_in_thread(reactor, self.both.thd_wait_for_ranges)

    @deferred
    async def test_packets_end_where_kube_proxy_has_them_end(self) -> None:
        @settings(max_examples=EXAMPLES, phases=(Phase.explicit, Phase.generate, Phase.shrink))
        @given(worlds())
        def thd_judge(world: World) -> None:
            self.both.thd_have(world)
            self.thd_compare(world)

        await run_in_thread(reactor, thd_judge)

    @deferred
    async def test_node_ports_are_the_business_of_the_node_that_has_the_address(self) -> None:
        """This is the only difference, and intended."""
        item = written.service(ips=("10.96.0.1",), type="NodePort", ipFamilies=["IPv4"])
        item["spec"]["ports"][0]["nodePort"] = 30080
        world = World([item], [written.endpoint_slice(written.endpoint("10.1.1.1"))])
        await run_in_thread(reactor, self.both.thd_have, world)
        node_port, cluster_ip = Destination(NODE, "TCP", 30080), Destination("10.96.0.1", "TCP", 80)
        theirs, ours = await run_in_thread(reactor, self.thd_both, [node_port, cluster_ip])
        self.assertEqual((theirs[node_port], ours[node_port]), ({"10.1.1.1:8080"}, {f"{NODE}:30080"}))
        self.assertEqual((theirs[cluster_ip], ours[cluster_ip]), ({"10.1.1.1:8080"}, {"10.1.1.1:8080"}))

    def thd_compare(self, world: World) -> None:
        """Compare where packets end. :raise AssertionError: some end elsewhere than with kube-proxy."""
        theirs, ours = self.thd_both([*world.destinations(), *UNALLOCATED_ONES])
        expected, sticky = self.both.thd_endpoints(), world.sticky()
        differing = {
            each: (theirs[each], ours[each])
            for each in ours
            if theirs[each] != ours[each]
            and not (each.address in sticky and self.one_of(theirs[each], ours[each], expected.get(each)))
        }
        told = "\n".join(
            f"{each}: kube-proxy {set(one)}, a VM {set(other)}" for each, (one, other) in differing.items()
        )
        self.assertFalse(differing, f"{told}\n{world}")

    def one_of(self, theirs: frozenset[str], ours: frozenset[str], endpoints: frozenset[str] | None) -> bool:
        """Return whether all packets go to a single endpoint on each way, as with affinity."""
        return len(theirs) == len(ours) == 1 and theirs | ours <= (endpoints or frozenset())

    def thd_both(self, destinations: list[Destination]) -> tuple[Found, Found]:
        """Return where packets end on each of the two ways, once enough were sent."""
        theirs, ours = (
            self.thd_sets(way, destinations, 1) for way in (self.both.node_way, self.both.own_way)
        )
        chosen = [each for each in destinations if any(":" in answer for answer in theirs[each] | ours[each])]
        for _ in range(ROUNDS):
            theirs = self.joined(theirs, self.thd_sets(self.both.node_way, chosen, DRAWS))
            ours = self.joined(ours, self.thd_sets(self.both.own_way, chosen, DRAWS))
            chosen = [each for each in chosen if theirs[each] != ours[each]]
            if not chosen:
                break
        unsure = [
            each
            for each in destinations
            if theirs[each] != ours[each] and DROPPED in theirs[each] | ours[each]
        ]
        if unsure:
            theirs = {**theirs, **self.thd_sets(self.both.node_way, unsure, 1, SURE)}
            ours = {**ours, **self.thd_sets(self.both.own_way, unsure, 1, SURE)}
        return theirs, ours

    def thd_sets(self, way: Way, destinations: list[Destination], times: int, silence: float = 0.3) -> Found:
        wanted = destinations * times
        return sets(wanted, way.reached(wanted, silence))

    def joined(self, one: Found, other: Found) -> Found:
        return {**one, **{each: one[each] | its for each, its in other.items()}}
