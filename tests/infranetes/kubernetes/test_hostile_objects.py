# SPDX-License-Identifier: Apache-2.0
"""Objects of a hostile API server: of their texts, nothing reaches nft but what was parsed.

From the JSON to the text of rules, on the node and in the VM's agent. Whatever is hostile has the word EVIL.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes.kinds import Kind
from infranetes.kubernetes.watch import Put
from infranetes.machines.agent.firewall import _rule as firewall_rule
from infranetes.policies.interface import LocalPod
from infranetes.providers.qemu.network.bridge import BridgePort
from infranetes.providers.qemu.network.firewalls import BridgeFirewalls
from infranetes.services.kinds import ServiceRanges, Services, Slices
from infranetes.services.messages import updates
from infranetes.services.objects import OwnNode
from infranetes.services.table import RuleTable
from infranetes_common.pod_firewall import PodFirewall
from infranetes_common.reactors import installed
from infranetes_common.service_proxy.messages import as_update
from infranetes_common.service_proxy.placement import place
from infranetes_common.service_proxy.proxy import by_version
from infranetes_common.service_proxy.script import MACHINE, Tables, of_bridge
from infranetes_common.wire import vmserver
from tests.harness.durations import slow
from tests.harness.needs import needs_netns, needs_programs
from tests.infranetes.policies.world import World, finish
from vmserver.firewall.firewall import tables as agent_tables
from vmserver.firewall.message import as_firewall

Json = dict[str, Any]  # Any: JSON
EVIL = "evil"
#: What is put behind an honest text. Only the address of IPv6 is one still, with a zone.
ENDS = (
    "%EVIL", "%EVIL drop\n", "%EVIL }\nflush ruleset\n", "\nEVIL", "; EVIL", " }\nflush ruleset # EVIL",
    "\\\nEVIL", '"EVIL', "#EVIL", " @EVIL", ", EVIL", "/EVIL", "/8 EVIL accept", " - EVIL",
    ' \ninclude "/etc/EVIL"\n', "\0EVIL", "\r\nEVIL", "\u2028EVIL", "{EVIL}", " EVIL" * 10_000,
)  # fmt: skip
NUMBERS = (-1, 0, 65536, 2**31, 2**64, 10**40, 1e300, True)
ODD: tuple[object, ...] = (None, [], {}, json.loads("[" * 900 + "]" * 900), [EVIL] * 10, {EVIL: EVIL})

HOSTILE = (*(each.replace("EVIL", EVIL) for each in ENDS), *NUMBERS, *ODD)

PORT = {"name": "http", "protocol": "TCP", "port": 80}
SERVICE = {
    "metadata": {"name": "web", "namespace": "ns", "labels": {"app": "web"}},
    "spec": {
        "clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10", "fd00::10"],
        "externalIPs": ["192.0.2.1", "2001:db8::1"],
        "loadBalancerSourceRanges": ["10.0.0.0/8", "fd00::/64"], "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 10}}, "type": "LoadBalancer",
        "ports": [PORT, {"name": "dns", "protocol": "UDP", "port": 53}], "internalTrafficPolicy": "Cluster",
    },
    "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.2"}, {"ip": "2001:db8::2", "ipMode": "VIP"}]}},
}  # fmt: skip
SLICES = [
    {
        "metadata": {"name": kind, "namespace": "ns", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": kind,
        "ports": [PORT, {"name": "dns", "protocol": "UDP", "port": 5353}],
        "endpoints": [{"addresses": [address], "nodeName": "here", "conditions": {"ready": True}}],
    }
    for kind, address in (("IPv4", "10.1.0.1"), ("IPv6", "fd01::1"))
]
RANGE = {"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/16", "fd00::/108"]}}
SELECTOR = {
    "matchLabels": {"app": "web"}, "matchExpressions": [{"key": "app", "operator": "In", "values": ["web"]}],
}  # fmt: skip
RULE = [
    {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
    {"ipBlock": {"cidr": "fd00::/16", "except": ["fd00::/64"]}},
    {"podSelector": SELECTOR, "namespaceSelector": {"matchLabels": {"team": "a"}}},
]
POLICY_PORTS = [
    {"protocol": "TCP", "port": 80, "endPort": 90}, {"protocol": "SCTP", "port": 5}, {"port": "http"},
    {"protocol": "UDP"},
]  # fmt: skip
POLICY = {
    "metadata": {"namespace": "ns", "name": "policy"},
    "spec": {
        "podSelector": SELECTOR, "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": RULE, "ports": POLICY_PORTS}],
        "egress": [{"to": RULE[:1], "ports": POLICY_PORTS[:1]}],
    },
}  # fmt: skip
POD = {
    "metadata": {"namespace": "ns", "name": "web", "uid": "uid", "labels": {"app": "web"}},
    "spec": {"containers": [{"ports": [{"name": "http", "containerPort": 8080, "protocol": "TCP"}]}]},
    "status": {"podIP": "10.1.0.1", "podIPs": [{"ip": "10.1.0.1"}, {"ip": "fd01::1"}]},
}
NAMESPACE = {"metadata": {"name": "ns", "labels": {"team": "a"}}}
Path = tuple[str | int, ...]


def paths(value: object, at: Path = ()) -> Iterator[Path]:
    """Yield the way to each value within another."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*at, key)
        yield from paths(each, (*at, key))


def changed(honest: Json, path: Path, value: object) -> Json:
    """Return an object with another value in one place. :param value: a text of ENDS: put behind the text."""
    made: Json = json.loads(json.dumps(honest))
    within: Any = made  # Any: JSON
    for key in path[:-1]:
        within = within[key]
    before = within[path[-1]]
    within[path[-1]] = f"{before}{value}" if isinstance(value, str) else value
    return made


