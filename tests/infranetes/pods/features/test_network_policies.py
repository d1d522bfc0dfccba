# SPDX-License-Identifier: Apache-2.0
"""A pod's containers start only when its NetworkPolicies are in force, and these are kept up to date."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from ipaddress import ip_network

from twisted.internet.defer import Deferred, fail, succeed
from twisted.trial.unittest import TestCase

from infranetes.pods.features.network_policies import (
    LONGEST_PAUSE,
    WAIT_SECONDS,
    FirewallEnforcer,
    PodFirewalls,
)
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.store.states import ContainerState
from infranetes.policies.interface import LocalPod
from infranetes.providers.interface import IFirewallsPods, InstanceSpec
from infranetes_common.concurrency import start
from infranetes_common.errors import NotFound, Unavailable
from infranetes_common.identity import Identity
from infranetes_common.pod_firewall import CLOSED, OPEN, Allowed, PodFirewall
from tests.contract.firewalled_pods import ClosedPodsContract, Talk
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.enforcing import Enforcing
from tests.infranetes.pods.fakes import FakeNode, box, pod

SOME = PodFirewall(ingress=(Allowed((ip_network("192.0.2.0/24"),)),))


class Policies:
    """The cluster's policies for the pods that were added."""

    trouble = ""

    def __init__(self) -> None:
        self.pods: dict[str, LocalPod] = {}
        self.firewalls: dict[str, PodFirewall] = {}
        self.tell: list[Callable[[frozenset[str]], None]] = []

    def add(self, pod: LocalPod) -> None:
        self.pods[pod.id] = pod

    def remove(self, id: str) -> None:
        self.pods.pop(id, None)

    def firewall(self, id: str) -> PodFirewall | None:
        return self.firewalls.get(id) if id in self.pods else None

    def subscribe(self, changed: Callable[[frozenset[str]], None]) -> None:
        self.tell.append(changed)

    def change(self, id: str, firewall: PodFirewall) -> None:
        self.firewalls[id] = firewall
        for each in self.tell:
            each(frozenset({id, "somebody else's"}))


