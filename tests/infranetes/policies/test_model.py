# SPDX-License-Identifier: Apache-2.0
"""The firewalls that follow from NetworkPolicies: Kubernetes' rules, one by one."""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes.watch import Put
from infranetes.policies import model
from infranetes_common.pod_firewall import CLOSED, OPEN, Allowed, Ports
from tests.infranetes.policies.objects import (
    block,
    expression,
    labelled,
    namespace,
    pod,
    pods,
    policy,
    port,
)
from tests.infranetes.policies.world import World, addresses, finish

CLIENT, OTHER, ALIEN, OUTSIDE = "10.0.0.2", "10.0.0.3", "10.0.1.2", "192.0.2.7"


class WorldCase(SynchronousTestCase):
    """The local pod `web`, two clients in its namespace, and a client in another namespace."""

    def setUp(self) -> None:
        self.world = World()
        self.web = pod(
            "web", "10.0.0.1", labels={"app": "web"}, ports=[port("http", 8080), port("dns", 53, "UDP")]
        )
        self.client = pod("client", CLIENT, labels={"app": "client"}, ports=[port("http", 9090)])
        self.other = pod("other", OTHER, labels={"app": "other"}, ports=[port("http", 9091)])
        self.alien = pod("client", ALIEN, namespace="away", labels={"app": "client"})
        self.world.put(self.world.namespaces, namespace("ns", team="red"), namespace("away", team="blue"))
        self.world.put(self.world.pods, self.web, self.client, self.other, self.alien)
        self.world.add_local(self.web)

    def have(self, *policies: dict[str, Any]) -> None:  # Any: JSON
        """Set the policies."""
        self.world.replace(self.world.policies, *policies)

    def ingress(self, *rules: dict[str, Any], **spec: Any) -> None:  # Any: JSON
        """Set one policy with these ingress rules."""
        self.have(policy(ingress=list(rules), **spec))

    def egress(self, *rules: dict[str, Any]) -> None:  # Any: JSON
        """Set one policy with these egress rules."""
        self.have(policy(egress=list(rules), policyTypes=["Egress"]))

    def received(self, port: int | None = 80, protocol: str = "TCP") -> set[str]:
        """Return which clients may connect to `web`."""
        everyone = (CLIENT, OTHER, ALIEN, OUTSIDE)
        return {each for each in everyone if self.world.receives("web", each, port, protocol)}

    def sent(self, port: int | None = 80, protocol: str = "TCP") -> set[str]:
        """Return to which clients `web` may connect."""
        everyone = (CLIENT, OTHER, ALIEN, OUTSIDE)
        return {each for each in everyone if self.world.sends("web", each, port, protocol)}


class IsolationTests(WorldCase):
    def test_without_policies_a_pod_is_open(self) -> None:
        self.assertEqual(self.world.firewall("web"), OPEN)

    def test_a_policy_for_other_pods_or_of_another_namespace_does_not_matter(self) -> None:
        self.have(policy(selector=labelled(app="other")), policy(namespace="away"))
        self.assertEqual(self.world.firewall("web"), OPEN)

    def test_a_policy_without_rules_lets_nothing_in_and_everything_out(self) -> None:
        self.have(policy())
        firewall = self.world.firewall("web")
        self.assertEqual((firewall.ingress, firewall.egress), ((), None))

    def test_rules_for_what_goes_out_isolate_both_directions_unless_types_are_given(self) -> None:
        self.have(policy(egress=[{"to": [pods(app="client")]}]))
        self.assertEqual((self.received(), self.sent()), (set(), {CLIENT}))
        self.have(policy(egress=[{"to": [pods(app="client")]}], policyTypes=["Egress"]))
        self.assertEqual((len(self.received()), self.sent()), (4, {CLIENT}))

    def test_rules_of_a_direction_that_is_not_among_the_types_do_not_count(self) -> None:
        self.have(policy(ingress=[], egress=[{"to": [pods(app="client")]}], policyTypes=["Ingress"]))
        self.assertEqual((self.received(), len(self.sent())), (set(), 4))

    def test_both_types_without_rules_close_a_pod(self) -> None:
        self.have(policy(policyTypes=["Ingress", "Egress"]))
        self.assertEqual(self.world.firewall("web"), CLOSED)

    def test_policies_add_up(self) -> None:
        self.have(
            policy("none"),
            policy("clients", ingress=[{"from": [pods(app="client")]}]),
            policy("others", ingress=[{"from": [pods(app="other")]}], selector=labelled(app="web")),
        )
        self.assertEqual(self.received(), {CLIENT, OTHER})

    def test_an_empty_rule_allows_everything(self) -> None:
        self.have(policy("none"), policy("all", ingress=[{}]))
        self.assertEqual(self.world.firewall("web"), OPEN)
        self.assertIn(OUTSIDE, self.received(None, "ICMP"))

    def test_empty_lists_of_peers_and_ports_mean_all(self) -> None:
        self.ingress({"from": [], "ports": [{"port": 80}]})
        self.assertEqual((len(self.received(80)), len(self.received(81))), (4, 0))
        self.ingress({"from": [pods(app="client")], "ports": []})
        self.assertEqual((self.received(80), self.received(None, "ICMP")), ({CLIENT}, {CLIENT}))


