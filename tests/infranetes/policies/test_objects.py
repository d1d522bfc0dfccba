# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' objects as NetworkPolicies need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes.fields import Name
from infranetes.policies import objects
from infranetes.policies.addresses import address
from infranetes.policies.objects import Policy, Rule, namespace, pod, trimmed_pod
from infranetes.policies.selectors import EVERYTHING
from infranetes_common.errors import InvalidArgument
from tests.infranetes.policies import objects as written
from tests.infranetes.policies.objects import Json
from tests.infranetes.policies.world import result

FIELDS = [
    *("annotations", "cidr", "containers", "egress", "endPort", "except", "from", "hostNetwork", "ingress"),
    *("initContainers", "ip", "ipBlock", "key", "labels", "matchExpressions", "matchLabels", "metadata"),
    *("name", "namespaceSelector", "operator", "phase", "podIP", "podIPs", "podSelector", "policyTypes"),
    *("port", "ports", "protocol", "spec", "status", "to", "uid", "values", "containerPort"),
]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(FIELDS), inner),
)
OBJECT = st.dictionaries(st.sampled_from(FIELDS), ANYTHING)


def policy(item: object) -> Policy:
    return result(objects.policy(item))


class PolicyTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.said: list[str] = []
        self.patch(objects._log, "warn", lambda text, **fields: self.said.append(text.format(**fields)))

    def read(self, *rules: Any, **spec: Any) -> Policy:  # Any: JSON
        return policy(written.policy(ingress=list(rules), **spec))

    def test_a_rule_that_can_not_be_read_allows_nothing(self) -> None:
        for rule, why in (
            ({"from": [{}]}, "a peer has either an ipBlock or selectors"),
            ({"from": [{"newSelector": {}}]}, "a peer has either an ipBlock or selectors"),
            ({"from": [{**written.block("10.0.0.0/8"), "podSelector": {}}]}, "a peer has either"),
            ({"from": [written.block("10.0.0.0")]}, "'10.0.0.0' has no prefix length"),
            ({"from": [written.block("10.0.0.0/8", "x/9")]}, "'x' is no address"),
            ({"from": [{"podSelector": written.expression("a", "In")}]}, "0 values is no condition"),
            ({"from": [{"podSelector": written.expression("a", "Exists", "b")}]}, "1 values is no condition"),
            ({"from": [{"podSelector": written.expression("a", "Like", "b")}]}, "operator 'Like'"),
            ({"from": {}}, "from can't be '{}'"),
            ({"ports": [{"port": 0}]}, "port can't be '0'"),
            ({"ports": [{"port": 80, "endPort": 79}]}, "endPort 79 is below port 80"),
            ({"ports": [{"port": "http", "endPort": 79}]}, "goes with the number of a port"),
            ({"ports": [{"endPort": 79}]}, "endPort goes with a port"),
            ({"ports": [{"port": 80, "protocol": "ICMP"}]}, "protocol can't be 'ICMP'"),
        ):
            self.said.clear()
            found = self.read(rule, {"ports": [{"port": 80}]})
            self.assertEqual(len(found.ingress or ()), 1, rule)
            self.assertIn("NetworkPolicy ns/policy can't be used and allows nothing", self.said[0])
            self.assertIn(why, self.said[0])

    def test_rules_that_are_no_list_allow_nothing(self) -> None:
        several: list[Any] = [{}, "all", [None], 7]  # Any: JSON
        for wrong in several:
            self.assertEqual(policy(written.policy(ingress=wrong)).ingress, ())

    def test_a_selector_that_can_not_be_read_selects_all_pods(self) -> None:
        found = policy(written.policy(selector=written.expression("a", "Like")))
        self.assertEqual((found.pods, found.ingress), (EVERYTHING, ()))

    def test_types_that_can_not_be_read_mean_both_directions(self) -> None:
        for types in ([7], ["Ingress", "egress"], ["All"]):
            found = self.read({}, policyTypes=types)
            self.assertEqual((found.ingress, found.egress), ((Rule(None, None),), ()), types)

    def test_a_policy_without_a_specification_closes_its_namespace(self) -> None:
        item = written.policy()
        item["spec"] = "all"
        self.assertEqual(policy(item), Policy(Name("ns", "policy"), EVERYTHING, (), ()))

    def test_what_is_too_much_allows_nothing(self) -> None:
        self.patch(objects, "MAX_PARTS", 10)
        blocks = [written.block("10.0.0.0/8", "10.0.0.1/32")] * 3
        found = self.read({"from": blocks}, {"from": blocks}, {"ports": [{"port": 1}]})
        self.assertEqual(len(found.ingress or ()), 1)
        self.assertIn("over 10 peers", self.said[0])

    def test_of_one_policy_the_log_has_a_few_lines(self) -> None:
        self.read(*[{"from": [{}]}] * 1000)
        self.assertEqual(len(self.said), objects.MOST_SAID)
        self.assertIn("further parts of NetworkPolicy ns/policy", self.said[-1])

    def test_as_much_as_is_allowed_is_read(self) -> None:
        self.patch(objects, "MAX_PARTS", 10)
        rules = [{"from": [written.block("10.0.0.0/8", "10.0.0.1/32")] * 4, "ports": [{"port": 1}] * 2}]
        self.assertEqual((len(self.read(*rules).ingress or ()), self.said), (1, []))

    def test_without_a_name_it_is_refused(self) -> None:
        self.assertRaises(InvalidArgument, policy, {"spec": {}})


