# SPDX-License-Identifier: Apache-2.0
"""The table of all rules: its changes, and what a VM is sent of them."""

from __future__ import annotations

from collections import deque
from ipaddress import ip_network

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes.fields import Name
from infranetes.services import table
from infranetes.services.objects import EndpointSlice, OwnNode, Service, endpoint_slice, service
from infranetes.services.rules import Key, Rule
from infranetes.services.table import RuleTable
from infranetes_common.addresses import Network
from tests.infranetes.services import objects as written

HERE = OwnNode("here", "zone-a")


def a_service(name: str, ip: str = "10.96.0.10") -> Service:
    found = service(written.service(name, (ip,)))
    assert found is not None
    return found


def a_slice(service: str, *addresses: str, name: str = "") -> EndpointSlice:
    found = endpoint_slice(
        written.endpoint_slice(*map(written.endpoint, addresses), service=service, name=name)
    )
    assert found is not None
    return found


class VM:
    """Does with updates what a VM does."""

    def __init__(self) -> None:
        self.rules: dict[Key, Rule] = {}
        self.ranges: tuple[Network, ...] = ()
        self.number = 0
        self.snapshots = 0

    def follow(self, source: RuleTable) -> int:
        """Apply the changes. Return how many rules they had."""
        changes = source.since(self.number)
        if changes is None or source.ranges_number > self.number:
            self.ranges = source.ranges
        if changes is None:
            self.rules = dict(source.rules)
            self.snapshots += 1
            sent = len(self.rules)
        else:
            sent = 0
            for change in changes:
                sent += 1
                if change.rule is None:
                    self.rules.pop(change.key, None)
                else:
                    self.rules[change.key] = change.rule
        self.number = source.number
        return sent


class TableTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.table = RuleTable(HERE)
        self.vm = VM()

    def endpoints(self) -> dict[str, list[str]]:
        """Return the VM's endpoints by address."""
        self.vm.follow(self.table)
        self.assertEqual(self.vm.rules, self.table.rules)
        return {
            str(key.address): [str(target) for target, _ in rule.endpoints]
            for key, rule in self.vm.rules.items()
        }

    def test_a_service_and_its_slices_come_in_any_order(self) -> None:
        self.table.put_slice(a_slice("a", "10.1.0.1"))
        self.assertEqual(self.endpoints(), {})
        self.table.put_service(a_service("a"))
        self.assertEqual(self.endpoints(), {"10.96.0.10": ["10.1.0.1"]})
        self.table.put_slice(a_slice("a", "10.1.0.2", name="a-2"))
        self.assertEqual(self.endpoints(), {"10.96.0.10": ["10.1.0.1", "10.1.0.2"]})
        self.table.remove_slice(Name("ns", "a-1"))
        self.table.remove_slice(Name("ns", "a-1"))
        self.assertEqual(self.endpoints(), {"10.96.0.10": ["10.1.0.2"]})
        self.table.remove_service(Name("ns", "a"))
        self.table.remove_service(Name("ns", "a"))
        self.assertEqual(self.endpoints(), {})

    def test_what_changes_no_rule_has_no_number(self) -> None:
        for _ in range(2):
            self.table.put_service(a_service("a"))
            self.table.put_slice(a_slice("a", "10.1.0.1"))
        self.assertEqual(self.table.number, 2)
        self.table.replace([a_service("a")], [a_slice("a", "10.1.0.1")])
        deque(self.table.move(OwnNode("here", "zone-b")), maxlen=0)
        self.assertEqual(self.table.number, 2)

    def test_a_vm_is_sent_each_rule_once_as_it_is_now(self) -> None:
        for number in range(20):
            self.table.put_service(a_service("a"))
            self.table.put_slice(a_slice("a", f"10.1.0.{number}"))
            self.table.put_service(a_service("b", "10.96.0.11"))
        self.assertEqual(self.vm.follow(self.table), 2)
        self.assertEqual(self.vm.follow(self.table), 0)
        self.table.put_slice(a_slice("b", "10.1.1.1"))
        self.assertEqual(self.vm.follow(self.table), 1)

    def test_a_slice_may_change_its_service(self) -> None:
        self.table.put_service(a_service("a"))
        self.table.put_service(a_service("b", "10.96.0.11"))
        self.table.put_slice(a_slice("a", "10.1.0.1", name="s"))
        self.table.put_slice(a_slice("b", "10.1.0.1", name="s"))
        self.assertEqual(self.endpoints(), {"10.96.0.10": [], "10.96.0.11": ["10.1.0.1"]})

    def test_of_two_services_that_want_an_address_the_first_by_name_has_it(self) -> None:
        for name in ("b", "a", "c"):
            self.table.put_slice(a_slice(name, f"10.1.0.{ord(name)}"))
            self.table.put_service(a_service(name))
        self.assertEqual(self.endpoints(), {"10.96.0.10": ["10.1.0.97"]})
        self.table.remove_service(Name("ns", "a"))
        self.assertEqual(self.endpoints(), {"10.96.0.10": ["10.1.0.98"]})

    def test_nobody_s_external_address_takes_another_s_cluster_ip(self) -> None:
        self.table.put_slice(a_slice("a", "10.1.0.1"))
        self.table.put_slice(a_slice("b", "10.1.0.2"))
        thief = service(written.service("a", ("10.96.0.9",), externalIPs=["10.96.0.10"]))
        assert thief is not None
        self.table.put_service(thief)
        self.assertEqual(self.endpoints(), {"10.96.0.9": ["10.1.0.1"], "10.96.0.10": ["10.1.0.1"]})
        self.table.put_service(a_service("b"))
        self.assertEqual(self.endpoints(), {"10.96.0.9": ["10.1.0.1"], "10.96.0.10": ["10.1.0.2"]})
        (key,) = [key for key in self.table.rules if str(key.address) == "10.96.0.10"]
        self.assertEqual(self.table.services(key), [Name("ns", "b"), Name("ns", "a")])

    def test_services_beyond_what_vms_take_are_left_out_until_there_is_room(self) -> None:
        self.patch(table, "MOST_RULES", 3)
        for number in range(1, 6):
            self.table.put_service(a_service(f"s{number}", f"10.96.0.{number}"))
        self.assertEqual(list(self.endpoints()), [f"10.96.0.{number}" for number in (1, 2, 3)])
        self.table.put_service(a_service("s3", "10.96.0.33"))
        self.table.remove_service(Name("ns", "s5"))
        self.table.remove_service(Name("ns", "s1"))
        self.assertEqual(list(self.endpoints()), [f"10.96.0.{number}" for number in (2, 33, 4)])

    def test_a_list_ends_what_is_not_in_it(self) -> None:
        self.table.put_service(a_service("a"))
        self.table.put_slice(a_slice("a", "10.1.0.1"))
        self.table.replace([a_service("b", "10.96.0.11")], [])
        self.assertEqual(self.endpoints(), {"10.96.0.11": []})
        self.table.put_service(a_service("a"))
        self.assertEqual(self.endpoints(), {"10.96.0.11": [], "10.96.0.10": []})

    def test_a_vm_that_missed_a_forgotten_removal_is_sent_all_rules(self) -> None:
        self.patch(table, "REMEMBERED", 2)
        for number in range(4):
            self.table.put_service(a_service(f"s{number}", f"10.96.0.{number}"))
        self.vm.follow(self.table)
        for number in range(3):
            self.table.remove_service(Name("ns", f"s{number}"))
        self.assertEqual(self.endpoints(), {"10.96.0.3": []})
        self.assertEqual(self.vm.snapshots, 1)

    def test_a_rule_that_came_back_is_not_forgotten_with_old_removals(self) -> None:
        self.patch(table, "REMEMBERED", 2)
        for number in range(5):
            self.table.put_service(a_service(f"s{number}", f"10.96.0.{number}"))
        self.table.remove_service(Name("ns", "s0"))
        self.table.put_service(a_service("s0", "10.96.0.0"))
        for number in range(1, 4):
            self.table.remove_service(Name("ns", f"s{number}"))
        self.assertEqual(self.endpoints(), {"10.96.0.4": [], "10.96.0.0": []})
        self.assertEqual(self.table.count, 2)

    def test_as_many_removals_as_are_remembered_and_the_changes_in_their_order(self) -> None:
        self.patch(table, "REMEMBERED", 2)
        for number in range(4):
            self.table.put_service(a_service(f"s{number}", f"10.96.0.{number}"))
        for number, known in ((1, True), (0, True), (2, False)):
            self.table.remove_service(Name("ns", f"s{number}"))
            changes = self.table.since(4)
            self.assertEqual(changes is not None, known)
            if changes is not None:
                self.assertEqual([each.number for each in changes], list(range(5, self.table.number + 1)))
        self.assertEqual([str(each.key.address) for each in self.table.everything()], ["10.96.0.3"])
        self.assertEqual([each.number for each in self.table.since(5) or ()], [6, 7])

    def test_nothing_is_kept_of_what_is_gone(self) -> None:
        for _ in range(2):
            self.table.put_service(a_service("a"))
            self.table.put_slice(a_slice("a", "10.1.0.1", name="s"))
            self.table.remove_service(Name("ns", "a"))
            self.table.remove_slice(Name("ns", "s"))
            kept = (self.table._services, self.table._slices, self.table._service_of, self.table._keys)
            self.assertEqual([*kept, self.table._wanted], [{}] * 5)

    def test_a_slice_that_a_list_ended_is_gone(self) -> None:
        self.table.put_slice(a_slice("a", "10.1.0.1", name="s"))
        self.table.replace([a_service("a")], [])
        self.table.remove_slice(Name("ns", "s"))
        self.assertEqual(self.endpoints(), {"10.96.0.10": []})

    def test_all_services_of_an_address_in_their_order(self) -> None:
        for name in ("b", "c", "a"):
            self.table.put_service(a_service(name))
        (key,) = self.table.rules
        self.assertEqual(self.table.services(key), [Name("ns", name) for name in "abc"])
        self.assertEqual(self.table.services(Key(key.address, "UDP", 1)), [])

    def test_a_move_is_made_in_steps_and_only_if_the_node_has_moved(self) -> None:
        self.patch(table, "STEP", 2)
        for number in range(5):
            self.table.put_service(a_service(f"s{number}", f"10.96.0.{number}"))
        self.assertEqual(len(list(self.table.move(HERE))), 0)
        self.assertEqual(len(list(self.table.move(OwnNode("here", "zone-b")))), 2)

    def test_the_ranges_of_all_service_cidrs_count_and_are_told_when_they_change(self) -> None:
        one, other = ip_network("10.96.0.0/12"), ip_network("fd00::/108")
        for name, given_ranges in (("a", (one,)), ("b", (one, other)), ("a", ()), ("a", ())):
            self.table.put_ranges(Name("", name), given_ranges)
            self.vm.follow(self.table)
            self.assertEqual(self.vm.ranges, self.table.ranges)
        self.assertEqual((set(self.table.ranges), self.table.number), ({one, other}, 2))
        self.table.put_ranges(Name("", "b"), ())
        self.assertEqual((self.table.ranges, self.table.number), ((), 3))

    def test_of_more_ranges_than_a_vm_takes_it_is_told_none(self) -> None:
        self.patch(table, "MOST_RANGES", 2)
        many = [ip_network(f"10.{number}.0.0/16") for number in range(3)]
        self.table.put_ranges(Name("", "a"), tuple(many[:2]))
        self.assertEqual(len(self.table.ranges), 2)
        self.table.put_ranges(Name("", "b"), tuple(many))
        self.assertEqual(self.table.ranges, ())

    def test_a_vm_of_another_table_is_sent_all_rules(self) -> None:
        self.vm.number = 5
        self.table.put_service(a_service("a"))
        self.assertIsNone(self.table.since(5))


