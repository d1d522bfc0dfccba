# SPDX-License-Identifier: Apache-2.0
"""Whatever happens in a cluster, firewalls let through what the naive reference does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes.kinds import Kind
from infranetes_common.pod_firewall import PodFirewall
from tests.infranetes.policies import objects as written
from tests.infranetes.policies.naive import Cluster, Packet, passes
from tests.infranetes.policies.world import World

Json = dict[str, Any]  # Any: JSON
Items = dict[tuple[str, str], Json]

NAMESPACES = ("n1", "n2", "n3")
NAMES = ("a", "b", "c", "d")
LOCAL = tuple(itertools.product(NAMESPACES[:2], NAMES[:2]))
ADDRESSES = (*(f"10.0.0.{each}" for each in range(6)), "fd00::1", "fd00::2")
OUTSIDE = ("192.0.2.1", "2001:db8::1")
NUMBERS = (80, 81, 82, 83)
PORT_NAMES = ("web", "dns")
PROTOCOLS = ("TCP", "UDP")
PACKETS = [
    Packet(other, protocol, number)
    for other in (*ADDRESSES, *OUTSIDE)
    for protocol, number in (*itertools.product(PROTOCOLS, NUMBERS), ("ICMP", None))
]

labels = st.dictionaries(st.sampled_from("xy"), st.sampled_from("12"), max_size=2)


def some(strategy: st.SearchStrategy[Any], most: int = 2) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, max_size=most)


@st.composite
def expressions(draw: st.DrawFn) -> Json:
    operator = draw(st.sampled_from(("In", "NotIn", "Exists", "DoesNotExist")))
    values = draw(st.lists(st.sampled_from("12"), min_size=1, max_size=2)) if "In" in operator else []
    return {"key": draw(st.sampled_from("xy")), "operator": operator, "values": values}


selectors = st.one_of(
    st.just({}),
    labels.map(lambda its: {"matchLabels": its}),
    st.builds(lambda one, its: {"matchLabels": one, "matchExpressions": its}, labels, some(expressions())),
)
blocks = st.one_of(
    st.builds(
        lambda excepted: written.block("10.0.0.0/29", *excepted),
        some(st.sampled_from(("10.0.0.0/30", "10.0.0.2/32", "10.0.0.3/32", "10.0.0.4/31"))),
    ),
    st.sampled_from(
        (written.block("0.0.0.0/0"), written.block("::/0", "fd00::/126"), written.block("10.0.0.3/31"))
    ),
)
peers = st.one_of(
    blocks,
    st.builds(lambda pods: {"podSelector": pods}, selectors),
    st.builds(lambda namespaces: {"namespaceSelector": namespaces}, selectors),
    st.builds(lambda pods, spaces: {"podSelector": pods, "namespaceSelector": spaces}, selectors, selectors),
)


@st.composite
def rule_ports(draw: st.DrawFn) -> Json:
    found: Json = {}
    if draw(st.booleans()):
        found["protocol"] = draw(st.sampled_from(PROTOCOLS))
    match draw(st.sampled_from(("none", "number", "range", "name"))):
        case "number":
            found["port"] = draw(st.sampled_from(NUMBERS))
        case "range":
            found["port"], found["endPort"] = sorted(draw(st.tuples(*[st.sampled_from(NUMBERS)] * 2)))
        case "name":
            found["port"] = draw(st.sampled_from(PORT_NAMES))
    return found


def rules(other_side: str) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({}, optional={other_side: some(peers, 3), "ports": some(rule_ports())})


@st.composite
def policies(draw: st.DrawFn) -> Json:
    optional = {
        "ingress": some(rules("from")),
        "egress": some(rules("to")),
        "policyTypes": some(st.sampled_from(("Ingress", "Egress"))),
    }
    spec = draw(st.fixed_dictionaries({}, optional=optional))
    name, namespace = draw(st.sampled_from(NAMES)), draw(st.sampled_from(NAMESPACES[:2]))
    return written.policy(name, draw(selectors), namespace, **spec)


container_ports = st.builds(
    written.port, st.sampled_from(PORT_NAMES), st.sampled_from(NUMBERS), st.sampled_from(PROTOCOLS)
)


@st.composite
def pods(draw: st.DrawFn) -> Json:
    its: Json = {"labels": draw(labels), "ports": draw(some(container_ports))}
    name, namespace = draw(st.sampled_from(NAMES)), draw(st.sampled_from(NAMESPACES))
    if (namespace, name) not in LOCAL:  # local pods are those with a network of their own
        its["phase"] = draw(st.sampled_from(("Running", "Pending", "Succeeded", "Failed")))
        its["hostNetwork"] = draw(st.sampled_from((False, False, True)))
    sidecar = {
        "restartPolicy": draw(st.sampled_from((None, "Always"))),
        "ports": draw(some(container_ports, 1)),
    }
    addresses = draw(st.lists(st.sampled_from(ADDRESSES), max_size=2, unique=True))
    return written.pod(name, *addresses, namespace=namespace, initContainers=[sidecar], **its)


namespaces = st.builds(
    lambda name, its: {"metadata": {"name": name, "labels": its}}, st.sampled_from(NAMESPACES), labels
)
changes = st.lists(
    st.tuples(st.sampled_from(("put", "put", "put", "remove")), st.one_of(policies(), pods(), namespaces)),
    max_size=15,
)


class Comparison:
    """The same objects for the model and for the reference."""

    def __init__(self) -> None:
        self.world = World()
        self.pods: Items = {}
        self.namespaces: Items = {}
        self.policies: Items = {}
        self.locals: set[tuple[str, str]] = set()

    def change(self, what: str, item: Json) -> None:
        kind, items = self._place(item)
        about = item["metadata"]
        key = (about.get("namespace", ""), about["name"])
        if what == "put":
            items[key] = item
            self.world.put(kind, item)
        elif key in items:
            self.world.remove(kind, items.pop(key))

    def _place(self, item: Json) -> tuple[Kind, Items]:
        if "status" in item:
            return self.world.pods, self.pods
        if "spec" in item:
            return self.world.policies, self.policies
        return self.world.namespaces, self.namespaces

    def have_locals(self) -> None:
        """Make those pods local that are on this node."""
        for key in LOCAL:
            if key in self.pods and key not in self.locals:
                self.locals.add(key)
                self.world.add_local(self.pods[key])

    def reference(self) -> Cluster:
        every = (self.pods, self.namespaces, self.policies)
        return Cluster(*(list(each.values()) for each in every))


class VerdictTests(SynchronousTestCase):
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.one_of(policies(), pods(), namespaces), min_size=8, max_size=20), changes)
    def test_every_packet_has_the_verdict_of_the_reference(
        self, first: list[Json], later: list[tuple[str, Json]]
    ) -> None:
        both = Comparison()
        for item in first:
            both.change("put", item)
        both.have_locals()
        self.compare(both)
        for what, item in later:
            both.change(what, item)
            both.have_locals()
        self.compare(both)

    def compare(self, both: Comparison) -> None:
        both.world.settle()
        reference = both.reference()
        for key in both.locals & both.pods.keys():
            firewall = both.world.model.firewall("/".join(key))
            assert firewall is not None
            self.check_form(firewall)
            for packet in PACKETS:
                for direction, its in (("Ingress", firewall.ingress), ("Egress", firewall.egress)):
                    expected = reference.allows(both.pods[key], direction, packet)
                    self.assertEqual(passes(its, packet), expected, (key, direction, packet))

    def check_form(self, firewall: PodFirewall) -> None:
        """Networks and ports are sorted, and none is within another."""
        for allowed in itertools.chain(firewall.ingress or (), firewall.egress or ()):
            order: Callable[[Any], Any] = lambda each: (each.version, each)  # noqa: E731
            self.assertEqual(list(allowed.networks), sorted(allowed.networks, key=order))
            for one, next in itertools.pairwise(allowed.networks):
                self.assertFalse(one.version == next.version and one.overlaps(next))
            self.assertTrue(allowed.networks)
            if allowed.ports is not None:
                self.assertEqual(list(allowed.ports), sorted(allowed.ports))
                self.assertTrue(allowed.ports)
