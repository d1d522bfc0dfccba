# SPDX-License-Identifier: Apache-2.0
"""Certificates are replaced long before they expire, by a clock that the test controls."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.defer import Deferred
from zope.interface import alsoProvides

from infranetes.machines.context import VmFacts
from infranetes.machines.pod_machine import is_due
from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.machines.renewal import AT_A_TIME, LATEST_SECONDS, SOON_SECONDS
from infranetes.providers.interface import IGivesIdentityPrivately, IReachesAgents
from infranetes_common.errors import FailedPrecondition
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_agent import FakeAgent
from tests.infranetes.pods.fakes import FakeNode, pod

LIFETIME = 1000.0


class RenewalTests(PodsTestCase):
    def setUp(self) -> None:
        self.world = FakeNode(
            certificate=LIFETIME, pool=PoolConfig(sizes=(PoolSize(count=1),)), launch=60.0, sweep=1e6
        )
        self.world.provider_ready()
        self.addCleanup(self.world.kill)
        # A pod that says how its VM is to be made does not get one from the pool.
        self.own = self.run_pod(pod("own", annotations={"infranetes.io/size": "x"}))
        self.world.wait(SOON_SECONDS - 0.5)
        self.assertEqual(self.certificates(self.own), [], "launches that began together come first")
        self.world.wait(0.5)

    def certificates(self, id: str) -> list[str]:
        return self.world.agents[id].certificates

    def until(self, id: str) -> float:
        return float(self.record(id).certificate_until / 1e9)

    def test_a_pod_has_a_key_of_its_own_as_soon_as_it_is_one(self) -> None:
        spec = next(each for each in self.world.provider.specs if each.sandbox_id == self.own)
        (certificate,) = self.certificates(self.own)
        self.assertNotEqual(certificate, spec.identity.certificate_pem)
        self.assertEqual(self.until(self.own), self.world.clock.seconds() + LIFETIME)
        self.assertTrue(self.record(self.own).certificate_key)

    def test_it_is_replaced_after_half_of_its_life_and_again(self) -> None:
        self.world.wait(LIFETIME / 4, step=5)
        self.assertEqual(len(self.certificates(self.own)), 1)
        for count in (2, 3, 4):
            self.world.wait(LIFETIME / 2 + 60, step=5)
            self.assertGreaterEqual(len(self.certificates(self.own)), count)
            self.assertGreater(self.until(self.own), self.world.clock.seconds() + LIFETIME / 3)

    def test_so_are_those_of_the_pool(self) -> None:
        (member,) = self.world.node.pools.own.idle()
        self.world.wait(LIFETIME, step=5)
        self.assertGreaterEqual(len(self.certificates(member.id)), 2)
        (record,) = self.world.store.contents().pool
        self.assertGreater(record.certificate_until / 1e9, self.world.clock.seconds() + LIFETIME / 3)

    def test_an_agent_that_can_not_be_reached_is_asked_again_when_it_can(self) -> None:
        agent = self.world.agents[self.own]
        agent.go_away()
        self.world.wait(LIFETIME * 3, step=5)
        self.assertEqual(len(agent.certificates), 1)
        agent.away = False
        self.world.wait(120, step=1)
        self.assertEqual(len(agent.certificates), 2)

    def test_one_that_refuses_hinders_no_other(self) -> None:
        other = self.run_pod(pod("other", annotations={"infranetes.io/size": "x"}))

        async def refuse(certificate: str, within: float = 30.0) -> None:
            raise FailedPrecondition("not now")

        self.patch(self.world.agents[self.own], "rekey", refuse)
        self.world.wait(LIFETIME, step=5)
        self.assertEqual(len(self.certificates(self.own)), 1)
        self.assertGreaterEqual(len(self.certificates(other)), 2)

    def test_an_unforeseen_error_of_one_hinders_no_other_and_is_told(self) -> None:
        other = self.run_pod(pod("other", annotations={"infranetes.io/size": "x"}))

        async def fail(certificate: str, within: float = 30.0) -> None:
            raise ZeroDivisionError("unforeseen")

        restored = self.patch(self.world.agents[self.own], "rekey", fail)
        self.world.wait(LIFETIME, step=5)
        self.assertTrue(self.flushLoggedErrors(ZeroDivisionError))
        self.assertGreaterEqual(len(self.certificates(other)), 2)
        restored.restore()
        self.world.wait(LIFETIME, step=5)
        self.assertGreaterEqual(len(self.certificates(self.own)), 2)

    def test_an_unforeseen_error_of_a_whole_pass_ends_that_pass_alone(self) -> None:
        def fail() -> None:
            raise ZeroDivisionError("unforeseen")

        restored = self.patch(self.world.node.pools.own, "idle", fail)
        self.world.wait(LIFETIME / 4, step=5)
        self.assertTrue(self.flushLoggedErrors(ZeroDivisionError))
        restored.restore()
        self.world.wait(LIFETIME, step=5)
        self.assertGreaterEqual(len(self.certificates(self.own)), 2)

    def test_a_daemon_that_stops_ends_the_pass_that_is_under_way(self) -> None:
        asked: list[str] = []
        held: Deferred[None] = Deferred()

        async def rekey(certificate: str, within: float = 30.0) -> None:
            asked.append(certificate)
            await held

        self.patch(self.world.agents[self.own], "rekey", rekey)
        self.world.wait(LIFETIME, step=5)
        self.assertEqual(len(asked), 1)
        self.world.stop()
        if not held.called:
            held.callback(None)
        self.world.wait(LIFETIME, step=5)
        self.assertEqual(len(asked), 1)

    def test_that_of_a_busy_pod_waits_also_for_the_passes(self) -> None:
        """Its first certificate is due at once, and would be replaced while its containers start."""
        self.world.wait(LIFETIME * 0.6, step=5)
        before = len(self.certificates(self.own))
        machine = self.world.node.inventory.sandbox(self.own).machine
        busy = True
        self.world.node.renewal.soon(machine, lambda: busy)
        self.world.wait(LATEST_SECONDS - 10, step=5)
        self.assertEqual(len(self.certificates(self.own)), before)
        busy = False
        self.world.wait(SOON_SECONDS)
        self.assertEqual(len(self.certificates(self.own)), before + 1)

    def test_the_next_daemon_goes_on_with_it(self) -> None:
        self.world.restart()
        self.world.wait(LIFETIME / 4, step=5)
        self.assertEqual(len(self.certificates(self.own)), 1)
        self.world.wait(LIFETIME / 2, step=5)
        self.assertEqual(len(self.certificates(self.own)), 2)

    def test_one_that_is_being_replaced_is_not_replaced_beside_that(self) -> None:
        agent = self.world.agents[self.own]
        real, held, keys = agent.new_key, Deferred[None](), 0

        async def new_key(within: float = 30.0) -> bytes:
            nonlocal keys
            keys += 1
            await held
            return await real(within)

        self.patch(agent, "new_key", new_key)
        self.world.wait(LIFETIME, step=5)
        self.assertEqual(keys, 1)
        held.callback(None)
        self.world.wait(LIFETIME / 2 + 60, step=5)
        self.assertEqual(keys, 2)

    def test_no_more_than_some_are_replaced_at_a_time(self) -> None:
        held: Deferred[None] = Deferred()
        asked: list[str] = []

        async def new_key(agent: FakeAgent, within: float = 30.0) -> bytes:
            asked.append(agent.sandbox_id)
            await held
            return agent.sandbox_id.encode()

        for number in range(AT_A_TIME + 2):
            self.run_pod(pod(f"p{number}", annotations={"infranetes.io/size": "x"}))
        self.patch(FakeAgent, "new_key", new_key)
        self.world.wait(SOON_SECONDS)
        self.assertEqual(len(asked), AT_A_TIME)
        held.callback(None)
        self.assertEqual(len(set(asked)), AT_A_TIME + 2)

    def test_those_made_together_are_not_all_due_together(self) -> None:
        facts = VmFacts.of(self.record(self.own))
        due = [
            is_due(
                attrs.evolve(facts, id=f"{number:04x}" + "0" * 28),
                facts.certificate_until / 1e9 - 550,
                LIFETIME,
            )
            for number in range(0, 0x10000, 0x1000)
        ]
        self.assertIn(True, due)
        self.assertIn(False, due)
        first = attrs.evolve(facts, id="0" * 32, certificate_until=2000 * 10**9)
        self.assertEqual([is_due(first, now, LIFETIME) for now in (1500.0, 1501.0)], [False, True])


class PrivateTests(PodsTestCase):
    """A provider that hands over identities so that nobody else can read them."""

    def setUp(self) -> None:
        self.world = FakeNode(
            certificate=LIFETIME, pool=PoolConfig(sizes=(PoolSize(count=1),)), launch=60.0, sweep=1e6
        )
        alsoProvides(self.world.provider, IGivesIdentityPrivately)
        self.world.provider_ready()
        self.addCleanup(self.world.kill)

    def test_the_first_certificate_stays_until_it_is_due(self) -> None:
        (member,) = self.world.node.pools.own.idle()
        own = self.run_pod(pod("own", annotations={"infranetes.io/size": "x"}))
        self.world.wait(2 * SOON_SECONDS)
        self.assertEqual([self.world.agents[id].certificates for id in (member.id, own)], [[], []])
        self.world.wait(LIFETIME, step=5)
        self.assertTrue(self.world.agents[own].certificates)


class ReachedTests(PodsTestCase):
    """A provider that reaches its VMs' agents by a channel of the hypervisor."""

    def setUp(self) -> None:
        self.world = FakeNode(
            certificate=LIFETIME, pool=PoolConfig(sizes=(PoolSize(count=1),)), launch=60.0, sweep=1e6
        )
        alsoProvides(self.world.provider, IReachesAgents)
        provider: Any = self.world.provider
        provider.agent_endpoint = lambda instance_id: None if instance_id in self.by_tls else object()
        self.by_tls: set[str] = set()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)

    def test_no_certificate_is_replaced_that_nobody_looks_at(self) -> None:
        own = self.run_pod(pod("own", annotations={"infranetes.io/size": "x"}))
        earlier = self.run_pod(pod("earlier", annotations={"infranetes.io/size": "x"}))
        self.by_tls.add(self.record(earlier).instance_id)
        self.world.wait(LIFETIME, step=5)
        self.assertTrue(self.world.agents[earlier].certificates)
        del self.world.agents[earlier]
        self.assertEqual({id for id, agent in self.world.agents.items() if agent.certificates}, set())
        self.assertIn(own, self.world.agents)
