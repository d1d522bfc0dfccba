# SPDX-License-Identifier: Apache-2.0
"""A VM has exactly the addresses and routes that a CNI plugin gave its pod, in a network for the test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common import identity
from infranetes_common.errors import FailedPrecondition
from infranetes_common.identity import Identity, Neighbour, Network, Route
from tests.harness.needs import needs_netns
from tests.support.own_network import in_own_network
from vmserver.identity import routed

ROOT = Path(__file__).resolve().parents[3]
PEM = "-----BEGIN %s-----\nAAAA\n-----END %s-----\n"
CERTIFICATE, KEY = PEM % ("CERTIFICATE", "CERTIFICATE"), PEM % ("PRIVATE KEY", "PRIVATE KEY")
MAC = "0a:58:0a:04:00:07"

# Runs as root in a network namespace of its own, with a network card called eth0.
CHILD = """
import json, subprocess, sys
from infranetes_common.errors import FailedPrecondition
from infranetes_common.identity import decode
from vmserver.identity import network
def ip(*words):
    return json.loads(subprocess.run(["ip", "-j", *words], capture_output=True, check=True).stdout or "[]")
run = lambda *words: subprocess.run(["ip", *words], check=True)
run("link", "add", "eth0", "type", "veth", "peer", "name", "peer")
run("link", "set", "peer", "up")
for again in (1, 2):
    try:
        network.apply(decode(sys.argv[1].encode()).network, "eth0")
    except FailedPrecondition as error:
        print(json.dumps({"refused": str(error)}))
        sys.exit()
words = ("dst", "gateway", "prefsrc", "scope", "flags", "metrics")
print(json.dumps({
    "card": ip("link", "show", "dev", "eth0")[0],
    "addresses": [
        [one["local"], one["prefixlen"]]
        for link in ip("addr", "show", "dev", "eth0") for one in link["addr_info"] if one["scope"] == "global"
    ],
    "routes": [{word: one[word] for word in words if one.get(word)} for one in ip("-4", "route")],
    "routes6": [
        {word: one[word] for word in words if one.get(word)}
        for one in ip("-6", "route", "show", "dev", "eth0") if not one["dst"].startswith("fe80")
    ],
    "neighbours": [
        [one["dst"], one["lladdr"], one["state"]] for one in ip("neigh", "show", "nud", "permanent")
    ],
    "accept_ra": open("/proc/sys/net/ipv6/conf/eth0/accept_ra").read().strip(),
}))
"""


def become(network: Network) -> Any:  # Any: JSON
    """Apply a parsed network twice. Return what the machine looks like then."""
    whole = Identity("5a" * 16, CERTIFICATE, KEY, CERTIFICATE, network=network)
    done = subprocess.run(
        in_own_network(sys.executable, "-c", CHILD, identity.encode(whole).decode()),
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_netns
class RoutedTests(SynchronousTestCase):
    def test_calicos_router_is_one_that_no_subnet_has(self) -> None:
        routes = (Route("0.0.0.0/0", "169.254.1.1"), Route("169.254.1.1/32"))
        seen = become(Network(MAC, "10.4.0.7/32", "", 1480, routes))
        self.assertEqual((seen["card"]["address"], seen["card"]["mtu"]), (MAC, 1480))
        self.assertEqual(seen["addresses"], [["10.4.0.7", 32]])
        self.assertEqual(
            seen["routes"],
            [{"dst": "default", "gateway": "169.254.1.1"}, {"dst": "169.254.1.1", "scope": "link"}],
        )

    def test_the_network_of_aws_has_a_router_that_answers_nobody(self) -> None:
        routes = (Route("0.0.0.0/0", "169.254.1.1"), Route("169.254.1.1/32"))
        neighbours = (Neighbour("169.254.1.1", "ee:ee:ee:ee:ee:ee"),)
        seen = become(Network(MAC, "10.4.0.7/32", "", 9001, routes, neighbours=neighbours))
        self.assertEqual(seen["neighbours"], [["169.254.1.1", "ee:ee:ee:ee:ee:ee", ["PERMANENT"]]])
        self.assertEqual(seen["card"]["mtu"], 9001)

    def test_ptps_own_subnet_is_reached_by_its_router(self) -> None:
        # As on GKE, the address's subnet is not on the link, which must not get a route to it.
        routes = (
            Route("0.0.0.0/0", "10.4.0.1"),
            Route("10.4.0.0/24", "10.4.0.1", "10.4.0.7"),
            Route("10.4.0.1/32", source="10.4.0.7"),
        )
        seen = become(Network(MAC, "10.4.0.7/24", "", 1460, routes))
        self.assertEqual(
            seen["routes"],
            [
                {"dst": "default", "gateway": "10.4.0.1"},
                {"dst": "10.4.0.0/24", "gateway": "10.4.0.1", "prefsrc": "10.4.0.7"},
                {"dst": "10.4.0.1", "scope": "link", "prefsrc": "10.4.0.7"},
            ],
        )

    def test_ciliums_default_route_has_an_mtu_of_its_own(self) -> None:
        routes = (Route("0.0.0.0/0", "10.4.0.1", mtu=1450), Route("10.4.0.1/32"))
        seen = become(Network(MAC, "10.4.0.7/32", "", 1500, routes))
        self.assertEqual(seen["card"]["mtu"], 1500)
        self.assertEqual(seen["routes"][0]["metrics"], [{"mtu": 1450}])

    def test_a_pod_of_both_families_has_both(self) -> None:
        routes = (
            Route("10.4.0.0/24", source="10.4.0.7"),
            Route("0.0.0.0/0", "10.4.0.1"),
            Route("fd00:4::/64"),
            Route("::/0", "fd00:4::1"),
        )
        seen = become(Network(MAC, "10.4.0.7/24", "", 1500, routes, more=("fd00:4::7/64",)))
        self.assertCountEqual(seen["addresses"], [["10.4.0.7", 24], ["fd00:4::7", 64]])
        found = [(route["dst"], route.get("gateway")) for route in seen["routes6"]]
        self.assertCountEqual(found, [("fd00:4::/64", None), ("default", "fd00:4::1")])
        self.assertEqual(seen["accept_ra"], "0")

    def test_what_the_kernel_refuses_is_told_with_its_line(self) -> None:
        seen = become(Network(MAC, "10.4.0.7/32", "", 1500, (Route("0.0.0.0/0", "10.9.9.9"),)))
        self.assertIn("route replace 0.0.0.0/0 via 10.9.9.9 dev eth0", seen["refused"])
        self.assertIn("Nexthop has invalid gateway", seen["refused"])

    def test_a_card_that_is_not_there_is_told(self) -> None:
        network = Network(MAC, "10.4.0.7/32", "", 1500, (Route("10.4.0.1/32"),))
        with self.assertRaises(FailedPrecondition) as caught:
            routed.apply(network, "nocard9")
        self.assertIn("nocard9", str(caught.exception))

    def test_a_router_that_any_route_may_have(self) -> None:
        network = Network(MAC, "10.4.0.7/32", "", 1500, (Route("0.0.0.0/0", "10.9.9.9", onlink=True),))
        [route] = become(network)["routes"]
        self.assertEqual(route["flags"], ["onlink"])
        self.assertEqual(attrs.asdict(network)["routes"][0]["via"], route["gateway"])