class PodTests(SynchronousTestCase):
    def test_one_address_of_an_older_api_server(self) -> None:
        item = written.pod("a")
        item["status"] = {"podIP": "10.0.0.1"}
        found = pod(item)
        assert found is not None
        self.assertEqual(found.addresses, (address("10.0.0.1"),))

    def test_what_is_kept_of_it_is_read_the_same(self) -> None:
        side = {"name": "s", "image": "i", "restartPolicy": "Always", "ports": [written.port("s", 1)]}
        item = written.pod(
            "a", "10.0.0.1", labels={"a": "b"}, ports=[written.port("p", 2)], initContainers=[side]
        )
        item["metadata"] |= {
            "annotations": {"kubernetes.io/config.mirror": "m", "x": "y"},
            "managedFields": [],
        }
        item["spec"]["volumes"] = []
        kept = trimmed_pod(item)
        self.assertEqual(pod(kept), pod(item))
        for gone in ("managedFields", "'x'", "volumes", "image"):
            self.assertNotIn(gone, str(kept))

    def test_errors_name_the_pod_and_the_field(self) -> None:
        for fields, why in (
            (
                {"ports": [written.port("p", 0)]},
                "Pod ns/a: spec: containers: ports: containerPort can't be '0'",
            ),
            ({"labels": {"a": 7}}, "a can't be '7'"),
            ({"hostNetwork": "yes"}, "hostNetwork can't be 'yes'"),
        ):
            error = self.assertRaises(InvalidArgument, pod, written.pod("a", **fields))
            self.assertIn(why, str(error))
        self.assertRaises(InvalidArgument, pod, written.pod("a", "10.0.0.256"))


class HostileTests(SynchronousTestCase):
    @given(OBJECT)
    def test_whatever_comes_is_read_or_refused(self, item: Json) -> None:
        named = {**item, "metadata": {"name": "a"}}
        reads: tuple[Callable[[object], object], ...] = (pod, namespace, policy)
        for each, read in ((each, read) for each in (item, named, trimmed_pod(item)) for read in reads):
            try:
                read(each)
            except InvalidArgument:
                continue

    @given(OBJECT)
    def test_what_is_read_of_any_policy_never_allows_all_by_mistake(self, spec: Json) -> None:
        """Only an explicit rule allows all peers and all ports."""
        found = policy({"metadata": {"name": "a"}, "spec": spec})
        for direction, other_side in ((found.ingress, "ingress"), (found.egress, "egress")):
            if any(rule == Rule(None, None) for rule in direction or ()):
                side = "from" if other_side == "ingress" else "to"
                given_rules = spec[other_side]
                self.assertTrue(any(not each.get(side) and not each.get("ports") for each in given_rules))
