# SPDX-License-Identifier: Apache-2.0
"""Whatever happens in a cluster, firewalls let through the same packets as the naive reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import given
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
ADDRESSES = (*(f"10.0.0.{each}" for each in range(8)), "fd00::1", "fd00::2")
OUTSIDE = ("192.0.2.1", "2001:db8::1")
NUMBERS = (80, 81, 82)
PORT_NAMES = ("web", "dns")
PROTOCOLS = ("TCP", "UDP")
BLOCKS = ("10.0.0.0/29", "10.0.0.4/30", "10.0.0.3/32", "0.0.0.0/0", "::/0", "fd00::/126")
PACKETS = [
    Packet(other, protocol, number)
    for other in (*ADDRESSES, *OUTSIDE)
    for protocol, number in (*itertools.product(PROTOCOLS, NUMBERS), ("ICMP", None))
]


class Making:
    """Make random objects that often refer to each other."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def item(self) -> Json:
        made = self._random.choice((self.policy, self.policy, self.pod, self.pod, self.namespace))
        return made(*(self._random.choice(each) for each in (NAMESPACES, NAMES)))

    def policy(self, namespace: str, name: str) -> Json:
        spec: Json = {}
        if self._random.random() < 0.7:
            spec["ingress"] = self._some(2, lambda: self._rule("from"))
        if self._random.random() < 0.6:
            spec["egress"] = self._some(2, lambda: self._rule("to"))
        if self._random.random() < 0.6:
            spec["policyTypes"] = self._random.choice((["Ingress"], ["Egress"], ["Ingress", "Egress"]))
        return written.policy(name, self._selector(), namespace, **spec)

    def pod(self, namespace: str, name: str) -> Json:
        its: Json = {"labels": self._labels(), "ports": self._some(2, self._container_port)}
        if (namespace, name) not in LOCAL:  # local pods never use the host's network
            its["phase"] = self._random.choice(("Running", "Running", "Pending", "Succeeded", "Failed"))
            its["hostNetwork"] = self._random.random() < 0.2
        restart = self._random.choice((None, "Always"))
        sidecar = {"restartPolicy": restart, "ports": self._some(1, self._container_port)}
        addresses = self._random.sample(ADDRESSES, self._random.choice((0, 1, 1, 2)))
        return written.pod(name, *addresses, namespace=namespace, initContainers=[sidecar], **its)

    def namespace(self, name: str, _: str = "") -> Json:
        return {"metadata": {"name": name, "labels": self._labels()}}

    def _some(self, most: int, make: Callable[[], Json]) -> list[Json]:
        return [make() for _ in range(self._random.randint(0, most))]

    def _labels(self) -> dict[str, str]:
        return {key: self._random.choice("12") for key in "xy" if self._random.random() < 0.7}

    def _selector(self) -> Json:
        kind = self._random.random()
        if kind < 0.3:
            return {}
        if kind < 0.6:
            key, value = self._random.choice("xy"), self._random.choice("12")
            return written.labelled(**{key: value})
        operator = self._random.choice(("In", "NotIn", "Exists", "DoesNotExist"))
        values = self._random.choice(("1", "2", "12")) if "In" in operator else ""
        return written.expression(self._random.choice("xy"), operator, *values)

    def _peer(self) -> Json:
        match self._random.randrange(4):
            case 0:
                excepted = self._random.sample(BLOCKS[:3], self._random.randint(0, 2))
                return written.block(self._random.choice(BLOCKS), *excepted)
            case 1:
                return {"podSelector": self._selector()}
            case 2:
                return {"namespaceSelector": self._selector()}
            case _:
                return {"podSelector": self._selector(), "namespaceSelector": self._selector()}

    def _rule(self, other_side: str) -> Json:
        return {other_side: self._some(2, self._peer), "ports": self._some(2, self._port)}

    def _port(self) -> Json:
        found: Json = self._random.choice(({}, {"protocol": "TCP"}, {"protocol": "UDP"})).copy()
        match self._random.randrange(5):
            case 0:
                found["port"] = self._random.choice(NUMBERS)
            case 1:
                found["port"], found["endPort"] = sorted(self._random.choices(NUMBERS, k=2))
            case 2 | 3:
                found["port"] = self._random.choice(PORT_NAMES)
        return found

    def _container_port(self) -> Json:
        choose = self._random.choice
        return written.port(choose(PORT_NAMES), choose(NUMBERS), choose(PROTOCOLS))


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
    @given(st.integers(0, 1 << 32))
    def test_every_packet_has_the_verdict_of_the_reference(self, seed: int) -> None:
        random = Random(seed)  # noqa: S311 - it makes up test cases
        making, both = Making(random), Comparison()
        first = [making.namespace(each) for each in NAMESPACES]
        first += [making.pod(*each) for each in itertools.product(NAMESPACES, NAMES)]
        first += [making.policy(random.choice(NAMESPACES[:2]), name) for name in NAMES[:3]]
        for item in random.sample(first, len(first)):
            both.change("put", item)
        both.have_locals()
        self.compare(both)
        for _ in range(random.randint(1, 6)):
            both.change(random.choice(("put", "put", "remove")), making.item())
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