class PoliciesCase(PodsTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.policies = Policies()
        self.patch(self.world, "made", self.begin_daemon)  # for later daemons
        self.begin_daemon()

    def begin_daemon(self) -> None:
        node = self.world.node
        self.enforcer = FirewallEnforcer(node.providers.of)
        self.firewalls = PodFirewalls(node.reactor, self.policies, self, lambda _: node.providers.own.ready)
        self.world.join(self.firewalls)

    def enforce(self, sandbox: Sandbox, firewall: PodFirewall) -> Deferred[None]:
        return self.enforcer.enforce(sandbox, firewall)

    def survives_reboot(self, sandbox: Sandbox) -> bool:
        return self.enforcer.survives_reboot(sandbox)

    def a_pod(self, name: str = "web", firewall: PodFirewall | None = None) -> str:
        config = pod(name)
        config.labels["app"] = "web"
        sandbox = self.run_pod(config)
        if firewall is not None:
            self.policies.change(sandbox, firewall)
        return sandbox

    def begin(self, sandbox: str) -> tuple[str, Deferred[None]]:
        """Begin to start a container. Return its id and the start's Deferred."""
        made = self.do(self.world.containers.create(sandbox, box()))
        return made, start(self.world.containers.start(made))

    def state(self, container: str) -> ContainerState:
        return self.world.node.inventory.containers[container].state


class NetworkPolicyTests(PoliciesCase):
    """With an enforcer that records the firewalls."""

    def setUp(self) -> None:
        self.said: list[tuple[str, PodFirewall]] = []
        self.answers: list[Deferred[None]] = []
        super().setUp()

    def enforce(self, sandbox: Sandbox, firewall: PodFirewall) -> Deferred[None]:
        self.said.append((sandbox.record.instance_id, firewall))
        return self.answers.pop(0) if self.answers else succeed(None)

    def test_a_pod_is_described_as_kubelet_has_described_it(self) -> None:
        sandbox = self.a_pod()
        metadata = pod("web").metadata
        told = self.policies.pods[sandbox]
        self.assertEqual((told.namespace, told.name, told.uid), (metadata.namespace, "web", metadata.uid))
        self.assertEqual(told.labels["app"], "web")

    def test_a_start_waits_until_they_are_in_force(self) -> None:
        answer: Deferred[None] = Deferred()
        self.answers.append(answer)
        sandbox = self.a_pod()
        made, starting = self.begin(sandbox)
        self.assertEqual(self.said, [])
        self.policies.change(sandbox, SOME)
        self.assertNoResult(starting)
        answer.callback(None)
        self.successResultOf(starting)
        self.assertIs(self.state(made), ContainerState.RUNNING)
        self.assertEqual([firewall for _, firewall in self.said], [SOME])

    def test_a_start_is_refused_without_them_and_can_be_tried_again(self) -> None:
        self.policies.trouble = "it may not list pods"
        sandbox = self.a_pod()
        made, starting = self.begin(sandbox)
        self.world.clock.advance(WAIT_SECONDS)
        error = self.failureResultOf(starting, Unavailable)
        self.assertIn("it may not list pods", str(error.value))
        self.assertIs(self.state(made), ContainerState.CREATED)
        self.policies.change(sandbox, CLOSED)
        self.do(self.world.containers.start(made))
        self.assertIs(self.state(made), ContainerState.RUNNING)

    def test_what_cannot_be_enforced_is_said_and_tried_again(self) -> None:
        self.answers = [fail(Unavailable("nft is broken")) for _ in range(2)]
        sandbox = self.a_pod(firewall=SOME)
        made, starting = self.begin(sandbox)
        self.assertNoResult(starting)
        firewalls = self.firewalls
        self.assertEqual((firewalls.in_force(sandbox), firewalls.trouble(sandbox)), (None, "nft is broken"))
        for _ in range(3):
            self.world.clock.advance(LONGEST_PAUSE / 3)
        self.successResultOf(starting)
        self.assertEqual((firewalls.in_force(sandbox), firewalls.trouble(sandbox)), (SOME, ""))
        self.assertEqual(len(self.said), 3)
        self.assertIs(self.state(made), ContainerState.RUNNING)

    def test_a_start_says_why_they_are_not_enforced(self) -> None:
        self.answers = [fail(NotFound("the VM is gone")) for _ in range(100)]
        _made, starting = self.begin(self.a_pod(firewall=SOME))
        for _ in range(100):
            self.world.clock.advance(WAIT_SECONDS / 100)
        self.assertIn("the VM is gone", str(self.failureResultOf(starting, Unavailable).value))
        for each in self.answers:
            each.addErrback(lambda _: None)

    def test_changes_are_enforced_and_what_is_the_same_is_not_said_again(self) -> None:
        sandbox = self.a_pod(firewall=CLOSED)
        for firewall in (CLOSED, SOME, SOME, OPEN, CLOSED):
            self.policies.change(sandbox, firewall)
        self.assertEqual([firewall for _, firewall in self.said], [CLOSED, SOME, OPEN, CLOSED])

    def test_what_changes_while_the_one_before_is_enforced_is_next_and_only_the_last(self) -> None:
        answer: Deferred[None] = Deferred()
        self.answers.append(answer)
        sandbox = self.a_pod(firewall=CLOSED)
        self.policies.change(sandbox, SOME)
        self.policies.change(sandbox, OPEN)
        self.assertEqual([firewall for _, firewall in self.said], [CLOSED])
        answer.callback(None)
        self.assertEqual([firewall for _, firewall in self.said], [CLOSED, OPEN])

    def test_one_pods_are_not_anothers(self) -> None:
        one, other = self.a_pod("one", CLOSED), self.a_pod("other", OPEN)
        self.policies.change(one, SOME)
        vms = {id: self.world.node.inventory.sandboxes[id].record.instance_id for id in (one, other)}
        self.assertEqual(self.said, [(vms[one], CLOSED), (vms[other], OPEN), (vms[one], SOME)])

    def test_they_are_kept_until_the_pod_is_stopped(self) -> None:
        sandbox = self.a_pod(firewall=CLOSED)
        for _ in range(2):
            self.do(self.world.sandboxes.stop(sandbox))
            self.assertEqual(self.policies.pods, {})
            self.policies.change(sandbox, OPEN)
        self.assertEqual([firewall for _, firewall in self.said], [CLOSED])

    def test_the_next_daemon_enforces_them_for_the_pods_that_it_finds(self) -> None:
        sandbox = self.a_pod(firewall=CLOSED)
        self.policies.firewalls.clear()
        self.world.restart()
        self.world.wait(5)
        made, starting = self.begin(sandbox)
        self.assertNoResult(starting)
        self.policies.change(sandbox, SOME)
        self.successResultOf(starting)
        self.assertIs(self.state(made), ContainerState.RUNNING)
        self.assertEqual([firewall for _, firewall in self.said], [CLOSED, SOME])


class PlaceTests(PoliciesCase):
    """Who enforces the policies."""

    def test_a_vm_that_nobody_guards_does_it_itself(self) -> None:
        sandbox = self.a_pod(firewall=CLOSED)
        self.policies.change(sandbox, SOME)
        self.assertEqual(self.world.agents[sandbox].firewalls, [CLOSED, SOME])

    def test_a_vm_that_was_away_is_told_again_as_it_may_have_been_booted_anew(self) -> None:
        sandbox = self.a_pod(firewall=SOME)
        agent = self.world.agents[sandbox]
        told = len(agent.firewalls)
        agent.go_away()
        self.policies.change(sandbox, CLOSED)
        self.world.wait(10)
        agent.away = False
        self.world.wait(60)
        self.assertGreater(len(agent.firewalls), told)
        self.assertEqual(agent.firewalls[-1], CLOSED)
        told = len(agent.firewalls)
        agent.go_away()
        agent.away = False
        self.world.wait(60)
        self.assertEqual(agent.firewalls[told:], [CLOSED])

    def test_a_provider_that_can_does_it_and_the_vm_is_not_asked(self) -> None:
        provider = self.world.provider = Enforcing(self.world)
        self.world.restart()
        sandbox = self.a_pod(firewall=SOME)
        instance = self.world.node.inventory.sandboxes[sandbox].record.instance_id
        self.assertEqual(provider.said, {instance: [SOME]})
        agent = self.world.agents[sandbox]
        agent.go_away()
        agent.away = False
        self.world.wait(60)
        self.assertEqual(provider.said, {instance: [SOME]})
        self.assertEqual(agent.firewalls, [])


class EnforcingTests(ClosedPodsContract, TestCase):
    """The provider that enforces firewalls in these tests keeps the contract."""

    stranger = "192.0.2.1"
    PORT = 2475

    async def enforcer(self) -> IFirewallsPods:
        self.provider = Enforcing(FakeNode())
        return self.provider

    async def machine(self, enforcer: IFirewallsPods) -> str:
        identity = Identity(secrets.token_hex(16), "", "", "")
        spec = InstanceSpec(secrets.token_hex(16), identity.sandbox_id, "c", "n", identity)
        return (await self.provider.launch(spec)).id

    async def next_daemon(self, enforcer: IFirewallsPods) -> IFirewallsPods:
        return enforcer  # its firewalls do not depend on the daemon

    async def idle_daemon(self, enforcer: IFirewallsPods) -> IFirewallsPods:
        self.provider.idle = True
        return enforcer

    async def destroy(self, enforcer: IFirewallsPods, machine: str) -> None:
        await self.provider.destroy(machine)

    def break_enforcing(self) -> Callable[[], None]:
        self.provider.broken = True
        return lambda: setattr(self.provider, "broken", False)

    async def port(self, machine: str) -> int:
        return self.PORT

    async def reaches(self, machine: str, by_node: bool, expected: bool) -> bool:
        return by_node or self.provider.lets_in(machine, self.stranger, self.PORT)

    async def talk(self, machine: str) -> Talk:
        return Judged(lambda: self.provider.lets_in(machine, self.stranger, self.PORT))


class Judged:
    """A connection that lasts as long as a new one would be allowed."""

    def __init__(self, allowed: Callable[[], bool]) -> None:
        self._allowed = allowed

    async def goes_on(self, expected: bool) -> bool:
        return self._allowed()
