# SPDX-License-Identifier: Apache-2.0
"""A pod's containers start only when its VM has the rules of Services."""

from __future__ import annotations

from collections.abc import Mapping

from twisted.internet.defer import Deferred

from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.machines.pooled import RULES_SECONDS
from infranetes.pods.features import services as service_rules
from infranetes.pods.store.states import ContainerState
from infranetes_common.concurrency import start
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_services import FakeNodeServices, FakeSender, FakeServices
from tests.infranetes.pods.fakes import FakeNode, box, pod
from tests.infranetes.pods.features.test_guests import GuestCase


class PooledTests(PodsTestCase):
    """VMs in the pool have the rules before they are claimed."""

    def setUp(self) -> None:
        self.world = FakeNode(pool=PoolConfig(sizes=(PoolSize(count=1),)), launch=100.0)
        self.services = self.world.services = self.world.node_provider.services = FakeServices()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)

    def idle(self) -> int:
        return len(self.world.node.pools.own.idle())

    def test_a_vm_is_no_pods_before_it_has_them(self) -> None:
        self.assertEqual(self.idle(), 0)
        self.services.senders[0].told.succeed(None)
        self.assertEqual(self.idle(), 1)
        self.assertEqual([each.running for each in self.services.senders], [True])

    def test_it_does_not_wait_for_ever(self) -> None:
        self.world.clock.advance(RULES_SECONDS)
        self.assertEqual(self.idle(), 1)


class ServiceRulesTests(PodsTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.services = self.world.services = self.world.node_provider.services = FakeServices()

    def a_pod(self, name: str = "web", annotations: Mapping[str, str] | None = None) -> str:
        config = pod(name)
        config.annotations.update(annotations or {})
        return self.run_pod(config)

    def begin(self, sandbox: str) -> tuple[str, Deferred[None]]:
        """Begin to start a container. Return its id and the start's Deferred."""
        made = self.do(self.world.containers.create(sandbox, box()))
        return made, start(self.world.containers.start(made))

    def test_a_start_waits_until_the_vm_has_them(self) -> None:
        made, starting = self.begin(self.a_pod())
        self.assertNoResult(starting)
        self.services.senders[0].told.succeed(None)
        self.successResultOf(starting)
        self.assertIs(self.world.node.inventory.containers[made].state, ContainerState.RUNNING)

    def test_it_does_not_wait_for_ever(self) -> None:
        _made, starting = self.begin(self.a_pod())
        self.world.clock.advance(service_rules.WAIT_SECONDS)
        self.successResultOf(starting)

    def test_a_pod_that_says_no_is_told_nothing(self) -> None:
        for annotation in ("infranetes.io/service-proxy", "infranetes.startproxy"):
            _made, starting = self.begin(self.a_pod(annotation, {annotation: "false"}))
            self.successResultOf(starting)
        self.assertEqual(self.services.senders, [])

    def test_a_vm_is_told_until_its_pod_is_stopped(self) -> None:
        sandbox = self.a_pod()
        self.assertEqual([each.running for each in self.services.senders], [True])
        self.do(self.world.sandboxes.stop(sandbox))
        self.assertEqual([each.running for each in self.services.senders], [False])

    def test_the_next_daemon_tells_the_vms_that_it_finds(self) -> None:
        self.a_pod()
        self.world.restart()
        self.world.wait(5)
        self.assertEqual(len(self.services.senders), 2)
        self.assertTrue(self.services.senders[1].running)


class GuestTests(GuestCase):
    """Guests without our agent, for which the node translates."""

    def setUp(self) -> None:
        super().setUp()
        self.services = self.world.services = self.world.node_provider.services = FakeServices()
        self.on_node = self.world.node_provider.node_services = FakeNodeServices()

    def test_its_start_waits_for_the_rules_on_the_node_whatever_the_pod_says(self) -> None:
        for name, said in (("web", {}), ("declines", {"infranetes.io/service-proxy": "false"})):
            config = pod(name)
            config.annotations.update(said)
            _, container = self.created(config)
            starting = start(self.world.containers.start(container))
            self.assertNoResult(starting)
            self.on_node.rules.told.succeed(None)
            self.successResultOf(starting)
            self.on_node.rules = FakeSender()
        self.assertEqual(self.services.senders, [])

    def test_neither_a_pod_nor_a_daemon_that_stops_ends_them(self) -> None:
        self.on_node.rules.told.succeed(None)
        sandbox, _ = self.running()
        self.run_pod(pod("other"))
        self.do(self.world.sandboxes.stop(sandbox))
        self.world.stop()
        self.assertEqual(self.on_node.rules.stopped, 0)