def each_change(honest: Json) -> Iterator[Json]:
    """Yield an object with each hostile value in each place."""
    for path in paths(honest):
        for value in HOSTILE:
            yield changed(honest, path, value)


def hostile(honest: Json) -> st.SearchStrategy[Json]:
    """Return objects with one hostile value, or none."""
    made = st.builds(changed, st.just(honest), st.sampled_from([*paths(honest)]), st.sampled_from(HOSTILE))
    return made | st.just(honest)


def put(kind: Kind, items: Iterable[Json]) -> None:
    """Have objects take the way of those that come by a watch."""
    for item in items:
        finish(kind.take(Put(kind.trimmed(item))))


def proxy_script(table: RuleTable, tables: Tables) -> str:
    """Return the text by which a proxy puts all rules in force."""
    text = "".join(tables.table(version) for version in tables.versions)
    for message in updates(table, None):
        update = as_update(vmserver.ServiceRulesUpdate.FromString(message.SerializeToString()))
        for version in tables.versions:
            placed = {
                key: place(rule, ["10.1.0.1"], None)
                for key, rule in update.changed.items()
                if key.version == version
            }
            text += tables.chains(version, sorted({its.chain for its in placed.values() if its.slots}))
            addresses = {key.address for key, its in placed.items() if its.cluster_ip}
            text += tables.changes(
                version, {key: (None, its) for key, its in placed.items()}, sorted(addresses)
            )
            text += tables.ranges(version, by_version(update.ranges or ())[version])
    return text


def agent_script(firewall: PodFirewall) -> str:
    """Return the text by which an agent puts a firewall in force."""
    ingress, egress = (
        None if way is None else vmserver.FirewallWay(rules=map(firewall_rule, way))
        for way in (firewall.ingress, firewall.egress)
    )
    message = vmserver.SetFirewallRequest(ingress=ingress, egress=egress)
    return agent_tables(as_firewall(message.FromString(message.SerializeToString())), "10.0.0.2")


def services_text(services: Iterable[Json], slices: Iterable[Json], ranges: Iterable[Json]) -> str:
    """Return the text by which the agent and the node serve these."""
    table = RuleTable(OwnNode("here"))
    for kind, items in ((Services(table), services), (Slices(table), slices), (ServiceRanges(table), ranges)):
        put(kind, items)
    return proxy_script(table, MACHINE) + proxy_script(table, of_bridge("br0"))


def policies_text(policy: Json, pod: Json, namespace: Json) -> str:
    """Return the text by which the agent and the node enforce this policy for this pod."""
    world = World()
    world.model.add(LocalPod("id", "ns", "web", "uid", {"app": "web"}))
    for kind, item in ((world.namespaces, namespace), (world.pods, pod), (world.policies, policy)):
        put(kind, [item])
    firewall = world.firewall("id")
    pods = {BridgePort("tap0", "10.0.0.9"): firewall}
    return agent_script(firewall) + BridgeFirewalls(installed(), "br0")._thd_all(pods)


@needs_netns
@needs_programs("nft")
class HostileObjectTests(SynchronousTestCase):
    """`nft -c` understands the text, as a whole, and nothing of theirs is in it."""

    def check(self, texts: Iterable[str]) -> None:
        different = dict.fromkeys(texts)
        for text in different:
            self.assertNotIn(EVIL, text)
        left = iter(different)
        while script := "".join(islice(left, 50)).encode():
            tried = subprocess.run(["nft", "-c", "-f", "-"], input=script, capture_output=True)
            self.assertEqual((tried.returncode, tried.stderr), (0, b""))

    @slow(20, "hundreds of places, with thirty values each")
    def test_each_hostile_value_in_each_place_of_a_service(self) -> None:
        first, second = SLICES
        self.check(services_text([each], SLICES, [RANGE]) for each in each_change(SERVICE))
        self.check(services_text([SERVICE], [each, second], [RANGE]) for each in each_change(first))
        self.check(services_text([SERVICE], [first, each], [RANGE]) for each in each_change(second))
        self.check(services_text([SERVICE], SLICES, [each]) for each in each_change(RANGE))

    @slow(40, "hundreds of places, with thirty values each")
    def test_each_hostile_value_in_each_place_of_a_policy(self) -> None:
        self.check(policies_text(each, POD, NAMESPACE) for each in each_change(POLICY))
        self.check(policies_text(POLICY, each, NAMESPACE) for each in each_change(POD))
        self.check(policies_text(POLICY, POD, each) for each in each_change(NAMESPACE))

    @given(hostile(SERVICE), st.tuples(*map(hostile, SLICES)), hostile(RANGE))
    def test_several_of_them(self, service: Json, slices: tuple[Json, ...], ranges: Json) -> None:
        self.check([services_text([service], slices, [ranges])])

    @given(hostile(POLICY), hostile(POD), hostile(NAMESPACE))
    def test_several_of_them_around_a_policy(self, policy: Json, pod: Json, namespace: Json) -> None:
        self.check([policies_text(policy, pod, namespace)])

    def test_honest_ones_are_in_the_text(self) -> None:
        """So the other tests try what reaches it."""
        text = services_text([SERVICE], SLICES, [RANGE])
        for part in ("10.96.0.10 . tcp . 80", "2001:db8::2 . udp . 53", "fd01::1 . 5353", "10.96.0.0/16"):
            self.assertIn(part, text)
        text = policies_text(POLICY, POD, NAMESPACE)
        for part in (
            "10.128.0.0/9",
            "fd00:8000::/17",
            "10.1.0.1",
            "proto-src 80-90",
            "protocol sctp",
            "proto-src 8080",
            "udp ct reply proto-src 1-65535",
        ):
            self.assertIn(part, text)
