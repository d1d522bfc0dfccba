# SPDX-License-Identifier: Apache-2.0
"""How objects that the API server shows, or shows no more, change a pod's firewall, and who is told of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, cast

from twisted.internet.task import Clock
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes.fields import Name
from infranetes.policies.cluster import MAX_REST_SECONDS, ClusterPolicies
from infranetes.policies.interface import LocalPod
from infranetes.policies.kinds import Namespaces, Pods, Policies
from infranetes.policies.model import Model
from infranetes_common.errors import InvalidArgument
from infranetes_common.pod_firewall import OPEN
from tests.infranetes.policies import objects as written

WEB = LocalPod("sandbox-1", "ns", "web", "web", {"app": "web"})


def done(steps: Iterable[None] | None) -> None:
    deque(steps or (), maxlen=0)


class KindTests(SynchronousTestCase):
    def test_policies_namespaces_and_pods_come_and_go(self) -> None:
        model = Model()
        policies, namespaces, pods = Policies(model), Namespaces(model), Pods(model)
        peer = {"namespaceSelector": {"matchLabels": {"team": "a"}}, "podSelector": {}}
        model.add(WEB)

        def allowed() -> list[str]:
            done(model.settle(set()))
            found = model.firewall(WEB.id)
            assert found is not None
            return [str(each) for one in found.ingress or () for each in one.networks]

        self.assertEqual(allowed(), [])
        self.assertEqual(model.firewall(WEB.id), OPEN)
        done(policies.put(written.policy(selector=written.labelled(app="web"), ingress=[{"from": [peer]}])))
        self.assertEqual(allowed(), [])
        self.assertNotEqual(model.firewall(WEB.id), OPEN)
        done(pods.put(written.pod("client", "10.0.0.2")))
        done(namespaces.put(written.namespace("ns", team="a")))
        self.assertEqual(allowed(), ["10.0.0.2/32"])
        done(namespaces.remove(Name("", "ns")))
        self.assertEqual(allowed(), [])
        done(namespaces.put(written.namespace("ns", team="a")))
        self.assertEqual(allowed(), ["10.0.0.2/32"])
        done(pods.remove(Name("ns", "client")))
        self.assertEqual(allowed(), [])
        (name,) = [each.name for each in model.policies(WEB.id)]
        done(policies.remove(name))
        allowed()
        self.assertEqual(model.firewall(WEB.id), OPEN)

    def test_one_without_a_name_is_refused_and_no_more_than_needed_is_kept_of_a_pod(self) -> None:
        model = Model()
        self.assertRaises(InvalidArgument, Policies(model).put, {**written.policy(), "metadata": {}})
        item = written.pod("client", "10.0.0.2")
        item["metadata"]["managedFields"] = [{"manager": "kubelet"}]
        self.assertNotIn("managedFields", Pods(model).trimmed(item)["metadata"])


class ToldTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.policies = ClusterPolicies(cast(Any, self.clock), cast(Any, None))
        self.told: list[frozenset[str]] = []
        self.policies.subscribe(self.told.append)

    def test_nobody_is_told_of_a_pod_that_is_gone_and_of_any_other_once(self) -> None:
        self.policies.add(WEB)
        self.policies._changed.update({WEB.id, "gone"})
        for _ in range(2):
            self.policies._renew()
        self.assertEqual(self.told, [frozenset({WEB.id})])

    def test_one_that_was_removed_has_nothing_although_the_model_has_it_until_its_turn(self) -> None:
        model = self.policies._model
        done(Policies(model).put(written.policy(ingress=[{}])))
        self.policies._present.add(WEB.id)
        model.add(WEB)
        done(model.settle(set()))
        self.assertEqual([each.name.name for each in self.policies.selecting(WEB.id)], ["policy"])
        self.assertIsNotNone(self.policies.firewall(WEB.id))
        self.patch(self.policies, "do", lambda steps: None)
        self.policies.remove(WEB.id)
        self.assertEqual(len(model.policies(WEB.id)), 1)
        self.assertEqual((self.policies.selecting(WEB.id), self.policies.firewall(WEB.id)), ([], None))

    def test_a_rest_has_an_end(self) -> None:
        model = self.policies._model

        def settle(changed: set[str]) -> Iterable[None]:
            self.clock.rightNow += 100.0
            yield

        self.patch(model, "settle", settle)
        done(self.policies._settle())
        self.assertEqual(self.policies._rested_at, self.clock.seconds() + MAX_REST_SECONDS)

    def test_a_warning_says_why_pods_are_closed_and_only_then(self) -> None:
        for complete, warnings in ((False, 1), (True, 0)):
            for kind in self.policies._kinds:
                kind.listed = complete
            with capturedLogs() as logged:
                self.policies._explain()
            self.assertEqual(len(logged), warnings)