NAMES = st.sampled_from("abc")
ADDRESSES = st.integers(0, 3)


class AnyOrderTests(SynchronousTestCase):
    """Whatever changes in any order, VMs that poll now and then have what a new table would have."""

    @given(
        st.lists(
            st.tuples(st.just("service"), NAMES, ADDRESSES)
            | st.tuples(st.just("no service"), NAMES)
            | st.tuples(st.just("slice"), NAMES, NAMES, st.sets(ADDRESSES))
            | st.tuples(st.just("no slice"), NAMES)
            | st.tuples(st.just("ranges"), NAMES, st.sets(ADDRESSES))
            | st.tuples(st.just("look"), st.integers(0, 1)),
            max_size=40,
        )
    )
    def test_any_order(self, steps: list[tuple[object, ...]]) -> None:
        self.patch(table, "REMEMBERED", 2)
        services: dict[str, Service] = {}
        slices: dict[str, EndpointSlice] = {}
        ranges: dict[Name, tuple[Network, ...]] = {}
        given_table, vms = RuleTable(HERE), (VM(), VM())
        for step in steps:
            match step:
                case ("service", str(name), address):
                    services[name] = a_service(name, f"10.96.0.{address}")
                    given_table.put_service(services[name])
                case ("no service", str(name)):
                    services.pop(name, None)
                    given_table.remove_service(Name("ns", name))
                case ("slice", str(name), str(of), set(numbers)):
                    slices[name] = a_slice(of, *(f"10.1.0.{each}" for each in numbers), name=name)
                    given_table.put_slice(slices[name])
                case ("no slice", str(name)):
                    slices.pop(name, None)
                    given_table.remove_slice(Name("ns", name))
                case ("ranges", str(name), set(numbers)):
                    its = ranges[Name("", name)] = tuple(ip_network(f"10.9{each}.0.0/16") for each in numbers)
                    given_table.put_ranges(Name("", name), its)
                case ("look", int(which)):
                    vms[which].follow(given_table)
        afresh = RuleTable(HERE)
        afresh.replace(list(services.values()), list(slices.values()))
        for each, its in ranges.items():
            afresh.put_ranges(each, its)
        for vm in vms:
            vm.follow(given_table)
            self.assertEqual((vm.rules, vm.ranges), (afresh.rules, afresh.ranges))
