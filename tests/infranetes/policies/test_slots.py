# SPDX-License-Identifier: Apache-2.0
"""Slots of pods' addresses, and the conditions of selectors, by themselves."""

from __future__ import annotations

from typing import TypeVar

from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes.fields import Fields, Name
from infranetes.policies.objects import NamedPort, Pod, Steps
from infranetes.policies.selectors import selector
from infranetes.policies.slots import Slots
from infranetes_common.errors import InvalidArgument

T = TypeVar("T")


def result(steps: Steps[T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found


def a_pod(name: str, *addresses: int, port: str = "web", number: int = 80) -> Pod:
    return Pod(Name("ns", name), name, {}, addresses, (NamedPort(port, "TCP", number),))


class SlotTests(SynchronousTestCase):
    def test_a_slot_is_used_again_once_it_was_given_back_and_then_is_the_new_pods(self) -> None:
        slots = Slots()
        slots.put(a_pod("a", 1, 2))
        slots.put(a_pod("b", 3))
        before = slots.mask(Name("ns", "a"))
        slots.put(a_pod("a", 5))
        self.assertEqual(slots.mask(Name("ns", "a")) & before, 0, "sets in use may still have the old ones")
        self.assertEqual(slots.reuse(), before)
        self.assertEqual(slots.reuse(), 0)
        slots.put(a_pod("c", 7, 8, port="dns", number=53))
        now = slots.mask(Name("ns", "c"))
        self.assertEqual(now, before)
        self.assertEqual(result(slots.addresses(now)), {7, 8})
        self.assertEqual(result(slots.having(now, lambda port: port.name == "dns")), {53: now})

    def test_a_pod_keeps_its_slots_as_long_as_its_addresses_and_ports_stay(self) -> None:
        slots = Slots()
        slots.put(a_pod("a", 1))
        before = slots.mask(Name("ns", "a"))
        slots.put(a_pod("a", 1))
        self.assertEqual((slots.mask(Name("ns", "a")), slots.reuse()), (before, 0))

    def test_ports_that_match_and_the_slots_of_each_number(self) -> None:
        slots = Slots()
        for pod in (a_pod("a", 1), a_pod("b", 2), a_pod("c", 3, number=81), a_pod("d", 4, port="dns")):
            slots.put(pod)
        masks = [slots.mask(Name("ns", name)) for name in "abcd"]
        found = result(slots.having(sum(masks), lambda port: port.name == "web"))
        self.assertEqual(found, {80: masks[0] | masks[1], 81: masks[2]})


class SelectorTests(SynchronousTestCase):
    def test_all_conditions_hold_and_an_empty_value_is_one(self) -> None:
        both = [{"key": "a", "operator": "Exists"}, {"key": "b", "operator": "DoesNotExist"}]
        found = selector(Fields({"matchLabels": {"x": ""}, "matchExpressions": both}, "selector"))
        for labels, matches in (
            ({"x": "", "a": "1"}, True),
            ({"x": "1", "a": "1"}, False),
            ({"a": "1"}, False),
            ({"x": ""}, False),
            ({"x": "", "a": "1", "b": "1"}, False),
        ):
            self.assertEqual(found.matches(labels), matches, labels)

    def test_a_condition_without_a_key_is_none(self) -> None:
        given = {"matchExpressions": [{"key": "", "operator": "Exists"}]}
        self.assertRaises(InvalidArgument, selector, Fields(given, "selector"))