class PeerTests(WorldCase):
    def test_pods_of_the_policy_s_own_namespace(self) -> None:
        self.ingress({"from": [pods(app="client")]})
        self.assertEqual(self.received(), {CLIENT})
        self.ingress({"from": [{"podSelector": {}}]})
        self.assertEqual(self.received(), {CLIENT, OTHER})

    def test_all_pods_of_namespaces(self) -> None:
        self.ingress({"from": [{"namespaceSelector": labelled(team="red")}]})
        self.assertEqual(self.received(), {CLIENT, OTHER})
        self.ingress({"from": [{"namespaceSelector": {}}]})
        self.assertEqual(self.received(), {CLIENT, OTHER, ALIEN})

    def test_both_selectors_in_one_peer_have_both_to_hold(self) -> None:
        self.ingress({"from": [{"namespaceSelector": labelled(team="blue"), **pods(app="client")}]})
        self.assertEqual(self.received(), {ALIEN})

    def test_of_several_peers_any_may_hold(self) -> None:
        self.ingress({"from": [{"namespaceSelector": labelled(team="blue")}, pods(app="client")]})
        self.assertEqual(self.received(), {ALIEN, CLIENT})

    def test_a_namespace_that_is_not_known_is_meant_by_no_selector(self) -> None:
        self.world.remove(self.world.namespaces, namespace("away"))
        self.ingress({"from": [{"namespaceSelector": {}}]})
        self.assertEqual(self.received(), {CLIENT, OTHER})

    def test_a_block_means_all_addresses_in_it_but_the_excepted(self) -> None:
        self.ingress({"from": [block("10.0.0.0/8", "10.0.1.0/24", "10.0.0.3/32")]})
        self.assertEqual(self.received(), {CLIENT})
        self.ingress({"from": [block("0.0.0.0/0", "10.0.0.0/8")]})
        self.assertEqual(self.received(), {OUTSIDE})

    def test_what_a_block_excepts_another_peer_may_allow(self) -> None:
        self.ingress({"from": [block("10.0.0.0/8", "10.0.0.0/24"), pods(app="other")]})
        self.assertEqual(self.received(), {ALIEN, OTHER})

    def test_blocks_become_networks_of_which_none_is_within_another(self) -> None:
        self.ingress(
            {"from": [block("10.0.0.0/30", "10.0.0.1/32"), block("10.0.0.3/32"), block("10.0.0.0/32")]}
        )
        ingress = self.world.firewall("web").ingress
        self.assertEqual(addresses(ingress), [["10.0.0.0/32", "10.0.0.2/31"]])

    def test_pods_on_their_node_s_network_are_no_peers(self) -> None:
        self.world.put(self.world.pods, pod("host", OUTSIDE, labels={"app": "client"}, hostNetwork=True))
        self.ingress({"from": [pods(app="client")]})
        self.assertEqual(self.received(), {CLIENT})

    def test_pods_that_have_ended_are_no_peers(self) -> None:
        for phase, expected in (("Failed", set()), ("Running", {CLIENT}), ("Succeeded", set())):
            self.client["status"]["phase"] = phase
            self.world.put(self.world.pods, self.client)
            self.ingress({"from": [pods(app="client")]})
            self.assertEqual(self.received(), expected, phase)

    def test_pods_that_are_being_deleted_still_count(self) -> None:
        self.client["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self.world.put(self.world.pods, self.client)
        self.ingress({"from": [pods(app="client")]})
        self.assertEqual(self.received(), {CLIENT})

    def test_both_of_a_pod_s_addresses_count(self) -> None:
        self.world.put(self.world.pods, pod("client", CLIENT, "fd00::2", labels={"app": "client"}))
        self.ingress({"from": [pods(app="client")]})
        self.assertEqual(addresses(self.world.firewall("web").ingress), [["10.0.0.2/32", "fd00::2/128"]])

    def test_expressions_select_peers(self) -> None:
        for selector, expected in (
            (expression("app", "In", "client", "web"), {CLIENT}),
            (expression("app", "NotIn", "client"), {OTHER}),
            (expression("app", "Exists"), {CLIENT, OTHER}),
            (expression("app", "DoesNotExist"), set()),
            (expression("none", "NotIn", "client"), {CLIENT, OTHER}),
        ):
            self.ingress({"from": [{"podSelector": selector}]})
            self.assertEqual(self.received(), expected, selector)


class PortTests(WorldCase):
    def test_the_protocol_is_tcp_unless_it_is_given(self) -> None:
        self.ingress(
            {"ports": [{"port": 80}, {"port": 81, "protocol": "UDP"}, {"port": 82, "protocol": "SCTP"}]}
        )
        for number, protocol in ((80, "TCP"), (81, "UDP"), (82, "SCTP")):
            for other in ("TCP", "UDP", "SCTP"):
                self.assertEqual(bool(self.received(number, other)), other == protocol)

    def test_a_protocol_alone_means_all_its_ports(self) -> None:
        self.ingress({"ports": [{"protocol": "UDP"}]})
        self.assertEqual((len(self.received(1, "UDP")), len(self.received(65535, "UDP"))), (4, 4))
        self.assertEqual((self.received(1, "TCP"), self.received(None, "ICMP")), (set(), set()))

    def test_a_range_of_ports(self) -> None:
        self.ingress({"ports": [{"port": 80, "endPort": 90}]})
        self.assertEqual([number for number in (79, 80, 90, 91) if self.received(number)], [80, 90])

    def test_ports_that_overlap_become_one_range(self) -> None:
        self.ingress({"ports": [{"port": 85, "endPort": 90}, {"port": 80, "endPort": 86}, {"port": 91}]})
        (allowed,) = self.world.firewall("web").ingress or ()
        self.assertEqual(allowed.ports, (Ports("TCP", 80, 91),))

    def test_a_name_is_that_of_the_selected_pod_s_port_for_what_comes_in(self) -> None:
        self.ingress({"from": [pods(app="client")], "ports": [{"port": "http"}]})
        self.assertEqual((self.received(8080), self.received(9090)), ({CLIENT}, set()))

    def test_a_name_is_that_of_each_peer_s_port_for_what_goes_out(self) -> None:
        self.egress({"to": [pods(app="client"), pods(app="other")], "ports": [{"port": "http"}]})
        self.assertEqual((self.sent(9090), self.sent(9091), self.sent(8080)), ({CLIENT}, {OTHER}, set()))
        told = [each.ports for each in self.world.firewall("web").egress or ()]
        self.assertEqual(told, [(Ports("TCP", number, number),) for number in (9090, 9091)])

    def test_a_name_without_peers_or_in_a_block_means_the_pods_that_have_it(self) -> None:
        self.egress({"ports": [{"port": "http"}]})
        self.assertEqual((self.sent(9090), self.sent(9091)), ({CLIENT}, {OTHER}))
        self.egress({"to": [block("10.0.0.0/31"), block("10.0.0.2/32")], "ports": [{"port": "http"}]})
        self.assertEqual((self.sent(9090), self.sent(9091)), ({CLIENT}, set()))
        self.egress({"to": [block("10.0.0.3/32")], "ports": [{"port": "http"}]})
        self.assertEqual((self.sent(9090), self.sent(9091)), (set(), {OTHER}))

    def test_a_name_of_another_protocol_means_nothing(self) -> None:
        self.ingress({"ports": [{"port": "dns"}]})
        self.assertEqual(self.world.firewall("web").ingress, ())
        self.ingress({"ports": [{"port": "dns", "protocol": "UDP"}]})
        self.assertEqual(len(self.received(53, "UDP")), 4)

    def test_names_and_numbers_side_by_side(self) -> None:
        self.egress({"to": [pods(app="client")], "ports": [{"port": "http"}, {"port": 80}]})
        self.assertEqual((self.sent(9090), self.sent(80), self.sent(9091)), ({CLIENT}, {CLIENT}, set()))

    def test_sidecars_have_ports_and_other_init_containers_none(self) -> None:
        for restart, expected in (("Always", 4), (None, 0)):
            sidecar = {"name": "init", "ports": [port("side", 7000)], "restartPolicy": restart}
            self.world.put(
                self.world.pods, pod("web", "10.0.0.1", labels={"app": "web"}, initContainers=[sidecar])
            )
            self.ingress({"ports": [{"port": "side"}]})
            self.assertEqual(len(self.received(7000)), expected)

    def test_what_goes_to_the_same_ports_is_told_once(self) -> None:
        self.have(
            policy("a", ingress=[{"from": [pods(app="client")], "ports": [{"port": 80}]}]),
            policy("b", ingress=[{"from": [pods(app="other")], "ports": [{"port": 80, "protocol": "TCP"}]}]),
        )
        self.assertEqual(addresses(self.world.firewall("web").ingress), [["10.0.0.2/31"]])

    def test_what_goes_to_other_ports_is_told_apart(self) -> None:
        self.ingress({"from": [pods(app="client")], "ports": [{"port": 80}]}, {"from": [pods(app="other")]})
        first, second = self.world.firewall("web").ingress or ()
        self.assertEqual((first.ports, second.ports), (None, (Ports("TCP", 80, 80),)))


class ChangeTests(WorldCase):
    def setUp(self) -> None:
        super().setUp()
        self.world.add_local(self.other)
        self.have(policy(selector=labelled(app="web"), ingress=[{"from": [pods(app="client")]}]))
        self.assertEqual(self.world.settle(), {"web", "other"})

    def test_nothing_changes_by_what_is_as_it_was(self) -> None:
        self.ingress({"from": [{"namespaceSelector": {}}]}, selector=labelled(app="web"))
        self.world.settle()
        self.patch(model, "STEP", 1)  # so that looking at anything takes steps
        world, pods = self.world, (self.client, self.web)
        self.assertEqual(sum(finish(world.pods.take(Put(world.pods.trimmed(each)))) for each in pods), 0)
        self.assertEqual(finish(world.namespaces.take(Put(namespace("away", team="blue")))), 0)
        again = policy(selector=labelled(app="web"), ingress=[{"from": [{"namespaceSelector": {}}]}])
        world.put(world.policies, again)
        self.assertFalse(world.model.unsettled)

    def test_what_means_no_local_pod_touches_nobody(self) -> None:
        self.world.put(self.world.pods, pod("new", "10.0.0.9"), pod("new", "10.0.1.9", namespace="away"))
        self.world.put(self.world.policies, policy("none", labelled(app="none")), policy(namespace="away"))
        self.assertFalse(self.world.model.unsettled)

    def test_equal_peers_have_equal_networks_of_which_there_is_one_object(self) -> None:
        """So comparing large firewalls is cheap, and so is making them."""
        self.have(policy(ingress=[{"from": [pods(app="client")]}]))
        self.world.settle()
        networks = [(self.world.firewall(id).ingress or ())[0].networks for id in ("web", "other")]
        self.assertIs(networks[0], networks[1])
        self.ingress({"from": [pods(app="client")], "ports": [{"port": 80}]}, selector=labelled(app="web"))
        self.assertIs((self.world.firewall("web").ingress or ())[0].networks, networks[0])

    def test_a_namespace_without_pods_is_selected_like_any_other(self) -> None:
        self.world.put(self.world.namespaces, namespace("empty", team="green"))
        self.ingress({"from": [{"namespaceSelector": labelled(team="green")}]}, selector=labelled(app="web"))
        self.assertEqual(self.received(), set())
        self.world.put(self.world.pods, pod("first", OUTSIDE, namespace="empty"))
        self.assertEqual(self.received(), {OUTSIDE})

    def test_a_local_pod_may_go_while_its_firewall_is_computed(self) -> None:
        self.world.model.remove("other")
        self.ingress({"from": [pods(app="other")]}, selector=labelled(app="web"))
        settling = self.world.model.settle(self.world.changed)
        next(settling)  # the new peer is being selected
        self.world.model.remove("web")
        finish(settling)
        self.assertIsNone(self.world.model.firewall("web"))

    def test_a_peer_comes_moves_and_goes(self) -> None:
        for its in ([OUTSIDE], [OTHER], []):
            new = pod("new", *its, labels={"app": "client"})
            self.world.put(self.world.pods, new)
            self.assertEqual(self.world.settle(), {"web"})
            self.assertEqual(self.received(), {CLIENT, *its})
        self.world.remove(self.world.pods, self.client)
        self.assertEqual(self.world.settle(), {"web"})
        self.assertEqual(self.received(), set())

    def test_a_peer_gets_other_labels(self) -> None:
        self.client["metadata"]["labels"] = {"app": "none"}
        self.world.put(self.world.pods, self.client)
        self.assertEqual(self.world.settle(), {"web"})
        self.assertEqual(self.received(), set())

    def test_a_namespace_gets_other_labels(self) -> None:
        self.ingress({"from": [{"namespaceSelector": labelled(team="green")}]}, selector=labelled(app="web"))
        self.assertEqual(self.received(), set())
        self.world.put(self.world.namespaces, namespace("away", team="green"))
        self.assertEqual(self.world.settle(), {"web"})
        self.assertEqual(self.received(), {ALIEN})
        self.world.remove(self.world.namespaces, namespace("away"))
        self.assertEqual(self.received(), set())

    def test_a_local_pod_gets_other_labels(self) -> None:
        self.other["metadata"]["labels"] = {"app": "web"}
        self.world.put(self.world.pods, self.other)
        self.assertEqual(self.world.settle(), {"other"})
        self.assertEqual(self.world.firewall("other"), self.world.firewall("web"))

    def test_a_peer_gets_other_ports(self) -> None:
        self.egress({"to": [pods(app="client")], "ports": [{"port": "http"}]})
        self.assertEqual(self.sent(9090), {CLIENT})
        self.client["spec"]["containers"][0]["ports"] = [port("http", 7070)]
        self.world.put(self.world.pods, self.client)
        self.assertEqual((self.sent(9090), self.sent(7070)), (set(), {CLIENT}))

    def test_a_policy_changes_and_goes(self) -> None:
        self.ingress({"from": [pods(app="other")]}, selector=labelled(app="web"))
        self.assertEqual(self.world.settle(), {"web"})
        self.assertEqual(self.received(), {OTHER})
        self.ingress(selector=labelled(app="other"))
        self.assertEqual(self.world.settle(), {"web", "other"})
        self.have()
        self.assertEqual(self.world.settle(), {"other"})
        self.assertEqual(self.world.firewall("web"), OPEN)

    def test_of_two_policies_the_other_one_stays(self) -> None:
        other = policy("other", labelled(app="web"), ingress=[{"from": [pods(app="other")]}])
        self.world.put(self.world.policies, other)
        self.assertEqual(self.received(), {CLIENT, OTHER})
        self.world.remove(self.world.policies, other)
        self.assertEqual(self.received(), {CLIENT})
        self.world.remove(self.world.policies, policy())
        self.assertEqual(self.world.firewall("web"), OPEN)

    def test_what_no_local_pod_needs_is_forgotten(self) -> None:
        self.ingress({"from": [pods(app="client"), {"namespaceSelector": {}}], "ports": [{"port": 80}]})
        self.egress({"ports": [{"port": "http"}]})
        self.world.settle()
        self.assertEqual(len(self.world.model._selections), 1)
        for id in ("web", "other", "other"):
            self.world.model.remove(id)
        self.assertEqual(len(self.world.model._selections), 0)
        self.assertEqual(self.world.model._selections._within, {})
        self.world.settle()
        self.assertEqual((self.world.model._unions, self.world.model._local_ids), ({}, {}))
        self.assertIsNone(self.world.model.firewall("web"))
        self.assertEqual(self.world.model.policies("web"), [])
        for kind, items in ((self.world.pods, [self.web]), (self.world.policies, [policy()])):
            self.world.replace(kind, *items)
            self.world.remove(kind, *items)
        self.assertEqual((self.world.model._pods, self.world.model._policies), ({}, {}))


class LocalPodTests(WorldCase):
    def test_before_the_api_server_shows_it_kubelet_s_labels_count(self) -> None:
        self.have(policy(selector=labelled(app="new"), ingress=[{"from": [pods(app="client")]}]))
        self.world.add_local(pod("new", labels={"app": "new"}))
        self.assertTrue(self.world.receives("new", CLIENT))
        self.assertFalse(self.world.receives("new", OTHER))

    def test_kubelet_s_own_labels_are_none_of_the_pod_s(self) -> None:
        self.have(policy(selector=expression("io.kubernetes.pod.name", "DoesNotExist")))
        self.world.add_local(pod("new"))
        self.assertEqual(self.world.firewall("new").ingress, ())

    def test_another_pod_of_its_name_does_not_speak_for_it(self) -> None:
        self.have(policy(selector=labelled(app="old")))
        self.world.add_local(pod("new", uid="1", labels={"app": "old"}))
        self.world.put(self.world.pods, pod("new", uid="2"))
        self.assertEqual(self.world.firewall("new").ingress, ())
        self.world.put(self.world.pods, pod("new", uid="1"))
        self.assertEqual(self.world.firewall("new"), OPEN)

    def test_a_static_pod_is_known_by_the_uid_that_kubelet_has_for_it(self) -> None:
        self.have(policy(selector=labelled(app="static")))
        shown = pod("static", uid="the API server's", labels={"app": "static"})
        shown["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "kubelet's"}
        self.world.put(self.world.pods, shown)
        self.world.add_local(pod("static", uid="kubelet's"))
        self.assertEqual(self.world.firewall("static").ingress, ())

    def test_after_the_api_server_has_removed_it_it_is_what_it_was(self) -> None:
        self.have(policy(selector=labelled(app="changed")))
        self.world.put(self.world.pods, pod("new", labels={"app": "changed"}))
        self.world.add_local(pod("new"))
        self.world.remove(self.world.pods, pod("new"))
        self.assertEqual(self.world.firewall("new").ingress, ())

    def test_a_pod_that_the_cluster_does_not_know_has_its_namespace_s_policies(self) -> None:
        self.have(policy(ingress=[{"from": [pods(app="client")]}]))
        self.world.add_local(pod("unknown"))
        expected = Allowed((IPv4Network(CLIENT),), None)
        self.assertEqual(self.world.firewall("unknown").ingress, (expected,))
